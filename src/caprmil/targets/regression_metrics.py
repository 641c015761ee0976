"""Metrics of regression: predicted against true numbers.

`labels` are (n,), `answers` (n, 1). The weighted form of a metric has many draws of slides at once:
a weight says how often a draw holds a slide.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.metric import Answers, Labels, Metric, Values, Weights, ratio

Numbers: TypeAlias = NDArray[np.floating]


def mae(labels: Labels, answers: Answers) -> float:
    """Return the mean absolute error."""
    return float(np.mean(np.abs(answers[:, 0] - labels)))


def r2(labels: Labels, answers: Answers) -> float:
    """Return the share of the variance that is explained; NaN where all labels are equal."""
    if not _differ(labels):
        return float("nan")
    variance = float(np.sum((labels - labels.mean()) ** 2))
    return 1 - float(np.sum((answers[:, 0] - labels) ** 2)) / variance


def pearson(labels: Labels, answers: Answers) -> float:
    """Return the correlation; NaN where labels or predictions are all equal."""
    if not (_differ(labels) and _differ(answers[:, 0])):
        return float("nan")
    x, y = labels - labels.mean(), answers[:, 0] - answers[:, 0].mean()
    return float(np.sum(x * y)) / float(np.sqrt(np.sum(x**2) * np.sum(y**2)))


def spearman(labels: Labels, answers: Answers) -> float:
    """Return the correlation of ranks."""
    from scipy.stats import rankdata  # here: it takes longer to load than a command to fail

    return pearson(rankdata(labels), rankdata(answers[:, 0])[:, None])


def _differ(values: Numbers) -> bool:
    """Return whether there are two values that differ. Their mean may differ by rounding alone."""
    return len(values) > 1 and bool(values.min() < values.max())


def weighted_mae(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return the mean absolute error of each draw."""
    return ratio(weights @ np.abs(answers[:, 0] - labels), weights.sum(axis=1))


def weighted_r2(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return the share of the variance that is explained in each draw."""
    variance = _product(labels, labels, weights)
    variance[~_differ_in(labels, weights)] = 0
    return 1 - ratio(weights @ (answers[:, 0] - labels) ** 2, variance)


def weighted_pearson(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return the correlation in each draw."""
    return _correlation(labels, answers[:, 0], weights)


def weighted_spearman(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return the correlation of ranks in each draw, whose ranks are its own."""
    return _correlation(_ranks(labels, weights), _ranks(answers[:, 0], weights), weights)


def _correlation(x: Numbers, y: Numbers, weights: Weights) -> Values:
    norm = np.sqrt(_product(x, x, weights) * _product(y, y, weights))
    norm[~(_differ_in(x, weights) & _differ_in(y, weights))] = 0
    return ratio(_product(x, y, weights), norm)


def _product(x: Numbers, y: Numbers, weights: Weights) -> Values:
    """Return the sum of products of deviations from the mean, in each draw."""
    size = weights.sum(axis=1, keepdims=True)
    x, y = (v - ratio((weights * v).sum(axis=1, keepdims=True), size) for v in (x, y))
    return np.asarray((weights * x * y).sum(axis=1))


def _differ_in(values: Numbers, weights: Weights) -> NDArray[np.bool_]:
    """Return whether a draw holds two values that differ."""
    held = weights > 0
    low = np.where(held, values, np.inf).min(axis=1)
    return np.asarray(low < np.where(held, values, -np.inf).max(axis=1))


def _ranks(values: Numbers, weights: Weights) -> Values:
    """Return the rank of each slide in each draw; equal values share the mean of their ranks."""
    _, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.add.reduceat(weights[:, order], starts, axis=1)
    means: Values = sizes.cumsum(axis=1) - (sizes - 1) / 2
    return means[:, group]


REGRESSION_METRICS = (
    Metric(name="r2", title="R2", function=r2, chance=0.0, weighted=weighted_r2),
    Metric(
        name="mae",
        title="MAE",
        function=mae,
        higher_is_better=False,
        weighted=weighted_mae,
    ),
    Metric(
        name="pearson",
        title="Pearson correlation",
        function=pearson,
        chance=0.0,
        printed=False,
        weighted=weighted_pearson,
    ),
    Metric(
        name="spearman",
        title="Spearman correlation",
        function=spearman,
        chance=0.0,
        weighted=weighted_spearman,
    ),
)
"""In the order in which scores are listed."""
