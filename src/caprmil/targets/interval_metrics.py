"""Metrics of predicted intervals: `answers` (n, 3) are the number, and the ends of its interval."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.metric import Answers, Labels, Metric, Values, Weights, ratio

if TYPE_CHECKING:
    from caprmil.targets.target import Target

Scores: TypeAlias = NDArray[np.float64]
LEVEL = 0.9  # of intervals, unless a target says otherwise


def coverage(labels: Labels, answers: Answers) -> float:
    """Return the share of labels within their interval. It should be its level, not more."""
    return float(_covered(labels, answers).mean())


def weighted_coverage(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return the share of labels within their interval, in each draw."""
    return ratio(weights @ _covered(labels, answers), weights.sum(axis=1))


def interval_score(labels: Labels, answers: Answers, *, level: float = LEVEL) -> float:
    """Return the mean width of intervals, with a penalty for each label outside of its own.

    T. Gneiting and A. Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation", 2007:
    the penalty is the distance to the interval, times 2 / (1 - level).
    """
    return float(_scores(labels, answers, level).mean())


def weighted_interval_score(
    labels: Labels, answers: Answers, weights: Weights, *, level: float = LEVEL
) -> Values:
    """Return the interval score of each draw."""
    return ratio(weights @ _scores(labels, answers, level), weights.sum(axis=1))


def _covered(labels: Labels, answers: Answers) -> Scores:
    inside = (answers[:, 1] <= labels) & (labels <= answers[:, 2])
    return np.asarray(inside, dtype=np.float64)


def _scores(labels: Labels, answers: Answers, level: float) -> Scores:
    low, high = answers[:, 1], answers[:, 2]
    outside = np.maximum(low - labels, 0) + np.maximum(labels - high, 0)
    return np.asarray(high - low + 2 / (1 - level) * outside, dtype=np.float64)


def _has_intervals(target: "Target") -> bool:
    return len(target.columns) == 3


def _scored(level: float) -> Metric:
    """Return the interval score of intervals of a level."""
    return Metric(
        name="interval_score",
        title="Interval score",
        function=partial(interval_score, level=level),
        higher_is_better=False,
        applies=_has_intervals,
        weighted=partial(weighted_interval_score, level=level),
    )


INTERVAL_METRICS = (
    Metric(
        name="coverage",
        title="Coverage of intervals",
        function=coverage,
        applies=_has_intervals,
        printed=False,  # more is not better: it should be the level
        weighted=weighted_coverage,
    ),
    replace(_scored(LEVEL), variants=lambda target: [_scored(getattr(target, "level", LEVEL))]),
)
"""In the order in which scores are listed."""
