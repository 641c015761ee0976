"""Survival curves: Kaplan-Meier with its interval, numbers at risk, log-rank test, Breslow.

Times are (n,), events (n,) are true for an event and false for a censored slide. An event counts
before a censoring at the same time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Events = NDArray[np.bool_]


class SurvivalCurve(NamedTuple):
    """A step function: the probability of no event until each time, with its interval."""

    times: Times
    survival: Times
    low: Times
    high: Times
    """Of the 95 % interval: Greenwood's variance on the scale log(-log S)."""

    def at(self, times: Sequence[float] | Times) -> Times:
        """Return the survival at some times."""
        return self._step(self.survival, times)

    def interval_at(self, time: float) -> tuple[float, float]:
        """Return the interval at a time."""
        low, high = (float(self._step(ends, [time])[0]) for ends in (self.low, self.high))
        return low, high

    @property
    def median(self) -> float | None:
        """The first time at which half or fewer are without an event, if there is one."""
        below = np.flatnonzero(self.survival <= 0.5)
        return float(self.times[below[0]]) if len(below) else None

    def _step(self, values: Times, times: Sequence[float] | Times) -> Times:
        place = np.searchsorted(self.times, np.asarray(times, dtype=np.float64), side="right")
        return np.concatenate([[1.0], values])[place]


def kaplan_meier(times: Times, events: Events, level: float = 0.95) -> SurvivalCurve:
    """Return the estimate of Kaplan and Meier."""
    from scipy.stats import norm

    unique, deaths, at_risk = event_table(times, events)
    with np.errstate(divide="ignore", invalid="ignore"):
        survival = np.cumprod(1 - deaths / at_risk, dtype=np.float64)
        variance = np.cumsum(deaths / (at_risk * (at_risk - deaths))) / np.log(survival) ** 2
        reach = norm.ppf((1 + level) / 2) * np.sqrt(variance)
        low, high = (survival ** np.exp(sign * reach) for sign in (1, -1))
    inner = (survival > 0) & (survival < 1)
    return SurvivalCurve(
        unique, survival, np.where(inner, low, survival), np.where(inner, high, survival)
    )


def event_table(times: Times, events: Events) -> tuple[Times, Times, Times]:
    """Return the distinct times, the number of events at each, and the number at risk."""
    unique, place = np.unique(np.asarray(times, dtype=np.float64), return_inverse=True)
    deaths = np.bincount(place, weights=events, minlength=len(unique))
    leaving = np.bincount(place, minlength=len(unique))
    at_risk = leaving[::-1].cumsum()[::-1]
    return unique, np.asarray(deaths, np.float64), np.asarray(at_risk, np.float64)


def numbers_at_risk(times: Times, at: Sequence[float]) -> list[int]:
    """Return how many are still followed at some times."""
    return [int((times >= time).sum()) for time in at]


def log_rank(times: Times, events: Events, groups: Sequence[int] | NDArray[np.int64]) -> float:
    """Return the p of the log-rank test that all groups have the same hazard.

    It is NaN where there are fewer than two groups, or no event.
    """
    from scipy.stats import chi2

    codes = np.unique(np.asarray(groups), return_inverse=True)[1]
    size = int(codes.max()) + 1 if len(codes) else 0
    if size < 2:
        return float("nan")
    unique, deaths, at_risk = event_table(times, events)
    own = [event_table(times[codes == code], events[codes == code]) for code in range(size)]
    risk = np.zeros((size, len(unique)))
    died = np.zeros((size, len(unique)))
    for code, (own_times, own_deaths, _) in enumerate(own):
        risk[code] = [(times[codes == code] >= time).sum() for time in unique]
        died[code, np.searchsorted(unique, own_times)] = own_deaths
    expected = risk * deaths / at_risk
    spread = deaths * np.divide(
        at_risk - deaths, at_risk - 1, out=np.zeros_like(at_risk), where=at_risk > 1
    )
    share = risk / at_risk
    covariance = np.diag((share * spread).sum(axis=1)) - (share * spread) @ share.T
    apart = (died - expected).sum(axis=1)[:-1]
    rank = int(np.linalg.matrix_rank(covariance[:-1, :-1]))
    if rank == 0:
        return float("nan")
    statistic = float(apart @ np.linalg.pinv(covariance[:-1, :-1]) @ apart)
    return float(chi2.sf(statistic, rank))


def cumulative_hazard(
    times: Times, events: Events, at: Sequence[float] | Times, risks: Times | None = None
) -> Times:
    """Return the cumulative hazard of a slide of risk 0 at some times, as Breslow estimates it.

    `risks` are log hazards, by default 0: the estimate is then that of Nelson and Aalen.
    """
    unique, place = np.unique(np.asarray(times, dtype=np.float64), return_inverse=True)
    deaths = np.bincount(place, weights=events, minlength=len(unique))
    weight = np.ones(len(times)) if risks is None else np.exp(risks)
    hazards = np.bincount(place, weights=weight, minlength=len(unique))[::-1].cumsum()[::-1]
    total = np.concatenate([[0.0], np.cumsum(deaths / hazards)])
    return total[np.searchsorted(unique, np.asarray(at, dtype=np.float64), side="right")]
