"""Ordinal grades: one of several grades per slide, which have an order.

A model has an output for each step from a grade to the next. Its sigmoid is the probability of a
grade above k, if the grade is at least k (CORN: Shi, Cao and Raschka, "Deep Neural Networks for
Rank-Consistent Ordinal Regression Based on Conditional Probabilities", 2023). The probability of a
grade above k is the product of these up to k: it never rises with k, whatever the outputs are.

CORAL (Cao, Mirjalili and Raschka, 2020) has one score for all steps, and a threshold for each. If
cumulative logits are linear in the patches and never cross, they are parallel, as in CORAL: the
evidence for a grade above 1 and for a grade above 4 would be one and the same map. In CORN every
step has its own evidence, and any model with several outputs can be trained, unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import shorten
from caprmil.io.findings import Findings
from caprmil.io.tables import is_number
from caprmil.targets.classification import Classification
from caprmil.targets.conformal import Conformal, GradeSets
from caprmil.targets.metric import register_metric
from caprmil.targets.ordinal_metrics import ORDINAL_METRICS
from caprmil.targets.target import Answers, Contrast, Criterion, Label, Labels

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ordinal(Classification):
    """One of several grades per slide, from low to high. The answer is the probability of each.

    The predicted grade is the likeliest, as in a classification: tables of both are compared by the
    same rule. `classes` are the grades from low to high. Without it, they must be numbers.
    """

    kind: ClassVar[str] = "ordinal"
    noun: ClassVar[str] = "grades"
    has_classes: ClassVar[bool] = False  # an output belongs to a step between two grades
    strata_title: ClassVar[str] = "Grades"
    class_name: ClassVar[str] = "grade"
    contrast_name: ClassVar[str] = "step"
    lead_name: ClassVar[str] = "log odds of the step to the predicted grade"
    turn_name: ClassVar[str] = "another grade is predicted"
    display: ClassVar[str] = "grades"
    headline: ClassVar[str] = "kappa"
    second: ClassVar[str] = "grade_mae"

    def __str__(self) -> str:
        return f"{len(self.classes)} grades"

    # Labels

    def read(
        self, cells: Mapping[str, str], column: str, found: Findings, *, required: bool
    ) -> tuple["Ordinal", dict[str, Label]]:
        words = {cell for cell in cells.values() if self.is_label(cell)}
        if not self.classes and (odd := sorted(w for w in words if not is_number(w))):
            found.problems.append(
                f"The order of the grades in column {column} is not known: {shorten(odd)}. Name "
                f"them from low to high: {self._example(words)}"
            )
        target, labels = super().read(cells, column, found, required=required)
        assert isinstance(target, Ordinal)
        return target, labels

    def _example(self, words: set[str]) -> str:
        if len(words) > 10:
            return "[target] classes = [lowest, ..., highest]."
        shown = ", ".join(f'"{word}"' for word in sorted(words))
        return f"[target] classes = [{shown}], in the right order."

    # Patients

    @property
    def has_order(self) -> bool:
        return True

    def heights(self, answers: Answers) -> NDArray[np.floating]:
        """Return the expected grade: the mean number of the grade by its probabilities."""
        found: NDArray[np.floating] = answers @ np.arange(len(self.classes))
        return found

    # Models

    @property
    def n_outputs(self) -> int:
        """One for each step from a grade to the next."""
        return len(self.classes) - 1

    def criterion(self, labels: Sequence[Label]) -> Criterion:
        """Return -log of the probability of a bag's grade, a mean over bags.

        These are the binary cross-entropies of the steps that the grade answers: of step k, only
        for bags of at least grade k. Steps are not divided by their numbers in a batch, so that the
        loss of a bag does not depend on the others.
        """
        import torch

        weights = None
        if self.class_weights == "balanced":
            n = len(self.classes)
            counts = np.bincount([int(label) for label in labels], minlength=n)
            weights = torch.from_numpy(len(labels) / n / np.maximum(counts, 1))

        def loss(outputs: "Tensor", grades: "Tensor") -> "Tensor":
            logs = _log_probabilities(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
            losses = -logs.gather(-1, grades[:, None]).squeeze(-1)
            if weights is not None:
                losses = losses * weights.to(losses)[grades]
            return losses.mean()

        return loss

    def answer(self, outputs: "Tensor") -> "Tensor":
        return _log_probabilities(outputs).exp()

    # Guarantees

    risk_title: ClassVar[str] = "MAE of grade"

    @property
    def conformal(self) -> Conformal:
        return GradeSets(self.classes)

    def losses(self, labels: Labels, answers: Answers) -> NDArray[np.float64]:
        return np.abs(answers.argmax(axis=1) - labels).astype(np.float64)

    # Evidence

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        """Each step: the logit of a grade above k, if it is at least k."""

        def step(of: int) -> Any:
            return lambda outputs: outputs[..., of]

        return tuple(
            Contrast(
                name=f"a grade above {name}",
                against=f"against grade {name}, for a grade of at least {name}",
                of=step(number),
                total=f"log odds of a grade above {name} given that it is at least {name}",
                ends=(f"grade {name}", f"above {name}"),
            )
            for number, name in enumerate(self.classes[:-1])
        )

    def followed(self, answer: Any) -> Any:
        """Return the probability of a grade above each but the highest."""
        grades = range(1, len(self.classes))
        above = [answer[..., grade:].sum(-1) for grade in grades]
        if isinstance(answer, np.ndarray):
            return np.stack(above, axis=-1)
        import torch

        return torch.stack(above, dim=-1)

    def contrast_of(self, answer: NDArray[np.floating]) -> int:
        """Return the step to the predicted grade; of the lowest grade, the step that it lacks."""
        return max(int(answer.argmax()) - 1, 0)

    def sign_of(self, answer: NDArray[np.floating]) -> int:
        """Return -1 for the lowest grade: patches against a higher one support it."""
        return 1 if answer.argmax() > 0 else -1


def _log_probabilities(outputs: "Tensor") -> "Tensor":
    """Return the logarithm of the probability of each grade (..., C), from outputs (..., C - 1)."""
    import torch.nn.functional as F

    reached = F.pad(F.logsigmoid(outputs).cumsum(dim=-1), (1, 0))  # of at least each grade
    stopped = F.pad(F.logsigmoid(-outputs), (0, 1))  # of none above it, once it is reached
    return reached + stopped


for _metric in ORDINAL_METRICS:
    register_metric("ordinal", _metric)
