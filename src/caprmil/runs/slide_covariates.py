"""The covariates of the slides of a run, and models with the covariates of one slide."""

import csv
from collections.abc import Mapping, Sequence
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import torch

from caprmil.cohort.covariates import (
    VECTOR,
    Column,
    Covariates,
    Numbers,
    SlideCovariates,
    encode,
    parse_columns,
)
from caprmil.cohort.patient_covariates import join_cells
from caprmil.cohort.patient_units import slides_of_patients
from caprmil.errors import (
    BagError,
    CaprmilError,
    CohortError,
    RunError,
    one_line,
    shorten,
    suggest,
)
from caprmil.features.formats import read_npz
from caprmil.io.atomic import atomic_write
from caprmil.io.findings import Findings
from caprmil.io.tables import COLUMNS, TableLike, find_column, read_table, rows, table_name
from caprmil.models import FusedModel, MILModel
from caprmil.runs.facts import ADVICE
from caprmil.slides.names import slide_name

COVARIATES, VECTORS = "covariates.csv", "vectors.npz"


def covariates_text(covariates: Covariates, unit: str) -> str:
    """Return the cells of slides or patients as the file of a run."""
    out = StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow([unit, *covariates.names])
    table.writerows(
        [key, *(row[name] for name in covariates.names)] for key, row in covariates.cells.items()
    )
    return out.getvalue()


def write_vectors(folder: Path, covariates: Covariates) -> None:
    """Write the vectors of the slides of a run, if there are any. A run to resume has the same."""
    path = folder / VECTORS
    if covariates.vectors is None:
        return
    names = sorted(covariates.vectors)
    if path.exists():
        before = _read_vectors(folder)
        if names != sorted(before) or any(
            not np.array_equal(before[name], covariates.vectors[name]) for name in names
        ):
            raise RunError(
                f"{path} has other vectors than this recipe gives now: they have changed since the "
                "run started. Start a new run in another folder."
            )
        return
    content = BytesIO()
    values = np.stack([covariates.vectors[name] for name in names])
    np.savez(content, slides=np.array(names), vectors=values)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content.getvalue())


def _read_vectors(folder: Path) -> dict[str, Numbers]:
    path = folder / VECTORS
    if not path.is_file():
        return {}
    try:
        found = read_npz(path, ("slides", "vectors"))
        names, values = found["slides"], found["vectors"]
        if names.ndim != 1 or names.dtype.kind != "U" or len(set(names.tolist())) < len(names):
            raise ValueError("its slides are not names")
        if values.ndim != 2 or values.dtype.kind != "f" or len(values) != len(names):
            raise ValueError("it has no row of numbers for each slide")
        with np.errstate(over="ignore"):
            rows = values.astype(np.float32)
        if not np.isfinite(rows).all():
            raise ValueError("it has numbers that are not finite")
    except (BagError, ValueError) as problem:
        raise RunError(f"{path} is damaged ({one_line(problem, 200)}). {ADVICE}") from None
    return dict(zip(names.tolist(), rows, strict=True))


def read_slide_covariates(
    folder: Path, unit: str, names: Sequence[str]
) -> dict[str, SlideCovariates]:
    """Return the covariates in the folder of a run, by slide or by patient; none without them."""
    path = folder / COVARIATES
    if not path.is_file():
        return {}
    vectors = _read_vectors(folder)
    try:
        frame = read_table(path)
        if missing := [name for name in (unit, *names) if name not in frame.columns]:
            raise CohortError(f"it has no column {missing[0]}")
        if frame[unit].duplicated().any():
            raise CohortError(f"it has two rows of one {unit}")
        return {
            row[unit]: SlideCovariates(row[unit], row, vectors.get(row[unit]))
            for row in rows(frame)
        }
    except (CaprmilError, KeyError) as problem:
        raise RunError(f"{path} is damaged ({str(problem).rstrip('.')}). {ADVICE}") from None


def covariates_of_table(
    table: TableLike, names: Sequence[str], columns: Mapping[str, str], *, unit: str, predicts: str
) -> dict[str, SlideCovariates]:
    """Return the covariates in a table, by slide or by patient: the unit of a bag.

    `columns` are those of slide and patient, as far as they are known. Where patients are
    predicted, the rows of each must agree.
    """
    frame, title = read_table(table, pad=True), table_name(table)
    keys = {}
    for role in ("slide", "patient"):
        named = columns.get(role)
        keys[role] = named if named in frame.columns else find_column(frame, COLUMNS[role])
    if keys[unit] is None:
        raise CohortError(
            f"{title} has no column for the {unit}. Columns: {', '.join(frame.columns)}."
        )
    for name in names:
        if name not in frame.columns:
            near = suggest(name, frame.columns)
            raise CohortError(f"{title} has no column '{name}', which the models read.{near}")
    cells, found = {str(number): row for number, row in enumerate(rows(frame))}, Findings()
    if predicts == "patient" and keys["patient"] is not None:
        groups = slides_of_patients({at: row[keys["patient"]] for at, row in cells.items()})
        patients = join_cells(cells, groups, names, found)
        if found.problems:
            raise CohortError(f"{title} cannot be used. {found.problems[0]}")
        cells = {
            at: {**cells[at], **{name: patients[p][name] for name in names}}
            for p, own in groups.items()
            for at in own
        }
    key = str(keys[unit])
    read: dict[str, SlideCovariates] = {}
    for row in cells.values():
        own = slide_name(row[key]) if unit == "slide" else row[key]
        values = {name: row[name] for name in names}
        if own in read and read[own].cells != values:
            raise CohortError(
                f"{title} has rows of {own} with different covariates. Leave one row of each "
                f"{unit}."
            )
        read[own] = SlideCovariates(own, values)
    return read


def columns_of(model: MILModel) -> tuple[Column, ...]:
    """Return the covariates that a model reads, with the statistics of its training slides."""
    if not isinstance(model, FusedModel):
        return ()
    try:
        return parse_columns(model.settings["columns"])
    except CaprmilError as problem:
        raise RunError(f"The covariates of a model are damaged ({problem}). {ADVICE}") from None


def encoded(model: MILModel, known: SlideCovariates | None) -> Numbers | None:
    """Return the covariates of a slide as the numbers that a model reads, if it reads any."""
    columns = columns_of(model)
    return encode(columns, known) if columns and known is not None else None


def model_of_slide(
    model: MILModel, slide: str, known: Mapping[str, SlideCovariates], unit: str
) -> MILModel:
    """Return a model that reads the patches of one slide, with the covariates of that slide.

    `unit` is what a bag is of: for patients, `slide` is one. A model without covariates is returned
    as it is.
    """
    if not isinstance(model, FusedModel):
        return model
    check_known(model.names, [slide], known, unit)
    columns, own = columns_of(model), known[slide]
    numbers: Numbers = encode(columns, own)
    return model.of_slide(
        torch.from_numpy(np.asarray(numbers)), [column.show(own) for column in columns]
    )


def check_known(
    names: list[str], slides: list[str], known: Mapping[str, SlideCovariates], unit: str
) -> None:
    """Raise if the covariates of a slide or patient are not known."""
    missing = [slide for slide in slides if slide not in known]
    if missing:
        columns = ", ".join((unit, *names))
        raise RunError(
            f"The models read covariates ({shorten(names)}), and these {unit}s have none: "
            f"{shorten(missing)}. Pass a table with the columns {columns}: --table "
            f"TABLE{' (the vector: --vectors TABLE_OR_FOLDER)' if VECTOR in names else ''}."
        )
