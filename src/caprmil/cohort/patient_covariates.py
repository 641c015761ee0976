"""Covariates of patients: the cells that all slides of a patient agree on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from caprmil.cohort.covariates import Covariates, Numbers, category_of
from caprmil.io.findings import Findings
from caprmil.io.tables import Row, is_known

ADVICE = "A patient has one value. Correct the cells, or leave the column out of [data] covariates."


def join_cells(
    rows: Mapping[str, Row],
    slides: Mapping[str, Sequence[str]],
    names: Sequence[str],
    found: Findings,
) -> dict[str, Row]:
    """Return a row for each patient, from the rows of the slides of each.

    A cell that is empty for some slides is that of the others. Cells that differ are a problem.
    """
    joined, differing = {}, list[str]()
    for patient, own in slides.items():
        joined[patient] = dict(rows[own[0]])
        for name in (name for name in names if name in joined[patient]):
            cells = {category_of(cell): cell for s in own if is_known(cell := rows[s][name])}
            joined[patient][name] = next(iter(cells.values()), "")
            if len(cells) > 1:
                differing.append(f"{patient} ({name}: {' and '.join(cells.values())})")
    found.problem("Patients whose slides have different covariates", differing, ADVICE)
    return joined


def join_vectors(
    vectors: Mapping[str, Numbers], slides: Mapping[str, Sequence[str]], found: Findings
) -> dict[str, Numbers]:
    """Return the vector of each patient that has one. Slides with different ones are a problem."""
    joined, differing = {}, list[str]()
    for patient, own in slides.items():
        known = [vectors[slide] for slide in own if slide in vectors]
        if known:
            joined[patient] = known[0]
        if any(not np.array_equal(known[0], other) for other in known):
            differing.append(patient)
    found.problem(
        "Patients whose slides have different vectors",
        differing,
        "A bag of all slides has one vector: pass a table with a row for each patient, or set "
        '[data] combine = "mean".',
    )
    return joined


def of_slides(covariates: Covariates, slides: Mapping[str, Sequence[str]]) -> Covariates:
    """Return the covariates of patients by slide."""
    cells = {slide: covariates.cells[patient] for patient, own in slides.items() for slide in own}
    return replace(covariates, cells=cells)
