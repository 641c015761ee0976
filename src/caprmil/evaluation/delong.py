"""The area under the ROC curve and how each patient moves it: DeLong's variance, with clusters.

E. R. DeLong et al., Biometrics 44 (1988); N. A. Obuchowski, Biometrics 53 (1997); the ranks are
those of X. Sun and W. Xu, IEEE Signal Processing Letters 21 (2014).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata

from caprmil.evaluation import metrics
from caprmil.evaluation.alignment import Part
from caprmil.evaluation.metrics import Interval

NOTHING = 1e-20  # a variance that is but rounding


class Area(NamedTuple):
    """The areas of a model, fold by fold, and the influence of each patient on their mean."""

    folds: NDArray[np.float64]  # NaN where a fold has one class only
    influence: NDArray[np.float64]


def area(parts: Sequence[Part], patients: int) -> Area:
    """Return the areas on these folds, and the sum of its slides' influence for each patient.

    The influences of a model minus those of another are those of the difference, and the sum of
    their squares is its variance: one formula for folds, classes and patients with many slides.
    """
    folds = np.array([metrics.auc(part.labels, part.probabilities) for part in parts])
    influence = np.zeros(patients)
    for part in (part for part, value in zip(parts, folds, strict=True) if not np.isnan(value)):
        np.add.at(influence, part.owners, _influence(part))
    return Area(folds, influence / max(1, int((~np.isnan(folds)).sum())))


def _influence(part: Part) -> NDArray[np.float64]:
    """Return the influence of each slide of a fold: the mean over its classes that have an area."""
    classes = part.probabilities.shape[1]
    hits = [part.labels == code for code in (range(classes) if classes > 2 else (1,))]
    scores = part.probabilities.T if classes > 2 else part.probabilities.T[1:]
    pairs = zip(hits, scores, strict=True)
    known = [(own, scored) for own, scored in pairs if 0 < own.sum() < len(own)]
    return np.mean([_of_class(*each, part.owners) for each in known], axis=0)


def _of_class(
    hits: NDArray[np.bool_], scores: NDArray[np.float64], owners: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return how far the placement of each slide is from the area, over their number.

    The placement of a hit (V10 in DeLong) is the share of misses below it, that of a miss (V01)
    the share of hits above it. One patient alone says nothing of a spread: the influence is NaN.
    """
    values = np.empty(len(hits))
    ranks = rankdata(scores)
    for own in (hits, ~hits):
        size, others = np.count_nonzero(own), np.count_nonzero(~own)
        below = (ranks[own] - rankdata(scores[own])) / others
        placed = below if own is hits else 1 - below
        patients = len(np.unique(owners[own]))
        spread = np.sqrt(patients / (patients - 1)) / size if patients > 1 else np.nan
        values[own] = (placed - placed.mean()) * spread
    return values


def judge(one: Area, other: Area, level: float) -> tuple[Interval, float]:
    """Return the interval of the difference of the mean areas, and its two-sided p."""
    apart = (one.folds - other.folds)[~np.isnan(one.folds)]
    if not len(apart):
        return Interval(float("nan"), float("nan")), float("nan")
    difference = float(apart.mean())
    if difference == 0 and np.array_equal(one.influence, other.influence, equal_nan=True):
        return Interval(0.0, 0.0), 1.0
    variance = float(((one.influence - other.influence) ** 2).sum())
    if variance < NOTHING and difference != 0:
        # Every slide agrees to the last: there is no spread to measure an interval by.
        united = (apart > 0).all() or (apart < 0).all()
        return Interval(float("nan"), float("nan")), 0.0 if united else float("nan")
    error = float(np.sqrt(variance))
    reach = float(norm.ppf((1 + level) / 2)) * error
    p = float(2 * norm.sf(abs(difference) / error))
    return Interval(difference - reach, difference + reach), p
