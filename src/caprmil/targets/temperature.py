"""Temperature scaling: one number that makes probabilities softer or sharper.

C. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.calibration_method import CalibrationMethod, CalibrationSide
from caprmil.targets.classification_metrics import ace, ace_floor, brier, ece
from caprmil.targets.metric import Answers, Labels, Metric
from caprmil.targets.recalibration import LOG_LOSS, SMALLEST, Recalibration, both, unchanged
from caprmil.targets.reliability_bins import reliability

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDEST = 20.0  # temperatures are searched between 1 / 20 and 20
TITLES = {
    "ace": "ACE",
    "ace_floor": "its floor",
    "ece": "ECE",
    "brier": "Brier",
    "log_loss": "log-loss",
}


def fit_temperature(labels: Labels, answers: Answers) -> Recalibration:
    """Return the correction by the best temperature; where none can be had, by 1, and why."""
    why, found = "", None
    if len(set(labels.tolist())) < 2:
        why = "the validation part has one class only"
    elif (found := temperature(labels, answers)) is None:
        why = "the validation part is predicted too well, or too badly, for a best temperature"
    t = 1.0 if found is None else found
    return Recalibration(lambda other: soften(other, t), f"{t:.2f}", temperature=t, why=why)


def temperature(labels: NDArray[np.integer], probabilities: NDArray[np.floating]) -> float | None:
    """Return the T for which softmax(log p / T) has the least log-loss; None if there is none.

    If every slide is right, the least log-loss is that of T = 0; if most are wrong, that of an
    infinite T. Neither is of use for other slides.
    """
    from scipy.optimize import brentq  # here: predictions do not wait for SciPy
    from scipy.special import softmax

    logits = np.log(np.clip(probabilities, SMALLEST, 1))
    logits -= logits.max(axis=1, keepdims=True)
    own = logits[np.arange(len(labels)), labels]

    def derivative(log_t: float) -> float:
        """Return the derivative by 1 / T of the log-loss, which is convex in 1 / T.

        Where every slide is right it is never above 0, also after rounding.
        """
        sharper = softmax(logits / np.exp(log_t), axis=1)
        return float(np.mean((sharper * logits).sum(axis=1) - own))

    edge = np.log(WIDEST)
    if not derivative(edge) < 0 < derivative(-edge):
        return None
    return float(np.exp(brentq(derivative, -edge, edge)))


def soften(probabilities: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """Return softmax(log p / T); with T = 1, the probabilities as they were."""
    if temperature == 1:
        return probabilities.astype(np.float64)
    from scipy.special import softmax

    softened: NDArray[np.float64] = softmax(
        np.log(np.clip(probabilities, SMALLEST, 1)) / temperature, axis=1
    )
    return softened


class Temperatures(CalibrationMethod):
    """A temperature for the probabilities of classes."""

    name: ClassVar[str] = "Temperatures"
    title: ClassVar[str] = "temperature scaling"
    notes: ClassVar[tuple[str, ...]] = (
        "Above 1, the model was overconfident; below 1, underconfident.",
        "The floor is the ACE of a perfectly calibrated model with these answers.",
    )

    def __init__(self, event: str) -> None:
        self.event = event
        """What a probability is of, in a figure."""

    def classes(self, answers: Answers) -> Answers:
        """Return the probability of each class."""
        return answers

    def fit(self, labels: Labels, answers: Answers) -> Recalibration:
        return fit_temperature(labels, answers)

    def nothing(self, why: str) -> Recalibration:
        return replace(unchanged(why), words="1.00", temperature=1.0)

    @property
    def errors(self) -> dict[str, Metric]:
        functions: dict[str, Callable[[Labels, Answers], float]] = {
            "ace": ace,
            "ace_floor": lambda _, p: ace_floor(p)[0],
            "ece": ece,
            "brier": brier,
            "log_loss": LOG_LOSS.function,
        }

        def of(own: Callable[[Labels, Answers], float]) -> Callable[[Labels, Answers], float]:
            return lambda labels, answers: own(labels, self.classes(answers))

        return {
            name: Metric(name=name, title=TITLES[name], function=of(own), higher_is_better=False)
            for name, own in functions.items()
        }

    def draw(
        self, before: CalibrationSide, after: CalibrationSide | None, *, how: str, unit: str
    ) -> "Figure":
        from caprmil import figures

        first, *second = (
            reliability(each.labels, self.classes(each.answers), each.errors.get("ace", np.nan))
            for each in (before, after)
            if each is not None
        )
        return figures.reliability(first, *second, event=self.event, how=how, unit=unit)


class LabelTemperatures(Temperatures):
    """A temperature for the probability (n, 1) of one label: its logit is divided by it."""

    def classes(self, answers: Answers) -> Answers:
        return both(answers)

    def fit(self, labels: Labels, answers: Answers) -> Recalibration:
        found = fit_temperature(labels, both(answers))
        return replace(found, apply=lambda other: np.asarray(found.apply(both(other))[:, 1:]))
