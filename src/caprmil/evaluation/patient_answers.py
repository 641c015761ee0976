"""Answers of patients, from answers of their slides."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from caprmil.evaluation.predictions import Predictions


def combine_slides(
    table: Predictions,
    how: Literal["mean", "max"] | None,
    patients: Mapping[str, str] | None = None,
) -> Predictions:
    """Return a table with one answer per patient and fold; the same table if `how` is None.

    The answer is the mean of the slides' answers, or the highest of them. `patients` are those of
    slides, if the table does not have them.
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
    return Predictions(
        slides=names,
        target=table.target,
        answers=np.stack([table.target.combine(table.answers[own], how) for own in rows.values()]),
        labels=labels,
        patients=names,
        folds=None if table.folds is None else tuple(fold for fold, _ in rows),
        unit="patient",
    )
