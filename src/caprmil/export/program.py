"""Programs: what is exported of a model, and which models cannot be."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from caprmil.errors import ExportError
from caprmil.models import CAPRMIL, DGRMIL, DTFDMIL, SGPMIL, BayesMIL, MILModel, TransMIL

_BY_SIZE = (
    "lays a bag out by its size, with or without padding, and a program for bags of any size "
    "cannot take several ways"
)
CANNOT: dict[type[MILModel], str] = {
    TransMIL: _BY_SIZE,
    DGRMIL: _BY_SIZE,
    DTFDMIL: "splits a bag by a random draw, and no other program draws the same",
    SGPMIL: "draws at random for each patch, and factors a covariance in as many tries as it takes",
}


class Program(nn.Module):
    """One bag in, `features` (patches x width); what the outputs are says `outputs`.

    It answers as the model does, or as the mean of several models.
    """

    def __init__(self, models: Sequence[MILModel]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.width = models[0].in_dim
        self.called = type(models[0]).__name__
        self.eval().requires_grad_(False)

    @property
    def parts(self) -> list[MILModel]:
        return [cast(MILModel, model) for model in self.models]

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs. Tokens of several models have nothing to do with each other."""
        blocks = 0
        if len(self.parts) == 1 and isinstance(self.parts[0], CAPRMIL):
            blocks = len(self.parts[0].context.blocks)
        assignments = [f"assignments_{number + 1}" for number in range(blocks)]
        return ["probabilities", "logits", "attention", *assignments]

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        answers = [ask(model, features[None]) for model in self.parts]
        if len(answers) == 1:
            return answers[0]
        probabilities, attention = (
            torch.stack([answer[at] for answer in answers]).mean(dim=0) for at in (0, 2)
        )
        return probabilities, probabilities.log(), attention

    def refuse(self) -> None:
        """Raise if a model, or one inside it, cannot be a program for bags of any size."""
        for model in self.modules():
            if isinstance(model, BayesMIL) and model.draws and not model.spatial:
                raise ExportError(
                    "BayesMIL draws at random for each patch, and no other program draws the "
                    "same. Pass --set draws=0: then the means answer, near but not the same."
                )
            reason = next((why for kind, why in CANNOT.items() if isinstance(model, kind)), None)
            if isinstance(model, BayesMIL) and model.spatial:
                reason = "finds neighbours in a list of cells that is as long as a bag makes it"
            if reason:
                raise ExportError(
                    f"{type(model).__name__} cannot be exported: it {reason}. Use caprmil predict, "
                    "or train a model that can be: caprmil, mean, abmil, clam, dsmil."
                )


def ask(model: MILModel, features: Tensor) -> tuple[Tensor, ...]:
    """Answer one bag without what a model has for padding and for bags in pieces."""
    if type(model).forward_bags is MILModel.forward_bags:
        output = model.forward_bag(features, None)
    else:
        every = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
        output = model.forward_bags(features, every, None)
    logits, assignments = output.logits[0], [each[0] for each in output.assignments]
    return logits.softmax(dim=-1), logits, output.attention[0], *assignments
