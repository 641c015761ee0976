"""Recalibration: a correction of answers that is fitted to a few slides of another site.

The order of slides stays the same, so that AUC and C-index of two classes, labels, numbers and
risks do not change. With few slides a correction must not run away: that of probabilities has a
normal prior, with a standard deviation of 1, around no correction; that of survival adds one event.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.metric import Answers, Labels, Metric, Values, Weights, ratio

SMALLEST = 1e-12  # a probability of 0 would have an infinite logarithm
FEWEST = 3  # labels for a slope of numbers
SHALLOWEST = 0.01  # a slope of 0 would make all answers equal


@dataclass(frozen=True)
class Recalibration:
    """A correction of answers, and what it does in a few words."""

    apply: Callable[[Answers], Answers]
    words: str
    temperature: float | None = None
    """That of probabilities, if nothing else is corrected."""
    why: str = ""
    """Why nothing is corrected, if so."""


def unchanged(why: str) -> Recalibration:
    """Return a correction that does nothing, with the reason."""
    return Recalibration(lambda answers: answers, f"unchanged: {why}", why=why)


def of_probabilities(labels: Labels, answers: Answers) -> Recalibration:
    """Return the slope and the intercepts of log probabilities with the least log-loss.

    softmax(slope log p + intercepts), with a normal prior around slope 1 and intercepts 0.
    """
    from scipy.optimize import minimize  # here: it takes longer to load than a command to fail
    from scipy.special import log_softmax

    logs, classes = _logs(answers), answers.shape[1]
    truth = np.eye(classes)[labels]

    def loss(numbers: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        slope, intercepts = numbers[0], numbers[1:]
        found = log_softmax(slope * logs + intercepts, axis=1)
        off = np.exp(found) - truth
        gradient = np.r_[(off * logs).sum() + slope - 1, off.sum(axis=0) + intercepts]
        prior = ((slope - 1) ** 2 + (intercepts**2).sum()) / 2
        return float(prior - (truth * found).sum()), gradient

    start = np.r_[1.0, np.zeros(classes)]
    bounds = [(SHALLOWEST, None), *[(None, None)] * classes]
    best = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    slope, intercepts = float(best[0]), best[1:]

    def apply(other: Answers) -> Answers:
        found: Answers = np.exp(log_softmax(slope * _logs(other) + intercepts, axis=1))
        return found / found.sum(axis=1, keepdims=True)

    moved = [f"{intercepts[1] - intercepts[0]:+.2f}"] if classes == 2 else _signed(intercepts)
    name = "intercept" if classes == 2 else "intercepts"
    return Recalibration(apply, f"slope {slope:.2f}, {name} {', '.join(moved)}")


def of_label(labels: Labels, answers: Answers) -> Recalibration:
    """Return the slope and the intercept of the logit of one probability (n, 1)."""
    found = of_probabilities(labels, both(answers))
    return Recalibration(lambda other: found.apply(both(other))[:, 1:], found.words)


def of_numbers(labels: Labels, answers: Answers) -> Recalibration:
    """Return the least-squares line from predicted numbers to labels, also for their intervals.

    The line is only a shift for fewer than 3 labels, or if all predicted numbers are equal.
    """
    values = np.asarray(answers[:, 0], dtype=np.float64)
    slope = 1.0
    if len(values) >= FEWEST and np.ptp(values) > 0:
        slope = max(SHALLOWEST, float(np.polyfit(values, labels, 1)[0]))
    shift = float(np.mean(labels - slope * values))
    return Recalibration(
        lambda other: np.asarray(slope * other + shift), f"scale {slope:.3g}, shift {shift:+.3g}"
    )


def of_survival(labels: Labels, answers: Answers, horizons: tuple[float, ...]) -> Recalibration:
    """Return the factor of all hazards: the observed events over those expected, one added to both.

    Events until the last horizon count. Risks stay as they are: they are relative.
    """
    events, expected = events_and_expected(labels, answers, horizons)
    factor = (events + 1) / (expected + 1)

    def apply(other: Answers) -> Answers:
        return np.concatenate([other[:, :1], np.clip(other[:, 1:], 0, 1) ** factor], axis=1)

    return Recalibration(apply, f"hazards times {factor:.2f}")


def events_and_expected(
    labels: Labels, answers: Answers, horizons: tuple[float, ...]
) -> tuple[float, float]:
    """Return the observed events until the last horizon, and those that survival predicts.

    What is expected of a slide is its cumulative hazard until its time, which is linear between
    horizons.
    """
    times = np.minimum(labels[:, 0].astype(np.float64), horizons[-1])
    events = float(np.sum((labels[:, 1] > 0) & (labels[:, 0] <= horizons[-1])))
    hazards = -np.log(np.clip(answers[:, 1:].astype(np.float64), SMALLEST, 1))
    ends = np.r_[0.0, horizons]
    expected = sum(
        float(np.interp(time, ends, np.r_[0.0, hazard]))
        for time, hazard in zip(times, hazards, strict=True)
    )
    return events, expected


def both(answers: Answers) -> Answers:
    """Return the probabilities (n, 2) that a label is negative and positive."""
    return np.concatenate([1 - answers, answers], axis=1)


def _logs(answers: Answers) -> NDArray[np.float64]:
    from scipy.special import logsumexp

    logs = np.log(np.clip(np.asarray(answers, dtype=np.float64), SMALLEST, 1))
    return np.asarray(logs - logsumexp(logs, axis=1, keepdims=True))


def _signed(values: NDArray[np.float64]) -> list[str]:
    return [f"{value:+.2f}" for value in values - values.mean()]


def _losses(labels: Labels, answers: Answers) -> Values:
    own = np.asarray(answers, dtype=np.float64)[np.arange(len(labels)), labels]
    return np.asarray(-np.log(np.clip(own, SMALLEST, 1)))


def _log_loss(labels: Labels, answers: Answers) -> float:
    return float(_losses(labels, answers).mean())


def _log_losses(labels: Labels, answers: Answers, weights: Weights) -> Values:
    return ratio(weights @ _losses(labels, answers), weights.sum(axis=1))


LOG_LOSS = Metric(
    name="log_loss",
    title="Log-loss",
    function=_log_loss,
    higher_is_better=False,
    weighted=_log_losses,
)
"""Of probabilities (n, C)."""

LABEL_LOG_LOSS = Metric(
    name="log_loss",
    title="Log-loss",
    function=lambda labels, answers: _log_loss(labels, both(answers)),
    higher_is_better=False,
    weighted=lambda labels, answers, weights: _log_losses(labels, both(answers), weights),
)
"""Of one probability (n, 1)."""
