"""Regression: one number per slide."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, RecipeError
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.tables import is_known, is_number
from caprmil.targets.metric import register_metric
from caprmil.targets.regression_metrics import REGRESSION_METRICS
from caprmil.targets.target import Answers, Contrast, Criterion, Label, Labels, Target

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

PREDICTED = ("predicted", "pred", "prediction", "y_pred", "y_hat")
QUARTERS = ("lowest quarter", "second quarter", "third quarter", "highest quarter")


@dataclass(frozen=True, kw_only=True)
class Regression(Target):
    """One number per slide. The answer is the predicted number, in the units of the labels.

    A model predicts standardised numbers. Mean and standard deviation are those of the training
    labels of its fold.
    """

    loss: Literal["l1", "l2", "huber"] = "huber"
    """Of standardised numbers. huber: squared below 1 standard deviation, absolute above."""
    mean: float = 0.0
    std: float = 1.0
    """Of the training labels. Set by `fit`, not in a recipe."""

    kind: ClassVar[str] = "regression"
    answer_name: ClassVar[str] = "predicted"
    display: ClassVar[str] = "value"
    turn_name: ClassVar[str] = (
        "the predicted value moves by more than half of its distance from the mean label, and by "
        "more than half of a standard deviation of the labels"
    )
    headline: ClassVar[str] = "r2"
    second: ClassVar[str] = "mae"
    missing: ClassVar[Label] = float("nan")
    strata_title: ClassVar[str] = "Quarters of the labels"
    n_outputs = 1
    columns = ("predicted",)

    def __post_init__(self) -> None:
        if self.loss not in ("l1", "l2", "huber"):
            raise RecipeError(f"[target] loss is {self.loss!r}, and must be l1, l2 or huber.")
        if not (np.isfinite(self.mean) and np.isfinite(self.std) and self.std > 0):
            raise RecipeError(f"[target] mean {self.mean} and std {self.std} cannot be used.")

    # Labels

    def read(
        self, cells: Mapping[str, str], column: str, found: Findings, *, required: bool
    ) -> tuple["Regression", dict[str, Label]]:
        if (self.mean, self.std) != (0.0, 1.0):
            raise RecipeError(
                "[target] mean and std are those of a fold's training labels, and cannot be set. "
                "Remove them."
            )
        labels: dict[str, Label] = {
            name: float(cell)
            for name, cell in cells.items()
            if is_known(cell) and is_number(cell) and np.isfinite(float(cell))
        }
        report = found.problem if required else found.note
        blank = {name: cell for name, cell in cells.items() if not is_known(cell)}
        advice = f"Fill column {column}, or remove their rows."
        report("Slides without a label", tables.with_cells(blank), advice)
        odd = [f"{n} ({cell})" for n, cell in cells.items() if is_known(cell) and n not in labels]
        advice = 'Correct them, or set [target] kind = "classification" for classes.'
        found.problem("Slides with a label that is not a number", odd, advice)
        if required and len(labels) and len(set(labels.values())) == 1:
            found.problems.append(
                f"Column {column} has the same number everywhere: {next(iter(labels.values())):g}. "
                "Set [data] label if the label is in another column."
            )
        return self, labels

    def strata(self, labels: Mapping[str, Label]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return quarters of the labels, so that folds cover the same range."""
        values = np.array(list(labels.values()))
        edges = np.unique(np.quantile(values, [0.25, 0.5, 0.75])) if len(values) else values
        codes = np.searchsorted(edges, values, side="right")
        # Where many labels are equal, e.g. 0, a quarter has none.
        used, numbers = np.unique(codes, return_inverse=True)
        names = tuple(QUARTERS[code] for code in used)
        return dict(zip(labels, numbers.tolist(), strict=True)), names

    def known(self, labels: Labels) -> NDArray[np.bool_]:
        return ~np.isnan(labels)

    def as_labels(self, labels: Iterable[Label | None]) -> Labels:
        return np.array([np.nan if label is None else label for label in labels], dtype=np.float64)

    def check_labels(self, labels: Labels) -> None:
        if np.isinf(labels).any():
            raise ValueError(f"Labels are numbers, or NaN for none. {labels=}")

    def show_label(self, label: Label) -> str:
        return "" if np.isnan(label) else repr(float(label))

    def parse_label(self, cell: str) -> Label:
        if not is_number(cell) or not np.isfinite(float(cell)):
            raise ValueError(f"label '{cell}' is not a number.")
        return float(cell)

    # Models

    def fit(self, labels: Sequence[Label]) -> "Regression":
        values = np.array(labels, dtype=np.float64)
        return replace(self, mean=float(values.mean()), std=float(values.std()) or 1.0)

    def criterion(self, labels: Sequence[Label]) -> Criterion:
        return self._loss

    def _loss(self, outputs: "Tensor", values: "Tensor") -> "Tensor":
        import torch
        import torch.nn.functional as F

        losses: dict[str, Any] = {"l1": F.l1_loss, "l2": F.mse_loss, "huber": F.huber_loss}
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        standardised = (values.to(outputs.dtype) - self.mean) / self.std
        found: Tensor = losses[self.loss](outputs.squeeze(-1), standardised)
        return found

    @property
    def scale(self) -> float:
        return self.std

    def answer(self, outputs: "Tensor") -> "Tensor":
        return outputs * self.std + self.mean

    # Predictions

    @classmethod
    def from_table(
        cls, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        """Recognise a column of predicted numbers: predicted, prediction, y_pred, ..."""
        column = tables.find_column(table, PREDICTED)
        if column is None or not all(map(is_number, table[column])):
            return None
        answers = np.array(tables.numbers(table, column))[:, None]
        cls().check_answers(answers, list(table.index))
        truth = label or tables.find_column(table, tables.COLUMNS["label"])
        return cls(), (truth,) if truth else (), [column], answers

    def check_answers(self, answers: Answers, names: Sequence[str] | None = None) -> None:
        if answers.ndim != 2 or answers.shape[1] != 1:
            raise ValueError(f"Predicted numbers are (slides, 1). {answers.shape=}")
        if not len(answers):
            raise CohortError("There are no predictions to score.")
        finite = np.isfinite(answers[:, 0])
        if not finite.all():
            row = int(np.argmin(finite))
            where = names[row] if names else f"Row {row}"
            raise CohortError(f"{where}: {answers[row, 0]:g} is not a predicted number.")

    def predicted(self, answers: Answers) -> list[str]:
        return [repr(float(value)) for value in answers[:, 0]]

    def describe(self, answer: NDArray[np.floating]) -> dict[str, Any]:
        return {"predicted": float(answer[0])}

    def show(self, answer: NDArray[np.floating]) -> str:
        return f"{answer[0]:.4g}"

    def disagreement(self, answers: Answers) -> float:
        return float(answers[:, 0].std(ddof=1))

    def reordered(self, other: Target, labels: Labels, answers: Answers) -> tuple[Labels, Answers]:
        return labels, answers.astype(np.float64)

    # Scores

    def can_score(self, labels: Labels) -> bool:
        return len(labels) > 1

    def notes(self, fold: str, labels: Labels, answers: Answers) -> Iterator[str]:
        if len(set(labels.tolist())) < 2:
            yield f"Fold {fold} has one label only: R2 and correlations have no value there."

    def figures(self, folds: "Mapping[str, tuple[Labels, Answers]]") -> "dict[str, Figure]":
        from caprmil import figures

        points = {name: (labels, answers[:, 0]) for name, (labels, answers) in folds.items()}
        return {"scatter.png": figures.predicted_against_true(points)}

    # Baselines

    def as_answers(self, labels: Labels) -> Answers:
        return np.asarray(labels, dtype=np.float64)[:, None]

    def linear_model(self, strength: float) -> Any:
        from sklearn.linear_model import Ridge

        return Ridge(alpha=1 / strength)

    def linear_answers(self, model: Any, features: NDArray[np.float64]) -> Answers:
        return np.asarray(model.predict(features), dtype=np.float64)[:, None]

    def answer_loss(self, labels: Labels, answers: Answers) -> float:
        return float(np.mean((answers[:, 0] - labels) ** 2))

    # Evidence

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        """The value, in the units of the labels, relative to their mean."""
        return (
            Contrast(
                name="a higher value",
                of=lambda outputs: outputs[..., 0] * self.std,
                negative="for a lower value",
                total=f"difference from the mean of the training labels, {self.mean:.4g}",
                ends=("lower", "higher"),
            ),
        )

    def sign_of(self, answer: NDArray[np.floating]) -> int:
        """Return -1 for a value below the mean label: patches for a lower value support it."""
        return 1 if answer[0] >= self.mean else -1

    def turned(self, before: NDArray[np.floating], after: NDArray[np.floating]) -> bool:
        """Return whether a value moved by more than half of its distance from the mean label.

        The mean label is predicted for a slide of which nothing is known. The distance counts as at
        least a standard deviation: close to the mean, any small change would be enough otherwise.
        """
        distance = max(abs(float(before[0]) - self.mean), self.std)
        return abs(float(after[0]) - float(before[0])) > distance / 2


for _metric in REGRESSION_METRICS:
    register_metric("regression", _metric)
