"""Comparison of models: every pair of tables, each metric by its own test, corrected."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, UnknownNameError
from caprmil.evaluation.alignment import Alignment, Part, align
from caprmil.evaluation.differences import LEVEL, Comparison, Difference, Floor
from caprmil.evaluation.paired_tests import (
    bootstrap_test,
    draw_patients,
    influence,
    influence_test,
    sample,
)
from caprmil.evaluation.predictions import Predictions
from caprmil.targets.metric import Interval, Metric, mean_and_spread, metrics_of

BIASED = (
    "ACE and ECE are too high on few slides, most of all for a less confident model. They are even "
    "higher in a bootstrap; its draws are shifted back, so intervals and p are rough. The floor is "
    "that of a perfectly calibrated model with these answers: a model at its floor is not shown to "
    "be worse than another."
)
MEANING = "p and intervals describe other patients, not another training."


def compare(
    tables: Mapping[str, Predictions],
    *,
    against: Collection[str] = (),
    names: Iterable[str] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare tables on the slides they share: all pairs, or each with those in `against`.

    The statistic is the mean over folds of a fold's metric. The AUC is tested by DeLong's test
    with patients as clusters, metrics without an influence function by a paired bootstrap of
    patients; p is corrected after Holm over the pairs, for each metric. `names` are metrics;
    default: all that apply.
    """
    for name in against:
        if name not in tables:
            raise UnknownNameError("table", name, tables)
    pairs = [(one, ref) for one in tables if one not in against for ref in against]
    pairs = pairs if against else list(combinations(tables, 2))
    if not pairs:
        raise CohortError("There is nothing to compare. Pass at least two tables of predictions.")
    alignment = align(tables)
    metrics = metrics_of(alignment.target, names)
    tested = _test(alignment, pairs, metrics, draws, seed)
    floors = _floors(alignment, metrics.values(), seed)
    biased = [BIASED] if any(metric.biased for metric in metrics.values()) else []
    return Comparison(
        differences=tuple(
            _at_floor(d, floors.get(name)) for name in metrics for d in _holm(tested[name])
        ),
        floors=floors,
        slides=alignment.slides,
        patients=len(alignment.patients),
        folds=alignment.folds,
        notes=(*alignment.notes, *_test_notes(alignment), *biased, MEANING),
        unit=alignment.unit,
    )


def compare_with_baselines(
    name: str, predictions: Predictions, baselines: Mapping[str, Predictions]
) -> Comparison:
    """Compare the headline metric of a model with those of the baselines."""
    names = [predictions.target.headline]
    return compare({name: predictions, **baselines}, against=list(baselines), names=names)


def _floors(
    alignment: Alignment, metrics: Iterable[Metric], seed: int
) -> dict[str, dict[str, Floor]]:
    """Return the floors of metrics: of the mean over folds, by metric and table."""
    floors: dict[str, dict[str, Floor]] = {}
    for metric in (metric for metric in metrics if metric.floor):
        assert metric.floor is not None
        floors[metric.name] = {}
        for name, parts in alignment.answers.items():
            found = np.array([metric.floor(_counted(metric, part), seed) for part in parts])
            spread = np.sqrt((found[:, 1] ** 2).sum()) / len(found)  # folds are independent
            floors[metric.name][name] = Floor(float(found[:, 0].mean()), float(spread))
    return floors


def _counted(metric: Metric, part: Part) -> NDArray[np.floating]:
    """Return the answers that a metric counts."""
    return part.answers if metric.counted is None else part.answers[metric.counted(part.labels)]


def _at_floor(difference: Difference, floors: Mapping[str, Floor] | None) -> Difference:
    """Mark a difference that chance explains, though the test of the same patients finds one."""
    if floors is None:
        return difference
    one, other = floors[difference.first], floors[difference.second]
    higher = one if difference.difference > 0 else other
    value = max(difference.of_first.mean, difference.of_second.mean)
    vary = abs(difference.difference) < max(one.spread, other.spread)
    return replace(difference, at_floor=vary or higher.holds(value))


def _test_notes(alignment: Alignment) -> Iterable[str]:
    parts = next(iter(alignment.answers.values()))
    for fold, part in zip(alignment.folds, parts, strict=True):
        yield from alignment.target.comparison_notes(fold, part.labels, part.owners)


def _test(
    alignment: Alignment,
    pairs: Sequence[tuple[str, str]],
    metrics: Mapping[str, Metric],
    draws: int,
    seed: int,
) -> dict[str, list[Difference]]:
    """Return the difference of each pair, for each metric."""
    patients = len(alignment.patients)
    used = {name for pair in pairs for name in pair}
    answers = {name: parts for name, parts in alignment.answers.items() if name in used}
    tested: dict[str, list[Difference]] = {name: [] for name in metrics}
    for metric in (metric for metric in metrics.values() if metric.influence):
        found = {name: influence(metric, parts, patients) for name, parts in answers.items()}
        for one, other in pairs:
            result = influence_test(found[one], found[other], LEVEL)
            folds = found[one].folds, found[other].folds
            tested[metric.name].append(_difference((one, other), metric, folds, *result, patients))
    if others := [metric for metric in metrics.values() if not metric.influence]:
        drawn = draw_patients(patients, draws, seed)
        once = np.ones((1, patients), dtype=np.int64)  # each patient once: the value itself
        values = {name: sample(parts, once, others) for name, parts in answers.items()}
        again = {name: sample(parts, drawn, others) for name, parts in answers.items()}
        for metric, (one, other) in product(others, pairs):
            folds = values[one][metric.name][:, 0], values[other][metric.name][:, 0]
            around = float(np.nanmean(folds[0] - folds[1])) if metric.biased else None
            draws_of = again[one][metric.name], again[other][metric.name]
            result = bootstrap_test(*draws_of, LEVEL, around)
            tested[metric.name].append(_difference((one, other), metric, folds, *result, patients))
    return tested


def _difference(
    pair: tuple[str, str],
    metric: Metric,
    folds: tuple[NDArray[np.float64], NDArray[np.float64]],
    interval: Interval,
    p: float,
    patients: int,
) -> Difference:
    """Put a difference together, from the folds on which both have a value."""
    # On few patients both tests give too small a p. Even if all patients agree, a sign test has
    # this p: nothing smaller is reported.
    p = max(p, 2.0 ** (1 - patients))
    both = ~np.isnan(folds[0]) & ~np.isnan(folds[1])
    one, other = (mean_and_spread(values[both].tolist()) for values in folds)
    return Difference(
        first=pair[0],
        second=pair[1],
        metric=metric.name,
        higher_is_better=metric.higher_is_better,
        of_first=one,
        of_second=other,
        interval=interval,
        p=p,
        corrected_p=p,
    )


def _holm(differences: Sequence[Difference]) -> list[Difference]:
    """Correct p for the number of pairs; a p that is not known does not count."""
    known = sorted((d.p, at) for at, d in enumerate(differences) if not math.isnan(d.p))
    corrected, least = list(differences), 0.0
    for rank, (p, at) in enumerate(known):
        least = max(least, min(1.0, (len(known) - rank) * p))
        corrected[at] = replace(differences[at], corrected_p=least)
    return corrected
