"""Cox's partial likelihood in NumPy, with Efron's ties."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
