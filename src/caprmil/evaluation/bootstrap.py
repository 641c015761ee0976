"""The metrics on many draws of patients at once: every draw is a row of weights on the slides.

A weight says how often a draw holds a slide. Each function is the metric of the same name in
`caprmil.metrics`, on slides repeated as often as that.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.evaluation.alignment import Part
from caprmil.evaluation.metrics import BINS, Interval

Weights: TypeAlias = NDArray[np.float64]  # draws x slides
Values: TypeAlias = NDArray[np.float64]
Sampler: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.float64], Weights], Values]

BLOCK = 1_000_000  # weights at a time


def accuracy(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return the share of right predictions in each draw."""
    found = _confusion(labels, probabilities, weights)
    return _ratio(np.trace(found, axis1=1, axis2=2), found.sum(axis=(1, 2)))


def balanced_accuracy(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return the mean recall over the classes that occur in each draw."""
    found = _confusion(labels, probabilities, weights)
    return _mean_of_shares(np.diagonal(found, axis1=1, axis2=2), found.sum(axis=2))


def f1(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return the mean F1 over the classes that occur, or are predicted, in each draw."""
    found = _confusion(labels, probabilities, weights)
    size = found.sum(axis=1) + found.sum(axis=2)
    return _mean_of_shares(2 * np.diagonal(found, axis1=1, axis2=2), size)


def kappa(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return Cohen's kappa with quadratic weights in each draw."""
    found = _confusion(labels, probabilities, weights)
    expected = found.sum(axis=2)[:, :, None] * found.sum(axis=1)[:, None, :]
    place = np.arange(found.shape[1])
    far = (place[:, None] - place) ** 2
    total = found.sum(axis=(1, 2))
    return 1 - _ratio((far * found).sum(axis=(1, 2)) * total, (far * expected).sum(axis=(1, 2)))


def brier(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return the Brier score of each draw."""
    truth = np.eye(probabilities.shape[1])[labels]
    losses = ((probabilities - truth) ** 2).sum(axis=1)
    if probabilities.shape[1] == 2:
        losses = losses / 2
    return _ratio(weights @ losses, weights.sum(axis=1))


def ece(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return the calibration error of the predicted class in each draw."""
    right = probabilities.argmax(axis=1) == labels
    return _equal_width(right, probabilities.max(axis=1), weights)


def ece_positive(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return the calibration error of class 1 of two in each draw."""
    return _equal_width(labels == 1, probabilities[:, 1], weights)


def ace(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return the adaptive calibration error of each draw, whose bins are its own."""
    columns = [_adaptive(labels == c, p, weights) for c, p in enumerate(probabilities.T)]
    errors: Values = np.mean(columns, axis=0)
    return np.where(weights.sum(axis=1) > 0, errors, np.nan)


SAMPLERS: dict[str, Sampler] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "kappa": kappa,
    "ace": ace,
    "ece": ece,
    "ece_positive": ece_positive,
    "brier": brier,
}


def draw_patients(patients: int, draws: int, seed: int) -> NDArray[np.int64]:
    """Return how often each draw (row) holds each patient (column)."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(patients, np.full(patients, 1 / patients), size=draws)


def sample(
    parts: Sequence[Part], times: NDArray[np.int64], names: Iterable[str]
) -> dict[str, Values]:
    """Return each metric as folds x draws. Patients bring their slides, in every fold."""
    names = list(names)
    values = {name: np.empty((len(parts), len(times))) for name in names}
    for fold, part in enumerate(parts):
        rows = max(1, BLOCK // len(part.owners))
        for start in range(0, len(times), rows):
            block = slice(start, start + rows)
            weights = times[block][:, part.owners].astype(np.float64)
            for name in names:
                scored = SAMPLERS[name](part.labels, part.probabilities, weights)
                values[name][fold, block] = scored
    return values


def judge(
    one: Values, other: Values, level: float, around: float | None = None
) -> tuple[Interval, float]:
    """Return the percentile interval of the mean difference over folds, and its two-sided p.

    Draws of a biased metric lie elsewhere than the difference itself: they are moved `around` it.
    """
    apart = one - other
    there = ~np.isnan(apart)
    means = _ratio(np.where(there, apart, 0).sum(axis=0), there.sum(axis=0))
    means = means[~np.isnan(means)]
    if not len(means):
        return Interval(float("nan"), float("nan")), float("nan")
    if around is not None:
        means = means - means.mean() + around
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]).tolist()
    tail = min(np.count_nonzero(means <= 0), np.count_nonzero(means >= 0)) + 1
    return Interval(low, high), min(1.0, 2 * tail / (len(means) + 1))


def _ratio(above: Values, below: Values | NDArray[np.int64]) -> Values:
    """Return the quotient; NaN over 0."""
    return np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below != 0)


def _confusion(labels: NDArray[np.int64], probabilities: Values, weights: Weights) -> Values:
    """Return how often each class (axis 1) was predicted as each (axis 2) in a draw (axis 0)."""
    classes = probabilities.shape[1]
    cells = np.eye(classes**2)[labels * classes + probabilities.argmax(axis=1)]
    return (weights @ cells).reshape(-1, classes, classes)


def _mean_of_shares(above: Values, below: Values) -> Values:
    """Return the mean of above / below over the classes where below is not 0."""
    there = below > 0
    shares = np.where(there, _ratio(above, below), 0)
    return _ratio(shares.sum(axis=1), there.sum(axis=1))


def _equal_width(hits: NDArray[np.bool_], scores: Values, weights: Weights) -> Values:
    bins = np.eye(BINS)[np.searchsorted(np.arange(1, BINS) / BINS, scores, side="right")]
    gaps = weights @ (bins * (hits - scores)[:, None])
    return _ratio(np.abs(gaps).sum(axis=1), weights.sum(axis=1))


def _adaptive(hits: NDArray[np.bool_], scores: Values, weights: Weights) -> Values:
    """Return ACE for one class: sums between the edges of each draw, on slides sorted once."""
    order = np.argsort(scores, kind="stable")
    order = order[scores[order] > 0]
    hits, scores, weights = hits[order], scores[order], weights[:, order]
    if not len(order):
        return np.zeros(len(weights))
    reached = weights.cumsum(axis=1)  # place n of a draw is the first slide that reaches n + 1
    total = reached[:, -1:]
    places = np.minimum(np.rint(np.arange(1, BINS) * total / BINS), total - 1)
    edges = np.stack([(reached <= place[:, None]).sum(axis=1) for place in places.T], axis=1)
    edges = np.minimum(edges, len(scores) - 1)  # of a draw without any slide
    edges = np.searchsorted(scores, scores)[edges]  # a score equal to an edge goes up
    gaps = np.cumsum(weights * (hits - scores), axis=1)
    gaps = np.concatenate([np.zeros((len(gaps), 1)), gaps], axis=1)
    ends = np.full((len(edges), 1), len(scores))
    sums = np.take_along_axis(gaps, np.concatenate([0 * ends, edges, ends], axis=1), axis=1)
    errors = _ratio(np.abs(np.diff(sums, axis=1)).sum(axis=1), total[:, 0])
    return np.where(total[:, 0] > 0, errors, 0.0)
