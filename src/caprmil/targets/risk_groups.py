"""Groups of slides by predicted risk or survival, as figures show them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from caprmil.targets.kaplan_meier import SurvivalCurve, kaplan_meier, log_rank
from caprmil.targets.metric import Answers, Labels
from caprmil.targets.survival_metrics import calibration_groups

if TYPE_CHECKING:
    from caprmil.figures import GroupCurve, HorizonGroups

GROUPS = ("low risk", "high risk")
"""At or below the median risk of the training slides, and above it."""


class RiskGroup(NamedTuple):
    """The slides of a risk group, and their survival."""

    name: str
    labels: Labels
    curve: SurvivalCurve

    @property
    def events(self) -> int:
        return int(self.labels[:, 1].sum())


def risk_groups(labels: Labels, answers: Answers) -> list[RiskGroup]:
    """Return the groups that have slides. Risks are relative to a cut-off of the training part."""
    high = answers[:, 0] > 0
    parts = dict(zip(GROUPS, (labels[~high], labels[high]), strict=True))
    return [
        RiskGroup(name, own, kaplan_meier(own[:, 0], own[:, 1] > 0))
        for name, own in parts.items()
        if len(own)
    ]


def log_rank_of_groups(labels: Labels, answers: Answers) -> float:
    """Return the p of the log-rank test between the risk groups."""
    return log_rank(labels[:, 0], labels[:, 1] > 0, (answers[:, 0] > 0).astype(np.int64))


def group_curves(labels: Labels, answers: Answers) -> "tuple[list[GroupCurve], str]":
    """Return the curve of each risk group to draw, and a title with the log-rank p."""
    from caprmil.figures import GroupCurve

    curves = [
        GroupCurve(
            title=group.name,
            times=group.curve.times,
            survival=group.curve.survival,
            low=group.curve.low,
            high=group.curve.high,
            follow_up=group.labels[:, 0],
            censored=group.labels[group.labels[:, 1] == 0, 0],
        )
        for group in risk_groups(labels, answers)
    ]
    p = log_rank_of_groups(labels, answers)
    shown = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
    return curves, "Test patients" if np.isnan(p) else f"Test patients, log-rank {shown}"


def calibration_panels(
    labels: Labels, answers: Answers, horizons: Sequence[float], unit: str
) -> "list[HorizonGroups]":
    """Return predicted and observed survival at each horizon that somebody is followed beyond."""
    from caprmil.figures import HorizonGroups

    panels = []
    for column, horizon in enumerate(horizons, 1):
        found = list(calibration_groups(labels, answers, horizon=horizon, column=column))
        if found:
            panels.append(
                HorizonGroups(
                    title=f"At {horizon:.10g} {unit}".rstrip(),
                    predicted=[group.predicted for group in found],
                    observed=[group.observed for group in found],
                    low=[group.low for group in found],
                    high=[group.high for group in found],
                )
            )
    return panels
