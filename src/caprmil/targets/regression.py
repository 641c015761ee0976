"""Regression: one number per slide."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil import config
from caprmil.errors import CohortError, RecipeError
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.tables import is_known, is_number
from caprmil.targets.calibration_method import CalibrationMethod
from caprmil.targets.conformal import Conformal, IntervalSets
from caprmil.targets.interval_metrics import INTERVAL_METRICS, LEVEL
from caprmil.targets.metric import register_metric
from caprmil.targets.recalibration import Recalibration, of_numbers
from caprmil.targets.regression_metrics import REGRESSION_METRICS
from caprmil.targets.target import Answers, Contrast, Criterion, Label, Labels, Target
from caprmil.targets.value_calibration import Lines

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

PREDICTED = ("predicted", "pred", "prediction", "y_pred", "y_hat")
OUTPUTS = {
    "none": ("a higher value",),
    "gaussian": ("a higher value", "a larger variance"),
    "quantile": ("a higher value", "a lower lower end", "a higher upper end"),
}
"""What each output is evidence for, by the kind of uncertainty."""
LOG_VARIANCE = 10.0  # of standardised labels, at most, and at least its negative
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
    uncertainty: Literal["none", "gaussian", "quantile"] = field(
        default="none", metadata=config.LATER
    )
    """gaussian: also predict a variance, and train on the likelihood (`loss` is not used).
    quantile: also predict the ends of an interval, beside the value, which is trained as before."""
    level: float = field(default=LEVEL, metadata=config.LATER)
    """The share of labels that predicted intervals should hold."""
    widest: float | None = field(default=None, metadata=config.LATER)
    """The models abstain where an interval of `predict --coverage` is wider, in the unit of the
    labels. By default only where it is infinite or empty."""

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

    def __post_init__(self) -> None:
        if self.loss not in ("l1", "l2", "huber"):
            raise RecipeError(f"[target] loss is {self.loss!r}, and must be l1, l2 or huber.")
        if not (np.isfinite(self.mean) and np.isfinite(self.std) and self.std > 0):
            raise RecipeError(f"[target] mean {self.mean} and std {self.std} cannot be used.")
        if self.uncertainty not in OUTPUTS:
            raise RecipeError(
                f"[target] uncertainty is {self.uncertainty!r}, and must be {', '.join(OUTPUTS)}."
            )
        if self.widest is not None and not self.widest > 0:
            raise RecipeError(f"[target] widest is a width above 0, not {self.widest}.")
        if not 0 < self.level < 1:
            raise RecipeError(f"[target] level is a share between 0 and 1, not {self.level}.")

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
                "Set [data] label (--label COLUMN) if the label is in another column."
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

    @property
    def n_outputs(self) -> int:
        return len(OUTPUTS[self.uncertainty])

    @property
    def has_intervals(self) -> bool:
        """Whether an interval is predicted with each number."""
        return self.uncertainty != "none"

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
        if self.uncertainty == "gaussian":
            variance = outputs[:, 1].clamp(-LOG_VARIANCE, LOG_VARIANCE).exp()
            likelihood: Tensor = F.gaussian_nll_loss(outputs[:, 0], standardised, variance)
            return likelihood
        value = outputs[:, 0] if self.has_intervals else outputs.squeeze(-1)
        found: Tensor = losses[self.loss](value, standardised)
        if self.uncertainty == "quantile":
            # The ends follow the value, and do not pull at it.
            low, high = (end - standardised for end in self._ends(outputs, value.detach()))
            tail = (1 - self.level) / 2
            found = found + torch.maximum((1 - tail) * low, -tail * low).mean()
            found = found + torch.maximum(tail * high, (tail - 1) * high).mean()
        return found

    def _ends(self, outputs: "Tensor", value: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return the ends of standardised intervals around a value, from the further outputs."""
        import torch.nn.functional as F
        from scipy.stats import norm

        if self.uncertainty == "gaussian":
            spread = (outputs[..., 1].clamp(-LOG_VARIANCE, LOG_VARIANCE) / 2).exp()
            reach = float(norm.ppf((1 + self.level) / 2)) * spread
            return value - reach, value + reach
        return value - F.softplus(outputs[..., 1]), value + F.softplus(outputs[..., 2])

    @property
    def scale(self) -> float:
        return self.std

    def answer(self, outputs: "Tensor") -> "Tensor":
        if not self.has_intervals:
            return outputs * self.std + self.mean
        import torch

        value = outputs[..., 0]
        found = torch.stack([value, *self._ends(outputs, value)], dim=-1)
        return found * self.std + self.mean

    # Predictions

    @property
    def columns(self) -> tuple[str, ...]:
        percent = f"{100 * self.level:g}"
        ends = (f"low_{percent}", f"high_{percent}") if self.has_intervals else ()
        return ("predicted", *ends)

    @property
    def titles(self) -> tuple[str, ...]:
        percent = f"{100 * self.level:g} %"
        ends = (f"lower end, {percent}", f"upper end, {percent}") if self.has_intervals else ()
        return ("predicted", *ends)

    def owns(self, column: str) -> bool:
        return column == "predicted" or _level_of(column) is not None

    @classmethod
    def from_table(
        cls, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        """Recognise a column of predicted numbers: predicted, prediction, y_pred, ...

        Columns such as low_90 and high_90 beside it are the ends of intervals.
        """
        column = tables.find_column(table, PREDICTED)
        if column is None or not all(map(is_number, table[column])):
            return None
        used, target = [column], cls()
        for low in table.columns:
            level, high = _level_of(low), low.replace("low_", "high_", 1)
            if level is not None and low != high and high in table.columns:
                used, target = [column, low, high], cls(uncertainty="quantile", level=level)
        answers = np.array([tables.numbers(table, name) for name in used]).T
        target.check_answers(answers, list(table.index))
        truth = label or tables.find_column(table, tables.COLUMNS["label"])
        return target, (truth,) if truth else (), used, answers

    def check_answers(self, answers: Answers, names: Sequence[str] | None = None) -> None:
        if answers.ndim != 2 or answers.shape[1] != len(self.columns):
            raise ValueError(f"Predicted numbers are {self.columns}. {answers.shape=}")
        if not len(answers):
            raise CohortError("There are no predictions to score.")
        finite = np.isfinite(answers)
        if not finite.all():
            row, at = (int(place) for place in np.argwhere(~finite)[0])
            where = names[row] if names else f"Row {row}"
            raise CohortError(f"{where}: {answers[row, at]:g} is not a predicted number.")
        if self.has_intervals and (crossed := answers[:, 1] > answers[:, 2]).any():
            row = int(crossed.argmax())
            where = names[row] if names else f"Row {row}"
            low, high = answers[row, 1:]
            raise CohortError(f"{where}: the interval ends at {high:g}, below its start {low:g}.")

    @property
    def has_order(self) -> bool:
        return True

    def heights(self, answers: Answers) -> NDArray[np.floating]:
        """Return the value, also of an answer with the ends of an interval."""
        return answers[:, 0]

    def predicted(self, answers: Answers) -> list[str]:
        return [repr(float(value)) for value in answers[:, 0]]

    def describe(self, answer: NDArray[np.floating]) -> dict[str, Any]:
        return dict(zip(self.columns, map(float, answer), strict=True))

    def show(self, answer: NDArray[np.floating]) -> str:
        if not self.has_intervals:
            return f"{answer[0]:.4g}"
        return f"{answer[0]:.4g} ({answer[1]:.4g} to {answer[2]:.4g})"

    def disagreement(self, answers: Answers) -> float:
        return float(answers[:, 0].std(ddof=1))

    def reordered(self, other: Target, labels: Labels, answers: Answers) -> tuple[Labels, Answers]:
        return labels, answers[:, : len(self.columns)].astype(np.float64)

    def shared(self, other: Target) -> Target | None:
        """Return the one with fewer numbers: values are compared also if one has intervals."""
        if not isinstance(other, Regression):
            return None
        if len(self.columns) == len(other.columns):
            return super().shared(other) or replace(self, uncertainty="none")
        return min(self, other, key=lambda each: len(each.columns))

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
        return np.repeat(np.asarray(labels, dtype=np.float64)[:, None], len(self.columns), axis=1)

    def linear_model(self, strength: float) -> Any:
        from sklearn.linear_model import Ridge

        return Ridge(alpha=1 / strength)

    def linear_answers(self, model: Any, features: NDArray[np.float64]) -> Answers:
        """Return the numbers of a linear model. It has no intervals: they end at the number."""
        return self.as_answers(model.predict(features))

    def answer_loss(self, labels: Labels, answers: Answers) -> float:
        return float(np.mean((answers[:, 0] - labels) ** 2))

    # Guarantees

    risk_title: ClassVar[str] = "MAE"

    @property
    def conformal(self) -> Conformal:
        return IntervalSets(self.widest)

    def confidence(self, answers: Answers) -> NDArray[np.float64] | None:
        """Return how narrow each interval is. Numbers without one do not say how sure they are."""
        if not self.has_intervals:
            return None
        return np.asarray(answers[:, 1] - answers[:, 2], dtype=np.float64)

    def losses(self, labels: Labels, answers: Answers) -> NDArray[np.float64]:
        return np.asarray(np.abs(answers[:, 0] - labels), dtype=np.float64)

    # Calibration

    @property
    def calibration(self) -> CalibrationMethod:
        return Lines(self)

    # Other sites

    def recalibrate(self, labels: Labels, answers: Answers) -> Recalibration:
        return of_numbers(labels, answers)

    # Evidence

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        """The value, in the units of the labels, relative to their mean."""
        return (
            Contrast(
                name="a higher value",
                of=lambda outputs: outputs[..., 0] * self.std,
                negative="for a lower value",
                total=f"difference from the mean of the training labels ({self.mean:.4g})",
                ends=("lower", "higher"),
            ),
        )

    @property
    def output_names(self) -> tuple[str, ...]:
        return OUTPUTS[self.uncertainty]

    def followed(self, answer: Any) -> Any:
        return answer[..., :1]

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


def _level_of(column: str) -> float | None:
    """Return the level in the name of an interval's end: 0.9 of low_90; None if it has none."""
    end, _, percent = column.partition("_")
    if end not in ("low", "high") or not is_number(percent) or not 0 < float(percent) < 100:
        return None
    return float(percent) / 100


for _metric in (*REGRESSION_METRICS, *INTERVAL_METRICS):
    register_metric("regression", _metric)
