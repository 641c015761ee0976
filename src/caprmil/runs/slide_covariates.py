"""The covariates of the slides of a run, and models with the covariates of one slide."""

import csv
from collections.abc import Mapping, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from zipfile import BadZipFile

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
from caprmil.errors import CaprmilError, CohortError, RunError, one_line, shorten, suggest
from caprmil.io.atomic import atomic_write
from caprmil.io.tables import COLUMNS, TableLike, find_column, read_table, rows, table_name
from caprmil.models import FusedModel, MILModel
from caprmil.runs.facts import ADVICE
from caprmil.slides.names import slide_name

COVARIATES, VECTORS = "covariates.csv", "vectors.npz"


def covariates_text(covariates: Covariates) -> str:
    """Return the cells of the slides as the file of a run."""
    out = StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["slide", *covariates.names])
    table.writerows(
        [slide, *(row[name] for name in covariates.names)]
        for slide, row in covariates.cells.items()
    )
    return out.getvalue()


def write_vectors(folder: Path, covariates: Covariates) -> None:
    """Write the vectors of the slides of a run, if there are any; those of a run to resume stay."""
    path = folder / VECTORS
    if covariates.vectors is None or path.exists():
        return
    names = sorted(covariates.vectors)
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
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as found:
            names, values = found["slides"].tolist(), found["vectors"]
        if values.ndim != 2 or not np.isfinite(values).all():
            raise ValueError("no rows of finite numbers")
        return dict(zip(names, values.astype(np.float32), strict=True))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as problem:
        raise RunError(f"{path} is damaged ({one_line(problem)}). {ADVICE}") from None


def read_slide_covariates(folder: Path) -> dict[str, SlideCovariates]:
    """Return the covariates of the slides of the run in a folder; none if it has no such file."""
    path = folder / COVARIATES
    if not path.is_file():
        return {}
    vectors = _read_vectors(folder)
    try:
        return {
            row["slide"]: SlideCovariates(row["slide"], row, vectors.get(row["slide"]))
            for row in rows(read_table(path))
        }
    except (CaprmilError, KeyError) as problem:
        raise RunError(f"{path} is damaged ({str(problem).rstrip('.')}). {ADVICE}") from None


def covariates_of_table(
    table: TableLike, names: Sequence[str], slide: str | None
) -> dict[str, SlideCovariates]:
    """Return the covariates in a table by slide. `slide` is the column of the slide, if known."""
    frame, title = read_table(table, pad=True), table_name(table)
    column = slide if slide in frame.columns else find_column(frame, COLUMNS["slide"])
    if column is None:
        raise CohortError(
            f"{title} has no column for the slide. Columns: {', '.join(frame.columns)}."
        )
    for name in names:
        if name not in frame.columns:
            near = suggest(name, frame.columns)
            raise CohortError(f"{title} has no column '{name}', which the models read.{near}")
    return {
        slide_name(row[column]): SlideCovariates(
            slide_name(row[column]), {name: row[name] for name in names}
        )
        for row in rows(frame)
    }


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


def model_of_slide(model: MILModel, slide: str, known: Mapping[str, SlideCovariates]) -> MILModel:
    """Return a model that reads the patches of one slide, with the covariates of that slide.

    A model without covariates is returned as it is.
    """
    if not isinstance(model, FusedModel):
        return model
    check_known(model.names, [slide], known)
    columns, own = columns_of(model), known[slide]
    numbers: Numbers = encode(columns, own)
    return model.of_slide(
        torch.from_numpy(np.asarray(numbers)), [column.show(own) for column in columns]
    )


def check_known(names: list[str], slides: list[str], known: Mapping[str, SlideCovariates]) -> None:
    """Raise if the covariates of a slide are not known."""
    missing = [slide for slide in slides if slide not in known]
    if missing:
        raise RunError(
            f"The models read covariates ({shorten(names)}), and these slides have none: "
            f"{shorten(missing)}. Pass a table with the columns slide, {', '.join(names)}: --table "
            f"TABLE{' (the vector: --vectors TABLE_OR_FOLDER)' if VECTOR in names else ''}."
        )
