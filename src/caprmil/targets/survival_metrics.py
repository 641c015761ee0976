"""Metrics of survival: ranking, prediction at horizons, calibration.

`labels` are (n, 2): time, and 1 for an event or 0 for a censored slide. `answers` are (n, 1 + H):
the risk, and the survival at each of H horizons. Every metric is computed for many draws of slides
at once: a weight says how often a draw holds a slide.

Censoring is corrected by weights 1 / G, where G is the Kaplan-Meier estimate of not being censored
among the slides that are scored. An event at time t has the weight of G just before t.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.kaplan_meier import kaplan_meier
from caprmil.targets.metric import Answers, Labels, Metric, Values, Weights, ratio

if TYPE_CHECKING:
    from caprmil.targets.target import Target

PAIRS = 2_000_000  # of slides at a time
GROUP = 25  # slides in a group of calibration, at least
MOST_GROUPS = 4

Matrix: TypeAlias = NDArray[np.float64]


class Uncensored(NamedTuple):
    """The probability of not being censored, for each draw."""

    before: Matrix
    """Draws x slides: until just before the time of each slide."""
    after: Callable[[float], Values]
    """Of each draw, until a time."""


def uncensored(times: Values, events: NDArray[np.bool_], weights: Weights) -> Uncensored:
    """Return the Kaplan-Meier estimate of not being censored in each draw.

    At a time with both, events come before censorings.
    """
    unique, place = np.unique(times, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    leaving = np.add.reduceat(weights[:, order], starts, axis=1)
    died = np.add.reduceat((weights * events)[:, order], starts, axis=1)
    at_risk = leaving[:, ::-1].cumsum(axis=1)[:, ::-1] - died
    stay = 1 - np.divide(leaving - died, at_risk, out=np.zeros_like(died), where=at_risk > 0)
    steps = np.concatenate([np.ones((len(weights), 1)), stay.cumprod(axis=1)], axis=1)

    def after(time: float) -> Values:
        found: Values = steps[:, np.searchsorted(unique, time, side="right")]
        return found

    return Uncensored(steps[:, place], after)


def c_index(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return Harrell's C of each draw: the share of comparable pairs in the right order.

    A pair is comparable if the slide with the earlier time had the event. It is in the right order
    if that slide has the higher risk; equal risks count as half.
    """
    return _concordance(labels, answers, weights, weights)


def uno_c_index(labels: Labels, answers: Answers, weights: Weights) -> Values:
    """Return Uno's C of each draw: pairs are weighted by 1 / G squared, against censoring."""
    times, events = _split(labels)
    stay = uncensored(times, events, weights).before
    first = weights * ratio(np.ones_like(stay), stay**2)
    return _concordance(labels, answers, np.nan_to_num(first), weights)


def _concordance(labels: Labels, answers: Answers, first: Matrix, weights: Weights) -> Values:
    """Return the concordance, with one weight for the earlier slide of a pair and for the later."""
    times, events = _split(labels)
    risks = answers[:, 0]
    right, total = np.zeros(len(weights)), np.zeros(len(weights))
    own = np.flatnonzero(events)
    block = max(1, PAIRS // max(1, len(times)))
    for start in range(0, len(own), block):
        rows = own[start : start + block]
        later = (times > times[rows, None]) | ((times == times[rows, None]) & ~events)
        wins = later * ((risks[rows, None] > risks) + 0.5 * (risks[rows, None] == risks))
        right += ((weights @ wins.T) * first[:, rows]).sum(axis=1)
        total += ((weights @ later.T) * first[:, rows]).sum(axis=1)
    return ratio(right, total)


def auc_at(
    labels: Labels, answers: Answers, weights: Weights, *, horizon: float, column: int
) -> Values:
    """Return the AUC of each draw: events until a horizon against slides followed beyond it."""
    times, events = _split(labels)
    cases = np.flatnonzero(events & (times <= horizon))
    controls = np.flatnonzero(times > horizon)
    if not (len(cases) and len(controls)):
        return np.full(len(weights), np.nan)
    stay = uncensored(times, events, weights).before[:, cases]
    first = np.nan_to_num(weights[:, cases] * ratio(np.ones_like(stay), stay))
    risks = 1 - answers[:, column]
    above = np.zeros(len(weights))
    block = max(1, PAIRS // len(controls))
    for start in range(0, len(cases), block):
        part = slice(start, start + block)
        mine, theirs = risks[cases[part], None], risks[controls]
        wins = (mine > theirs) + 0.5 * (mine == theirs)
        above += ((weights[:, controls] @ wins.T) * first[:, part]).sum(axis=1)
    return ratio(above, first.sum(axis=1) * weights[:, controls].sum(axis=1))


def mean_auc(
    labels: Labels, answers: Answers, weights: Weights, *, horizons: Sequence[float]
) -> Values:
    """Return the mean AUC over the horizons at which a draw has one."""
    found = np.stack(
        [
            auc_at(labels, answers, weights, horizon=horizon, column=column)
            for column, horizon in enumerate(horizons, 1)
        ]
    )
    there = ~np.isnan(found)
    return ratio(np.where(there, found, 0).sum(axis=0), there.sum(axis=0))


def brier_at(
    labels: Labels, answers: Answers, weights: Weights, *, horizon: float, column: int
) -> Values:
    """Return the Brier score of each draw at a horizon; NaN where nobody is followed beyond it."""
    times, events = _split(labels)
    stay, survival = uncensored(times, events, weights), answers[:, column]
    died, lives = events & (times <= horizon), times > horizon
    early = np.nan_to_num(ratio(np.ones_like(stay.before), stay.before)) * (died * survival**2)
    late = ratio(np.ones(len(weights)), stay.after(horizon))[:, None] * (
        lives * (1 - survival) ** 2
    )
    followed = (weights * lives).sum(axis=1)
    total = (weights * (early + np.nan_to_num(late))).sum(axis=1)
    return np.where(followed > 0, ratio(total, weights.sum(axis=1)), np.nan)


def integrated_brier(
    labels: Labels, answers: Answers, weights: Weights, *, horizons: Sequence[float]
) -> Values:
    """Return the mean Brier score between the first and the last horizon, by trapezoids.

    A draw that is not followed beyond the last horizons is scored up to the one before; NaN if
    fewer than two are left.
    """
    scores = np.stack(
        [
            brier_at(labels, answers, weights, horizon=horizon, column=column)
            for column, horizon in enumerate(horizons, 1)
        ]
    )
    widths = np.diff(horizons)[:, None]
    areas = widths * (scores[1:] + scores[:-1]) / 2
    there = ~np.isnan(areas)
    return ratio(np.where(there, areas, 0).sum(axis=0), (there * widths).sum(axis=0))


def calibration(labels: Labels, answers: Answers, *, horizons: Sequence[float]) -> float:
    """Return the mean difference between predicted and observed survival, at the horizons.

    Slides are divided into up to four groups of similar prediction. What is observed in a group is
    the Kaplan-Meier estimate.
    """
    apart, sizes = [], []
    for column, horizon in enumerate(horizons, 1):
        for group in calibration_groups(labels, answers, horizon=horizon, column=column):
            apart.append(abs(group.predicted - group.observed))
            sizes.append(group.slides)
    return float(np.average(apart, weights=sizes)) if apart else float("nan")


def calibration_draws(
    labels: Labels, answers: Answers, weights: Weights, *, horizons: Sequence[float]
) -> Values:
    """Return the calibration of each draw, whose groups are its own."""
    times, events = _split(labels)
    apart, counted = np.zeros(len(weights)), np.zeros(len(weights))
    for column, horizon in enumerate(horizons, 1):
        order = np.argsort(answers[:, column], kind="stable")
        for inside in _groups_of_draws(weights[:, order]):
            size = inside.sum(axis=1)
            observed = _survival_of_draws(times[order], events[order], inside, horizon)
            error = np.abs(ratio(inside @ answers[order, column], size) - observed)
            known = ~np.isnan(error)
            apart += np.where(known, size * error, 0)
            counted += np.where(known, size, 0)
    return ratio(apart, counted)


def _groups_of_draws(weights: Matrix) -> Iterator[Matrix]:
    """Yield how often each draw has each slide in a group of equal size; slides are in order."""
    sizes = weights.sum(axis=1, keepdims=True)
    groups = np.clip(sizes // GROUP, 1, MOST_GROUPS)
    ends = weights.cumsum(axis=1)
    for number in range(int(groups.max(initial=0))):
        start = number * (sizes // groups) + np.minimum(number, sizes % groups)
        end = np.where(number < groups, start + sizes // groups + (number < sizes % groups), start)
        inside = np.minimum(ends, end) - np.maximum(ends - weights, start)
        yield np.clip(inside, 0, None)


def _survival_of_draws(
    times: Values, events: NDArray[np.bool_], weights: Matrix, horizon: float
) -> Values:
    """Return the Kaplan-Meier estimate of each draw at a horizon; NaN where nobody knows it."""
    order = np.argsort(times, kind="stable")
    times, weights = times[order], weights[:, order]
    starts = np.flatnonzero(np.diff(times, prepend=-1))
    leaving = np.add.reduceat(weights, starts, axis=1)
    died = np.add.reduceat(weights * events[order], starts, axis=1)
    at_risk = leaving[:, ::-1].cumsum(axis=1)[:, ::-1]
    stay = 1 - np.divide(died, at_risk, out=np.zeros_like(died), where=at_risk > 0)
    until = stay[:, times[starts] <= horizon].prod(axis=1)
    known = (weights[:, times > horizon] > 0).any(axis=1) | (stay.prod(axis=1) == 0)
    return np.where(known, until, np.nan)


class CalibrationGroup(NamedTuple):
    """Slides with a similar predicted survival at a horizon."""

    slides: int
    predicted: float
    observed: float
    low: float
    high: float
    """Of the 95 % interval of what is observed."""


def calibration_groups(
    labels: Labels, answers: Answers, *, horizon: float, column: int
) -> Iterator[CalibrationGroup]:
    """Yield groups of equal size by predicted survival, whose survival at the horizon is known."""
    times, events = _split(labels)
    order = np.argsort(answers[:, column], kind="stable")
    groups = min(MOST_GROUPS, max(1, len(order) // GROUP))
    for rows in np.array_split(order, groups) if len(order) else ():
        curve = kaplan_meier(times[rows], events[rows])
        if times[rows].max() > horizon or curve.survival[-1] == 0:  # else nobody knows
            yield CalibrationGroup(
                len(rows),
                float(answers[rows, column].mean()),
                float(curve.at([horizon])[0]),
                *curve.interval_at(horizon),
            )


def _split(labels: Labels) -> tuple[Values, NDArray[np.bool_]]:
    return np.asarray(labels[:, 0], dtype=np.float64), labels[:, 1] > 0


def _once(
    weighted: Callable[[Labels, Answers, Weights], Values], labels: Labels, answers: Answers
) -> float:
    """Return a metric in which each slide counts once."""
    return float(weighted(labels, answers, np.ones((1, len(labels))))[0])


def _metric(
    name: str, title: str, weighted: Callable[[Labels, Answers, Weights], Values], **more: object
) -> Metric:
    function = partial(_once, weighted)
    return Metric(name=name, title=title, function=function, weighted=weighted, **more)  # type: ignore[arg-type]


def _horizons(target: "Target") -> tuple[float, ...]:
    found: tuple[float, ...] = target.horizons  # type: ignore[attr-defined]
    return found


def _aucs(target: "Target") -> Iterator[Metric]:
    """Yield the mean AUC over horizons, and that at each of them."""
    horizons, unit = _horizons(target), target.unit  # type: ignore[attr-defined]
    if horizons:
        yield _metric("auc", "AUC at horizons", partial(mean_auc, horizons=horizons), chance=0.5)
    for column, horizon in enumerate(horizons, 1):
        found = partial(auc_at, horizon=horizon, column=column)
        title = f"AUC at {horizon:.10g} {unit}".rstrip()
        yield _metric(f"auc_{horizon:.10g}", title, found, chance=0.5, printed=False)


def _integrated_briers(target: "Target") -> Iterator[Metric]:
    if len(horizons := _horizons(target)) > 1:
        yield _metric(
            "ibs",
            "Integrated Brier score",
            partial(integrated_brier, horizons=horizons),
            higher_is_better=False,
        )


def _calibrations(target: "Target") -> Iterator[Metric]:
    if horizons := _horizons(target):
        yield Metric(
            name="calibration",
            title="Calibration error at horizons",
            function=partial(calibration, horizons=horizons),
            higher_is_better=False,
            biased=True,
            centred=True,
            weighted=partial(calibration_draws, horizons=horizons),
        )


def _unbound(*_: object) -> float:
    raise TypeError("This metric depends on horizons: use target.metrics.")


SURVIVAL_METRICS = (
    _metric("c_index", "C-index (Harrell)", c_index, chance=0.5),
    _metric("uno_c_index", "C-index (Uno)", uno_c_index, chance=0.5),
    Metric(name="auc", title="AUC at horizons", function=_unbound, chance=0.5, variants=_aucs),
    Metric(
        name="ibs",
        title="Integrated Brier score",
        function=_unbound,
        higher_is_better=False,
        variants=_integrated_briers,
    ),
    Metric(
        name="calibration",
        title="Calibration error at horizons",
        function=_unbound,
        higher_is_better=False,
        biased=True,
        centred=True,
        variants=_calibrations,
    ),
)
"""In the order in which scores are listed."""
