"""Metrics of one label, positive or negative: `labels` are (n,), `answers` (n, 1) probabilities."""

import numpy as np
from numpy.typing import NDArray

from caprmil.targets import classification_metrics as two_classes
from caprmil.targets import weighted_metrics as weighted
from caprmil.targets.delong import auc_influence
from caprmil.targets.metric import Answers, Labels, Metric, Values, Weights, ratio
from caprmil.targets.recalibration import both


def auc(labels: Labels, answers: Answers) -> float:
    """Return the area under the ROC curve; NaN if all labels are the same."""
    return two_classes.auc(labels, both(answers))


def balanced_accuracy(labels: Labels, answers: Answers) -> float:
    """Return the mean of sensitivity and specificity at a probability of 0.5."""
    return two_classes.balanced_accuracy(labels, both(answers))


def average_precision(labels: Labels, answers: Answers) -> float:
    """Return the mean of precisions at each gain of recall; NaN without a positive label."""
    return float(weighted_average_precision(labels, answers, np.ones((1, len(labels))))[0])


def weighted_average_precision(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return the average precision of each draw. Equal answers are one threshold."""
    order = np.argsort(-answers[:, 0], kind="stable")
    scores, weights = answers[order, 0], weights[:, order]
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    found = (weights * labels[order]).cumsum(axis=1)[:, last]
    above = weights.cumsum(axis=1)[:, last]
    gained = np.diff(found, axis=1, prepend=0)
    precision = np.divide(found, above, out=np.zeros_like(found), where=above > 0)
    return ratio((gained * precision).sum(axis=1), found[:, -1])


def weighted_auc(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return the AUC of each draw: how often a positive slide is above a negative one."""
    order = np.argsort(answers[:, 0], kind="stable")
    scores, hits, weights = answers[order, 0], labels[order] == 1, weights[:, order]
    starts = np.flatnonzero(np.diff(scores, prepend=-1))  # of equal answers
    positive = np.add.reduceat(weights * hits, starts, axis=1)
    negative = np.add.reduceat(weights * ~hits, starts, axis=1)
    below = negative.cumsum(axis=1) - negative / 2
    pairs = positive.sum(axis=1) * negative.sum(axis=1)
    return ratio((positive * below).sum(axis=1), pairs)


def _accuracy_draws(labels: Labels, answers: Answers, weights: Weights) -> Values:
    return weighted.balanced_accuracy(labels, both(answers), weights)


def _influence(labels: Labels, answers: Answers, owners: NDArray[np.int64]) -> Values:
    return auc_influence(labels, both(answers), owners)


LABEL_METRICS = (
    Metric(
        name="auc",
        title="AUC",
        function=auc,
        chance=0.5,
        weighted=weighted_auc,
        influence=_influence,
    ),
    Metric(
        name="average_precision",
        title="Average precision",
        function=average_precision,
        weighted=weighted_average_precision,
    ),
    Metric(
        name="balanced_accuracy",
        title="Balanced accuracy",
        function=balanced_accuracy,
        chance=0.5,
        weighted=_accuracy_draws,
    ),
)
"""In the order in which scores are listed."""
