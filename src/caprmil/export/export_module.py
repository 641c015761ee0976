"""The module that is exported: takes one bag of any size, returns the answer and attention."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from caprmil.errors import ExportError
from caprmil.models import MODELS, MILModel
from caprmil.targets import Target


class ExportModule(nn.Module):
    """A model, or the mean of several. The input is one bag, `features` (patches x width).

    `outputs` are the names of the outputs.
    """

    def __init__(self, models: Sequence[MILModel], targets: Sequence[Target]) -> None:
        super().__init__()
        self.targets = list(targets)
        self.models = nn.ModuleList(models)
        self.width = models[0].in_dim
        self.model_name = type(models[0]).__name__
        self.eval().requires_grad_(False)

    @property
    def mil_models(self) -> list[MILModel]:
        return [cast(MILModel, model) for model in self.models]

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs. Several models have none for tokens: theirs do not match."""
        n_assignments = self.mil_models[0].n_assignments if len(self.models) == 1 else 0
        assignments = [f"assignments_{number + 1}" for number in range(n_assignments)]
        return [self.targets[0].answer_name, "logits", "attention", *assignments]

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(self.mil_models, self.targets, strict=True)
        results = [_forward_bag(model, target, features[None]) for model, target in pairs]
        if len(results) == 1:
            return results[0]
        answer, logits, attention = (
            torch.stack([result[number] for result in results]).mean(dim=0) for number in range(3)
        )
        # The mean of probabilities has its own logits.
        return answer, answer.log() if self.targets[0].has_classes else logits, attention

    def check_exportable(self) -> None:
        """Raise if a model, or a model inside it, cannot be exported for bags of any size."""
        for model in self.modules():
            if isinstance(model, MILModel) and (problem := model.export_problem):
                without = [
                    name
                    for name, kind in MODELS.items()
                    if kind.export_problem is MILModel.export_problem
                ]
                raise ExportError(
                    f"{type(model).__name__} cannot be exported: it {problem}. Use caprmil "
                    f"predict, or train a model that can be exported: {', '.join(without)}."
                )


def _forward_bag(model: MILModel, target: Target, features: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs for one bag, without the model's code for padding and chunks."""
    if type(model).forward_bags is MILModel.forward_bags:
        output = model.forward_bag(features, None)
    else:
        mask = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
        output = model.forward_bags(features, mask, None)
    logits, assignments = output.logits[0], [each[0] for each in output.assignments]
    return target.answer(logits), logits, output.attention[0], *assignments
