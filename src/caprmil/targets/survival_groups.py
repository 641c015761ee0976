"""The survival of groups of slides, e.g. of the sites: a baseline."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.kaplan_meier import cumulative_hazard
from caprmil.targets.metric import Labels
from caprmil.targets.time_to_event import split_labels


def group_answers(labels: Labels, groups: Sequence[str | None], horizons: tuple[float, ...]) -> Any:
    """Return the answer of a group by its name: see `Survival.group_answers`."""
    times, events = split_labels(labels)
    expected = cumulative_hazard(times, events, times)
    hazard = cumulative_hazard(times, events, horizons)
    risks = {}
    for name in {group for group in groups if group is not None}:
        own = np.array([group == name for group in groups])
        risks[name] = float(np.log((events[own].sum() + 1) / (expected[own].sum() + 1)))
    return partial(_group_answer, risks, hazard)


def _group_answer(
    risks: Mapping[str, float], hazard: NDArray[np.float64], name: str | None
) -> NDArray[np.float64]:
    risk = risks.get(name, 0.0) if name is not None else 0.0
    return np.concatenate([[risk], np.exp(-hazard * np.exp(risk))])
