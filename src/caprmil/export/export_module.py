"""The module that is exported: takes one bag of any size, returns the answer and attention.

A model with covariates takes them as a second input: the numbers that they are encoded as.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from caprmil.errors import ExportError
from caprmil.models import MODELS, FusedModel, MILModel, Output
from caprmil.targets import Target


class ExportModule(nn.Module):
    """A model, or the mean of several. The input is one bag, `features` (patches x width).

    `inputs` and `outputs` are the names of the inputs and outputs.
    """

    def __init__(self, models: Sequence[MILModel], targets: Sequence[Target]) -> None:
        super().__init__()
        self.targets = list(targets)
        self.models = nn.ModuleList(models)
        self.width = models[0].in_dim
        first = models[0]
        self.model_name = type(first).__name__
        self.columns: list[dict[str, Any]] = []
        if isinstance(first, FusedModel):
            if len(models) > 1:
                raise ExportError(
                    "Models with covariates are not exported as one file: each fold standardises "
                    "them by its own training slides. Export the folds, and take their mean."
                )
            self.model_name, self.columns = first.title, list(first.settings["columns"])
        self.eval().requires_grad_(False)

    @property
    def n_covariates(self) -> int:
        """The numbers that covariates are encoded as; 0 if the model reads none."""
        return sum(column["width"] for column in self.columns)

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        return ["features", *(["covariates"] if self.columns else [])]

    @property
    def mil_models(self) -> list[MILModel]:
        return [cast(MILModel, model) for model in self.models]

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs. Several models have none for tokens: theirs do not match."""
        n_assignments = self.mil_models[0].n_assignments if len(self.models) == 1 else 0
        assignments = [f"assignments_{number + 1}" for number in range(n_assignments)]
        return [self.targets[0].answer_name, "logits", "attention", *assignments]

    def forward(self, features: Tensor, covariates: Tensor | None = None) -> tuple[Tensor, ...]:
        pairs = zip(self.mil_models, self.targets, strict=True)
        results = [_answer(model, target, features[None], covariates) for model, target in pairs]
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


def _answer(
    model: MILModel, target: Target, features: Tensor, covariates: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the outputs for one bag."""
    if isinstance(model, FusedModel):
        assert covariates is not None
        output = model.fuse(_forward_bag(model.image, features), covariates[None])
    else:
        output = _forward_bag(model, features)
    logits, assignments = output.logits[0], [each[0] for each in output.assignments]
    return target.answer(logits), logits, output.attention[0], *assignments


def _forward_bag(model: MILModel, features: Tensor) -> Output:
    """Return the output for one bag, without the model's code for padding and chunks."""
    if type(model).forward_bags is MILModel.forward_bags:
        return model.forward_bag(features, None)
    mask = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
    return model.forward_bags(features, mask, None)
