"""Paired tests of two models on the same slides: by influence (DeLong) or by a bootstrap.

In both, patients are the units: a patient brings all slides, in every fold.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.evaluation.alignment import Part
from caprmil.targets.metric import Interval, Metric, Values, ratio

BLOCK = 1_000_000  # weights at a time
NOTHING = 1e-20  # a variance that is only rounding


class Influence(NamedTuple):
    """A metric of a model, fold by fold, and the influence of each patient on their mean."""

    folds: NDArray[np.float64]  # NaN where the metric has no value
    patients: NDArray[np.float64]


def influence(metric: Metric, parts: Sequence[Part], patients: int) -> Influence:
    """Return a metric on these folds, and the sum of its slides' influence for each patient.

    The influences of a model minus those of another are those of the difference, and the sum of
    their squares is its variance: one formula for folds, classes and patients with many slides.
    """
    assert metric.influence is not None
    folds = np.array([metric.function(part.labels, part.answers) for part in parts])
    total = np.zeros(patients)
    for part in (part for part, value in zip(parts, folds, strict=True) if not np.isnan(value)):
        np.add.at(total, part.owners, metric.influence(*part))
    return Influence(folds, total / max(1, int((~np.isnan(folds)).sum())))


def influence_test(one: Influence, other: Influence, level: float) -> tuple[Interval, float]:
    """Return the interval of the mean difference over folds, and its two-sided p."""
    apart = (one.folds - other.folds)[~np.isnan(one.folds)]
    if not len(apart):
        return Interval(float("nan"), float("nan")), float("nan")
    difference = float(apart.mean())
    if difference == 0 and np.array_equal(one.patients, other.patients, equal_nan=True):
        return Interval(0.0, 0.0), 1.0
    variance = float(((one.patients - other.patients) ** 2).sum())
    if variance < NOTHING and difference != 0:
        # All slides agree: without a spread there is no interval.
        united = (apart > 0).all() or (apart < 0).all()
        return Interval(float("nan"), float("nan")), 0.0 if united else float("nan")
    error = float(np.sqrt(variance))
    reach = NormalDist().inv_cdf((1 + level) / 2) * error
    p = math.erfc(abs(difference) / error / math.sqrt(2))
    return Interval(difference - reach, difference + reach), p


def draw_patients(patients: int, draws: int, seed: int) -> NDArray[np.int64]:
    """Return how often each draw (row) holds each patient (column)."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(patients, np.full(patients, 1 / patients), size=draws)


def sample(
    parts: Sequence[Part], times: NDArray[np.int64], metrics: Iterable[Metric]
) -> dict[str, Values]:
    """Return each metric as folds x draws."""
    metrics = list(metrics)
    values = {metric.name: np.empty((len(parts), len(times))) for metric in metrics}
    for fold, part in enumerate(parts):
        rows = max(1, BLOCK // len(part.owners))
        for start in range(0, len(times), rows):
            block = slice(start, start + rows)
            weights = times[block][:, part.owners].astype(np.float64)
            for metric in metrics:
                values[metric.name][fold, block] = metric.draws(part.labels, part.answers, weights)
    return values


def bootstrap_test(
    one: Values, other: Values, level: float, around: float | None = None
) -> tuple[Interval, float]:
    """Return the percentile interval of the mean difference over folds, and its two-sided p.

    Draws of a biased metric are not centred on the difference itself: they are moved `around` it.
    """
    apart = one - other
    there = ~np.isnan(apart)
    means = ratio(np.where(there, apart, 0).sum(axis=0), there.sum(axis=0))
    means = means[~np.isnan(means)]
    if not len(means):
        return Interval(float("nan"), float("nan")), float("nan")
    if around is not None:
        means = means - means.mean() + around
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]).tolist()
    tail = min(np.count_nonzero(means <= 0), np.count_nonzero(means >= 0)) + 1
    return Interval(low, high), min(1.0, 2 * tail / (len(means) + 1))
