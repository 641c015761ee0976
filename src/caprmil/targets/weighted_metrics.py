"""Classification metrics of many draws of slides at once: every draw is a row of weights.

A weight says how often a draw holds a slide. Each function is the metric of the same name in
`classification_metrics`, on slides repeated as often as that.
"""

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.metric import Answers, Labels, Values, Weights, ratio

BINS = 10
PAIRS = 2_000_000  # of slides at a time


def accuracy(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the share of right predictions in each draw."""
    right = (probabilities.argmax(axis=1) == labels).astype(np.float64)
    return ratio(weights @ right, weights.sum(axis=1))


def balanced_accuracy(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the mean recall over the classes that occur in each draw."""
    right, size, _ = _counts(labels, probabilities, weights)
    return _mean_of_shares(right, size)


def f1(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the mean F1 over the classes that occur, or are predicted, in each draw."""
    right, size, predicted = _counts(labels, probabilities, weights)
    return _mean_of_shares(2 * right, size + predicted)


def kappa(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return Cohen's kappa with quadratic weights in each draw.

    The mean square of label minus prediction, if they were independent, follows from the sums and
    the sums of squares of both.
    """
    found = probabilities.argmax(axis=1).astype(np.float64)
    truth = labels.astype(np.float64)
    total = weights.sum(axis=1)
    apart = weights @ (truth - found) ** 2
    expected = total * (weights @ (truth**2 + found**2)) - 2 * (weights @ truth) * (weights @ found)
    return 1 - ratio(apart * total, expected)


def auc(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the mean AUC over more than two classes in each draw.

    Every slide is a hit of one class. So all classes together are one comparison of each slide
    with the slides of other classes, a matrix that all draws share.
    """
    size = weights @ np.eye(probabilities.shape[1])[labels]  # draws x classes
    others = weights.sum(axis=1, keepdims=True) - size
    above = np.zeros_like(size)
    block = max(1, PAIRS // len(labels))
    for start in range(0, len(labels), block):
        own = labels[start : start + block]
        scores = probabilities[:, own].T  # of all slides, for the class of each of these
        mine = np.diagonal(scores, offset=start)[:, None]
        wins = (mine > scores) + 0.5 * (mine == scores)
        wins[own[:, None] == labels] = 0
        won = (weights @ wins.T) * weights[:, start : start + block]
        np.add.at(above.T, own, won.T)
    return _mean_of_shares(above, size * others)


def brier(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the Brier score of each draw."""
    truth = np.eye(probabilities.shape[1])[labels]
    losses = ((probabilities - truth) ** 2).sum(axis=1)
    if probabilities.shape[1] == 2:
        losses = losses / 2
    return ratio(weights @ losses, weights.sum(axis=1))


def ece(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the calibration error of the predicted class in each draw."""
    right = probabilities.argmax(axis=1) == labels
    return _equal_width(right, probabilities.max(axis=1), weights)


def ece_positive(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the calibration error of class 1 of two in each draw."""
    return _equal_width(labels == 1, probabilities[:, 1], weights)


def ace(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the adaptive calibration error of each draw, whose bins are its own."""
    columns = [_adaptive(labels == c, p, weights) for c, p in enumerate(probabilities.T)]
    errors: Values = np.mean(columns, axis=0)
    return np.where(weights.sum(axis=1) > 0, errors, np.nan)


def _counts(
    labels: Labels, probabilities: Answers, weights: Weights
) -> tuple[Values, Values, Values]:
    """Return how often each class (axis 1) was right, is a label, and was predicted in a draw."""
    one_hot, predicted = np.eye(probabilities.shape[1]), probabilities.argmax(axis=1)
    right = one_hot[labels] * (predicted == labels)[:, None]
    return weights @ right, weights @ one_hot[labels], weights @ one_hot[predicted]


def _mean_of_shares(above: Values, below: Values) -> Values:
    """Return the mean of above / below over the classes where below is not 0."""
    there = below > 0
    shares = np.where(there, ratio(above, below), 0)
    return ratio(shares.sum(axis=1), there.sum(axis=1))


def _equal_width(hits: NDArray[np.bool_], scores: Answers, weights: Weights) -> Values:
    bins = np.eye(BINS)[np.searchsorted(np.arange(1, BINS) / BINS, scores, side="right")]
    gaps = weights @ (bins * (hits - scores)[:, None])
    return ratio(np.abs(gaps).sum(axis=1), weights.sum(axis=1))


def _adaptive(hits: NDArray[np.bool_], scores: Answers, weights: Weights) -> Values:
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
    errors = ratio(np.abs(np.diff(sums, axis=1)).sum(axis=1), total[:, 0])
    return np.where(total[:, 0] > 0, errors, 0.0)
