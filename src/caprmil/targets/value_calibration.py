"""Calibration of predicted numbers: the line from predictions to labels, and intervals.

The mean label of slides with a prediction of x should be x: a slope of 1 and an intercept of 0.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from caprmil.targets.calibration_method import CalibrationMethod, CalibrationSide
from caprmil.targets.interval_metrics import coverage
from caprmil.targets.metric import Answers, Labels, Metric
from caprmil.targets.recalibration import FEWEST, Recalibration, of_numbers, unchanged
from caprmil.targets.regression_metrics import mae
from caprmil.targets.reliability_bins import value_bins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from caprmil.targets.regression import Regression


def slope(labels: Labels, answers: Answers) -> float:
    """Return the slope of the line from predictions to labels; NaN if predictions are equal."""
    values = np.asarray(answers[:, 0], dtype=np.float64)
    if len(values) < FEWEST or np.ptp(values) == 0:
        return float("nan")
    return float(np.polyfit(values, labels, 1)[0])


def intercept(labels: Labels, answers: Answers) -> float:
    """Return what the line has at a prediction of 0."""
    return float(np.mean(labels) - slope(labels, answers) * np.mean(answers[:, 0]))


def mean_error(labels: Labels, answers: Answers) -> float:
    """Return how much too high predictions are, on average."""
    return float(np.mean(answers[:, 0] - labels))


class Lines(CalibrationMethod):
    """A line from predictions to labels, also for the ends of intervals."""

    name: ClassVar[str] = "Lines"
    title: ClassVar[str] = "a line"
    notes: ClassVar[tuple[str, ...]] = (
        "Before it, a slope below 1 means that predictions are too extreme, above 1 that they are "
        "too close to the mean.",
        "Slope and intercept are those of the line from predictions to labels; the mean error is "
        "predicted minus true.",
    )

    def __init__(self, target: "Regression") -> None:
        self.target = target

    def fit(self, labels: Labels, answers: Answers) -> Recalibration:
        if len(labels) < FEWEST:
            return unchanged(f"the validation part has fewer than {FEWEST} labels")
        return of_numbers(labels, answers)

    @property
    def errors(self) -> dict[str, Metric]:
        functions: dict[str, tuple[str, Callable[[Labels, Answers], float]]] = {
            "slope": ("slope", slope),
            "intercept": ("intercept", intercept),
            "mean_error": ("mean error", mean_error),
            "mae": ("MAE", mae),
        }
        if self.target.has_intervals:
            title = f"labels in {100 * self.target.level:g} % intervals"
            functions["coverage"] = (title, coverage)
        return {
            name: Metric(name=name, title=title, function=function)
            for name, (title, function) in functions.items()
        }

    def draw(
        self, before: CalibrationSide, after: CalibrationSide | None, *, how: str, unit: str
    ) -> "Figure":
        from caprmil import figures

        first, *second = (
            value_bins(each.labels, each.answers) for each in (before, after) if each is not None
        )
        return figures.value_calibration(first, *second, how=how, unit=unit)
