"""Calibration of predicted survival: at horizons, and the number of events."""

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from caprmil.targets.calibration_method import CalibrationMethod, CalibrationSide
from caprmil.targets.metric import Answers, Labels, Metric
from caprmil.targets.recalibration import (
    Recalibration,
    events_and_expected,
    of_survival,
    unchanged,
)
from caprmil.targets.risk_groups import calibration_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from caprmil.targets.survival import Survival


def events_ratio(labels: Labels, answers: Answers, *, horizons: tuple[float, ...]) -> float:
    """Return the observed events over those that survival predicts; NaN if none is predicted."""
    events, expected = events_and_expected(labels, answers, horizons)
    return events / expected if expected > 0 else float("nan")


class HazardFactors(CalibrationMethod):
    """A factor of all hazards: observed events over those that are predicted, one added to both."""

    name: ClassVar[str] = "Factors"
    title: ClassVar[str] = "a factor of hazards"
    notes: ClassVar[tuple[str, ...]] = (
        "A factor is the events of the validation part over those that are predicted for it, one "
        "added to both. Risks, and so the order of slides, stay as they are.",
        "Events are counted until the last horizon: above 1, there are more than predicted.",
    )

    def __init__(self, target: "Survival") -> None:
        self.target = target

    def fit(self, labels: Labels, answers: Answers) -> Recalibration:
        if not self.target.horizons:
            return unchanged("no survival is predicted")
        return of_survival(labels, answers, self.target.horizons)

    @property
    def errors(self) -> dict[str, Metric]:
        """Those at horizons: nothing without any."""
        if not self.target.horizons:
            return {}
        ratio = Metric(
            name="events_ratio",
            title="observed over expected events",
            function=partial(events_ratio, horizons=self.target.horizons),
        )
        known = self.target.metrics
        own = [known[name] for name in ("calibration", "ibs") if name in known]
        return {metric.name: metric for metric in [*own, ratio]}

    def draw(
        self, before: CalibrationSide, after: CalibrationSide | None, *, how: str, unit: str
    ) -> "Figure | None":
        from caprmil import figures

        first, *second = (
            calibration_panels(each.labels, each.answers, self.target.horizons, self.target.unit)
            for each in (before, after)
            if each is not None
        )
        return figures.survival_calibration(first, *second, how=how) if first else None
