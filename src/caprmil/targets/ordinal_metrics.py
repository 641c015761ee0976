"""Metrics of ordinal grades, beside those of a classification.

`labels` (n,) are the numbers of grades, from low to high, and `probabilities` (n, C) those of each
grade. The predicted grade is the likeliest, the lowest of equals.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.metric import Answers, Labels, Metric, Values, Weights, ratio

Errors: TypeAlias = NDArray[np.float64]


def grade_mae(labels: Labels, probabilities: Answers) -> float:
    """Return how many grades a prediction is off, as a mean."""
    return float(_apart(labels, probabilities).mean())


def adjacent_accuracy(labels: Labels, probabilities: Answers) -> float:
    """Return the share of predictions that are right, or off by one grade."""
    return float((_apart(labels, probabilities) <= 1).mean())


def weighted_grade_mae(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return how many grades a prediction is off in each draw."""
    return ratio(weights @ _apart(labels, probabilities), weights.sum(axis=1))


def weighted_adjacent_accuracy(labels: Labels, probabilities: Answers, weights: Weights) -> Values:
    """Return the share of predictions that are off by one grade at most in each draw."""
    close = (_apart(labels, probabilities) <= 1).astype(np.float64)
    return ratio(weights @ close, weights.sum(axis=1))


def _apart(labels: Labels, probabilities: Answers) -> Errors:
    return np.abs(probabilities.argmax(axis=1) - labels).astype(np.float64)


ORDINAL_METRICS = (
    Metric(
        name="grade_mae",
        title="MAE of grade",
        function=grade_mae,
        higher_is_better=False,
        weighted=weighted_grade_mae,
    ),
    Metric(
        name="adjacent_accuracy",
        title="Adjacent accuracy",
        function=adjacent_accuracy,
        weighted=weighted_adjacent_accuracy,
    ),
)
"""In the order in which scores are listed."""
