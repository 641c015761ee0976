"""Comparing: every pair of tables, each metric by the test that suits it, corrected for number."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, UnknownNameError
from caprmil.evaluation import bootstrap, metrics
from caprmil.evaluation import delong as areas
from caprmil.evaluation.alignment import Ground, Part, common
from caprmil.evaluation.differences import LEVEL, Comparison, Difference
from caprmil.evaluation.metrics import Interval
from caprmil.evaluation.predictions import Predictions

BIASED = (
    "ACE and ECE read too high on few slides, the more so for a less confident model, and higher "
    "still in a bootstrap, whose draws are moved back for that: intervals and p are rough. The "
    "floor beside an ACE is what a perfectly calibrated model with these answers would read."
)
MEANING = "p and intervals say what other patients would change, not what training once more would."


def compare(
    tables: Mapping[str, Predictions],
    *,
    against: Collection[str] = (),
    names: Iterable[str] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare tables on the slides they share: all pairs, or each with those in `against`.

    The statistic is the mean over folds of a fold's metric. The area is judged by DeLong's test
    with patients as clusters, all other metrics by a paired bootstrap of patients; p is corrected
    after Holm over the pairs, for each metric apart. `names` are metrics; default: all that apply.
    """
    for name in against:
        if name not in tables:
            raise UnknownNameError("table", name, tables)
    pairs = [(one, ref) for one in tables if one not in against for ref in against]
    pairs = pairs if against else list(combinations(tables, 2))
    if not pairs:
        raise CohortError("There is nothing to compare: give two tables of predictions at least.")
    ground = common(tables)
    chosen = _metrics(ground, names)
    judged = _judge(ground, pairs, chosen, draws, seed)
    floored = ground.answers if "ace" in chosen else {}
    remarks = [BIASED] if metrics.CALIBRATION_ERRORS & set(chosen) else []
    return Comparison(
        differences=tuple(d for name in chosen for d in _holm(judged[name])),
        ace_floors={name: _floor(parts, seed) for name, parts in floored.items()},
        slides=ground.slides,
        patients=len(ground.patients),
        folds=ground.folds,
        notes=(*ground.notes, *_lonely(ground), *remarks, MEANING),
    )


def compare_with_baselines(
    name: str, answers: Predictions, shortcuts: Mapping[str, Predictions]
) -> Comparison:
    """Compare the area of a model with those of answers that need none."""
    return compare({name: answers, **shortcuts}, against=list(shortcuts), names=["auc"])


def _metrics(ground: Ground, names: Iterable[str] | None) -> list[str]:
    two = len(ground.classes) == 2
    applicable = [n for n in metrics.METRICS if two or n not in metrics.TWO_CLASSES_ONLY]
    for name in names or ():
        if name not in applicable:
            raise UnknownNameError(f"metric of {len(ground.classes)} classes", name, applicable)
    return applicable if names is None else list(names)


def _judge(
    ground: Ground, pairs: Sequence[tuple[str, str]], names: Sequence[str], times: int, seed: int
) -> dict[str, list[Difference]]:
    """Return the difference of each pair, for each metric."""
    patients = len(ground.patients)
    used = {name for pair in pairs for name in pair}
    answers = {name: parts for name, parts in ground.answers.items() if name in used}
    judged: dict[str, list[Difference]] = {name: [] for name in names}
    if "auc" in names:
        found = {name: areas.area(parts, patients) for name, parts in answers.items()}
        for one, other in pairs:
            verdict = areas.judge(found[one], found[other], LEVEL)
            folds = found[one].folds, found[other].folds
            judged["auc"].append(_difference((one, other), "auc", folds, *verdict, patients))
    if others := [name for name in names if name != "auc"]:
        drawn = bootstrap.draw_patients(patients, times, seed)
        once = np.ones((1, patients), dtype=np.int64)  # each patient once: the value itself
        values = {name: bootstrap.sample(parts, once, others) for name, parts in answers.items()}
        again = {name: bootstrap.sample(parts, drawn, others) for name, parts in answers.items()}
        for metric, (one, other) in product(others, pairs):
            folds = values[one][metric][:, 0], values[other][metric][:, 0]
            biased = metric in metrics.CALIBRATION_ERRORS
            around = float(np.nanmean(folds[0] - folds[1])) if biased else None
            verdict = bootstrap.judge(again[one][metric], again[other][metric], LEVEL, around)
            judged[metric].append(_difference((one, other), metric, folds, *verdict, patients))
    return judged


def _difference(
    pair: tuple[str, str],
    metric: str,
    folds: tuple[NDArray[np.float64], NDArray[np.float64]],
    interval: Interval,
    p: float,
    patients: int,
) -> Difference:
    """Put a difference together, from the folds on which both have a value."""
    # On few patients both tests are too sure. Even if all of them take the same side, a sign
    # test has this p: nothing smaller is believed.
    p = max(p, 2.0 ** (1 - patients))
    both = ~np.isnan(folds[0]) & ~np.isnan(folds[1])
    one, other = (metrics.mean_and_spread(values[both].tolist()) for values in folds)
    return Difference(
        first=pair[0],
        second=pair[1],
        metric=metric,
        of_first=one,
        of_second=other,
        interval=interval,
        p=p,
        corrected_p=p,
    )


def _holm(differences: Sequence[Difference]) -> list[Difference]:
    """Correct p for the number of pairs; a p that is not known counts for none."""
    known = sorted((d.p, at) for at, d in enumerate(differences) if not math.isnan(d.p))
    corrected, least = list(differences), 0.0
    for rank, (p, at) in enumerate(known):
        least = max(least, min(1.0, (len(known) - rank) * p))
        corrected[at] = replace(differences[at], corrected_p=least)
    return corrected


def _floor(parts: Sequence[Part], seed: int) -> float:
    """Return the ACE that perfect calibration would read: the mean over folds."""
    return float(np.mean([metrics.ace_floor(part.probabilities, seed=seed)[0] for part in parts]))


def _lonely(ground: Ground) -> Iterable[str]:
    """Say where DeLong's variance is not defined: one patient alone has no spread."""
    parts = next(iter(ground.answers.values()))
    for fold, part in zip(ground.folds, parts, strict=True):
        owned = np.unique(np.stack([part.labels, part.owners]), axis=1)[0]
        patients = np.bincount(owned, minlength=len(ground.classes))
        for code in np.flatnonzero(patients == 1).tolist():
            yield (
                f"{fold} has one patient with {ground.classes[code]}: how far the AUC varies is "
                "not known there, and so no p of it."
            )
