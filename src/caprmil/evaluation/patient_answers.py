"""Answers of patients, from answers of their slides."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from caprmil.evaluation.learned_combination import LearnedCombination
from caprmil.evaluation.predictions import Predictions
from caprmil.targets.target import Answers, Target

How: TypeAlias = Literal["mean", "max", "learned"]


def combine_slides(
    table: Predictions,
    how: How | None,
    patients: Mapping[str, str] | None = None,
    *,
    learned: Mapping[str, LearnedCombination] | None = None,
) -> Predictions:
    """Return a table with one answer per patient and fold; the same table if `how` is None.

    The answer is the mean of the slides' answers, the highest of them, or by the `learned`
    combination of the fold. `patients` are those of slides, if the table does not have them.
    """
    if how is None:
        return table
    of = table.patients or tuple((patients or {})[slide] for slide in table.slides)
    folds = table.folds or ("",) * len(table)
    rows: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(zip(folds, of, strict=True)):
        rows.setdefault(key, []).append(row)
    names = tuple(patient for _, patient in rows)
    labels = None
    if table.labels is not None:
        known = table.target.known(table.labels)
        first = [next((row for row in own if known[row]), own[0]) for own in rows.values()]
        labels = table.labels[first]
    answers: list[Answers]
    if how == "learned":
        answers = [(learned or {})[f].combine(table.answers[own]) for (f, _), own in rows.items()]
    else:
        answers = [table.target.combine(table.answers[own], how) for own in rows.values()]
    return Predictions(
        slides=names,
        target=table.target,
        answers=np.stack(answers),
        labels=labels,
        patients=names,
        folds=None if table.folds is None else tuple(fold for fold, _ in rows),
        unit="patient",
    )


def combine_folds(
    by_fold: Mapping[str, Mapping[str, Answers]],
    patients: Mapping[str, str],
    target: Target,
    how: How,
    learned: Mapping[str, LearnedCombination],
) -> dict[str, dict[str, Answers]]:
    """Return the answer of each fold for each patient, from those for each slide by fold.

    A patient is answered by the folds that answered all of its slides; without one, by every fold
    that answered some of them.
    """
    of_patients: dict[str, list[set[str]]] = {}
    for slide, own in by_fold.items():
        of_patients.setdefault(patients[slide], []).append({*own})
    folds = {
        name: set.intersection(*each) or set.union(*each) for name, each in of_patients.items()
    }
    rows = [
        (slide, fold, answer)
        for slide, own in by_fold.items()
        for fold, answer in own.items()
        if fold in folds[patients[slide]]
    ]
    slides = Predictions(
        slides=tuple(slide for slide, _, _ in rows),
        target=target,
        answers=np.stack([answer for _, _, answer in rows]),
        patients=tuple(patients[slide] for slide, _, _ in rows),
        folds=tuple(fold for _, fold, _ in rows),
    )
    each = combine_slides(slides, how, learned=learned)
    found: dict[str, dict[str, Answers]] = {name: {} for name in of_patients}
    for name, fold, answer in zip(each.slides, each.folds or (), each.answers, strict=True):
        found[name][fold] = answer
    return found


def mean_of_folds(by_fold: Mapping[str, Mapping[str, Answers]], target: Target) -> Predictions:
    """Return the mean over folds of their answers for patients."""
    return Predictions(
        slides=tuple(by_fold),
        target=target,
        answers=np.stack([np.mean([*own.values()], axis=0) for own in by_fold.values()]),
        unit="patient",
    )
