"""Vectors of slides: from a table with a row per slide or patient, or a folder of files.

A table holds, for example, gene expression; a folder the output of a slide encoder such as TITAN or
PRISM.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.cohort.covariates import Numbers
from caprmil.errors import BagError, CohortError, count, shorten
from caprmil.features import bags, formats
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.paths import as_path, join_path
from caprmil.io.tables import TableLike
from caprmil.slides.names import slide_name


def read_vectors(
    source: TableLike,
    patients: Mapping[str, str] | None,
    *,
    folder: Path | None = None,
    unit: str = "slide",
) -> dict[str, Numbers]:
    """Return the vectors of slides, as far as they are known. All have the same length.

    `patients` has the slides that are looked for, with their patients: a table may have a row per
    patient. Without it, all slides are read; or with `unit` all patients, from a row or file of
    each. A path that does not exist is looked for in `folder` too.
    """
    if isinstance(source, str | Path):
        path = as_path(source)
        if not path.exists() and folder is not None:
            path = join_path(folder, str(source))
        if path.is_dir():
            return _same_length(_from_folder(path, patients), str(path))
        source = str(path)
    return _same_length(_from_table(source, patients, unit), tables.table_name(source))


def check_vectors(
    vectors: Mapping[str, Numbers], patients: Mapping[str, str], source: str, found: Findings
) -> None:
    """Add what is wrong with the vectors of a cohort."""
    missing = [slide for slide in patients if slide not in vectors]
    if not vectors:
        found.problems.append(f"[data] vectors: {source} has no vector of any of these slides.")
        return
    advice = "They are read as missing."
    found.note(f"Slides without a vector in {source}", missing, advice)
    if not np.ptp(np.stack(list(vectors.values())), axis=0).any():
        found.problems.append(f"[data] vectors: all vectors in {source} are equal.")


def _from_folder(folder: Path, patients: Mapping[str, str] | None) -> dict[str, Numbers]:
    """Return the vector in the file of each slide: (D,) or (1, D), in any format of bags."""
    found = {}
    for name, (path, *others) in bags.group_by_slide(folder.rglob("*")).items():
        if patients is not None and name not in patients:
            continue
        if others:
            raise CohortError(f"{folder} has several vectors of {name}. Leave one of each slide.")
        with formats.open_file(path) as content:
            values = formats.to_array(content.features[()])
        found[name] = _one_row(path, values)
    return found


def _one_row(path: Path, values: NDArray[Any]) -> Numbers:
    """Return the vector in an array of a file: (D,) or (1, D)."""
    if values.dtype.kind not in "fiub":
        raise BagError(
            f"{path} has no vector of a slide, but values of the type {values.dtype}. A vector is "
            "one row of finite numbers."
        )
    with np.errstate(over="ignore"):
        row: Numbers = values.reshape(-1).astype(np.float32)
    if not values.shape or values.size != values.shape[-1] or not np.isfinite(row).all():
        raise BagError(
            f"{path} has no vector of a slide, but numbers of shape {values.shape}, or numbers "
            "that are not finite. A vector is one row of finite numbers."
        )
    return row


def _from_table(
    source: TableLike, patients: Mapping[str, str] | None, unit: str
) -> dict[str, Numbers]:
    """Return the vector in the row of each slide, or of its patient."""
    frame, title = tables.read_table(source), tables.table_name(source)
    slide, patient = (
        tables.find_column(frame, tables.COLUMNS[role]) for role in ("slide", "patient")
    )
    key = slide or (patient if patients is not None else None)
    of_slides = unit == "slide" and slide is not None
    key = patient if unit == "patient" else key
    if key is None:
        raise CohortError(
            f"{title} has no column for the slide or the patient. Columns: "
            f"{shorten(map(str, frame.columns))}."
        )
    columns = [name for name in frame.columns if name not in (slide, patient)]
    names = [slide_name(cell) if of_slides else cell for cell in frame[key]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CohortError(f"{title} has several rows of {shorten(twice)}. Leave one of each.")
    if not columns:
        raise CohortError(f"{title} has no numbers beside {key}.")
    with np.errstate(over="ignore"):
        values = np.array([tables.numbers(frame, name) for name in columns], dtype=np.float32).T
    if not np.isfinite(values).all():
        raise CohortError(f"{title} has numbers that are not finite. Fill or remove them.")
    rows = dict(zip(names, values, strict=True))
    if patients is None:
        return rows
    keys = {name: name if of_slides else own for name, own in patients.items()}
    return {name: rows[own] for name, own in keys.items() if own in rows}


def _same_length(vectors: dict[str, Numbers], source: str) -> dict[str, Numbers]:
    lengths = {len(vector): slide for slide, vector in vectors.items()}
    if len(lengths) > 1:
        each = [f"{count(n, 'number')} ({slide})" for n, slide in lengths.items()]
        raise CohortError(f"The vectors in {source} differ in length: {shorten(each)}.")
    return vectors
