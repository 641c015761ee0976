"""Cox's proportional hazards: the partial likelihood with Efron's ties, and a linear model."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.kaplan_meier import cumulative_hazard

Values = NDArray[np.float64]


class RiskSets(NamedTuple):
    """Times and events in an order in which every risk set is a prefix: the latest time first."""

    order: NDArray[np.int64]
    events: NDArray[np.int64]
    """The places of events in that order."""
    last: NDArray[np.int64]
    """For each event, the last place of its risk set."""
    first_tied: NDArray[np.int64]
    """For each event, its first place among all of the same time."""
    share: Values
    """For each event, the share of the tied events that Efron has left before it."""
    tied: NDArray[np.bool_]
    """By place, whether it is an event that is tied with another."""


def risk_sets(times: Values, events: NDArray[np.bool_]) -> RiskSets:
    """Return the risk sets of times and events."""
    order = np.lexsort((~events, -times))  # of a time, events come first
    ordered, happened = times[order], events[order]
    places = np.flatnonzero(happened)
    first = np.searchsorted(-ordered, -ordered[places], side="left")
    last = np.searchsorted(-ordered, -ordered[places], side="right") - 1
    rank = places - first
    unique, inverse, counts = np.unique(first, return_inverse=True, return_counts=True)
    together = counts[inverse] if len(unique) else rank
    tied = np.zeros(len(times), dtype=np.bool_)
    tied[places[together > 1]] = True
    return RiskSets(order, places, last, first, rank / np.maximum(together, 1), tied)


def partial_likelihood(
    risks: Values, sets: RiskSets, *, gradient: bool = False
) -> tuple[float, Values]:
    """Return minus the log partial likelihood, and its gradient by the risks if wanted.

    Ties are Efron's: of d events at one time, the one after l others has l/d of their hazards
    taken out of its risk set.
    """
    ordered = risks[sets.order]
    hazards = np.exp(ordered - ordered.max())
    below = np.concatenate([[0.0], np.cumsum(hazards)])
    tied = np.concatenate([[0.0], np.cumsum(np.where(sets.tied, hazards, 0.0))])
    at_risk = below[sets.last + 1]
    out = sets.share * (tied[sets.last + 1] - tied[sets.first_tied])
    total = np.maximum(at_risk - out, np.finfo(np.float64).tiny)
    loss = float(np.sum(np.log(total)) + len(total) * ordered.max() - ordered[sets.events].sum())
    if not gradient:
        return loss, np.zeros(0)
    inverse, n = 1 / total, len(ordered)
    # A place is in the risk set of every event whose set ends at it or later.
    ends = np.bincount(sets.last, weights=inverse, minlength=n)[::-1].cumsum()[::-1]
    slopes = hazards * ends
    # A tied event is in the part that Efron takes out for all events of its time.
    taken = np.bincount(sets.first_tied, weights=sets.share * inverse, minlength=n)
    slopes[sets.events] -= hazards[sets.events] * taken[sets.first_tied] + 1
    found = np.empty(n)
    found[sets.order] = slopes
    return loss, found


def fit_cox(features: Values, times: Values, events: NDArray[np.bool_], strength: float) -> Values:
    """Return the coefficients of a linear log hazard, with a ridge penalty of 1 / strength."""
    from scipy.optimize import minimize

    sets = risk_sets(times, events)

    def loss(weights: Values) -> tuple[float, Values]:
        value, slopes = partial_likelihood(features @ weights, sets, gradient=True)
        return (
            strength * value + 0.5 * float(weights @ weights),
            strength * (features.T @ slopes) + weights,
        )

    start = np.zeros(features.shape[1])
    if not events.any():
        return start
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 1000})
    return np.asarray(found.x, dtype=np.float64)


class LinearCox:
    """A linear log hazard, with scikit-learn's interface. Labels are (n, 2): time and event.

    It predicts answers: the risk relative to the median of the training rows, and the survival at
    horizons.
    """

    def __init__(self, strength: float, horizons: Sequence[float]) -> None:
        self.strength, self.horizons = strength, tuple(horizons)

    def fit(self, features: Values, labels: Values) -> "LinearCox":
        """Fit the coefficients, and the baseline hazard."""
        times, events = labels[:, 0], labels[:, 1] > 0
        self.coef_ = fit_cox(features, times, events, self.strength)
        risks = features @ self.coef_
        self.center_ = float(np.median(risks))
        self.hazard_ = cumulative_hazard(times, events, self.horizons, risks - self.center_)
        return self

    def predict(self, features: Values) -> Values:
        """Return the risk and the survival at horizons of each row."""
        risks = features @ self.coef_ - self.center_
        survival = np.exp(-self.hazard_ * np.exp(np.clip(risks, -50, 50))[:, None])
        return np.concatenate([risks[:, None], survival], axis=1)
