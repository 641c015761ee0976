"""How the answers of a target are calibrated, and how that is measured and drawn."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from caprmil.targets.metric import Answers, Labels, Metric
from caprmil.targets.recalibration import Recalibration, unchanged

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class CalibrationSide(NamedTuple):
    """Answers of which the calibration is drawn, and the errors to name in the figure, if any."""

    labels: Labels
    answers: Answers
    errors: Mapping[str, float] = {}


class CalibrationMethod(ABC):
    """The calibration of a target."""

    name: ClassVar[str]
    """What is fitted to the validation part of each fold, in one word."""
    title: ClassVar[str]
    """The method in words, as a figure has them after "After"."""
    notes: ClassVar[tuple[str, ...]]
    """What a reader of the errors should know. The first follows what was fitted."""

    @abstractmethod
    def fit(self, labels: Labels, answers: Answers) -> Recalibration:
        """Return the correction that the answers of a fold's validation part call for."""

    def nothing(self, why: str) -> Recalibration:
        """Return a correction that does nothing, with the reason."""
        return unchanged(why)

    @property
    @abstractmethod
    def errors(self) -> dict[str, Metric]:
        """What is measured before and after calibration."""

    @abstractmethod
    def draw(
        self, before: CalibrationSide, after: CalibrationSide | None, *, how: str, unit: str
    ) -> "Figure | None":
        """Return a figure of predicted against observed. None if nothing can be drawn.

        `how` is the method of correction, and `unit` what is predicted.
        """
