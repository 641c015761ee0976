"""Tables of other tools: STAMP's two of patients and slides, and task folders of Patho-Bench.

Both become one table of slides, as if a user had joined it.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from caprmil.errors import CohortError, shorten, suggest
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.paths import as_path, is_remote, join_path
from caprmil.io.tables import COLUMNS, TableLike, find_column, is_known

if TYPE_CHECKING:
    import pandas as pd

PATHO_BENCH, CONFIG = "k=all.tsv", "config.yaml"
SUFFIXES = (".csv", ".tsv", *tables.EXCEL)


def read_cohort_table(
    source: TableLike,
    found: Findings,
    *,
    slide_table: str | None = None,
    slide: str | None = None,
    patient: str | None = None,
) -> "pd.DataFrame":
    """Return a table of slides: one file, two that are joined by patient, or those of a folder.

    A folder is a task of Patho-Bench, or has STAMP's clini table and slide table. `slide` and
    `patient` are columns whose names are not recognised.
    """
    if not isinstance(source, str | Path):
        return tables.read_table(source, pad=True)
    path = as_path(source)
    if is_cohort_folder(path):
        if (path / PATHO_BENCH).is_file():
            return _patho_bench(path, found)
        return _join(*_clini_and_slides(path), found, slide=slide, patient=patient)
    if slide_table is None:
        return tables.read_table(path, pad=True)
    other = as_path(slide_table)
    other = other if other.is_file() else join_path(path.parent, slide_table)
    return _join(path, other, found, slide=slide, patient=patient)


def is_cohort_folder(path: Path) -> bool:
    """Return whether a local folder has tables that are read as one cohort."""
    if is_remote(path) or not path.is_dir():
        return False
    return (path / PATHO_BENCH).is_file() or len(_with_patients(path)) > 1


def folder_of(path: Path) -> Path:
    """Return the folder that paths in a table are relative to."""
    return path if is_cohort_folder(path) else path.parent


def _with_patients(folder: Path) -> dict[Path, str | None]:
    """Return the tables in a folder that name patients, each with its column of the slide."""
    found = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in SUFFIXES and file.is_file() and not file.name.startswith("."):
            try:
                frame = tables.read_table(file, pad=True)
            except CohortError:
                continue
            if find_column(frame, COLUMNS["patient"]) is not None:
                found[file] = find_column(frame, COLUMNS["slide"])
    return found


def _clini_and_slides(folder: Path) -> tuple[Path, Path]:
    """Return the table of patients and that of their slides."""
    known = _with_patients(folder)
    clini = [file for file, slide in known.items() if slide is None]
    slides = [file for file, slide in known.items() if slide is not None]
    if len(clini) == len(slides) == 1:
        return clini[0], slides[0]
    raise CohortError(
        f"{folder} has {len(clini)} tables of patients and {len(slides)} of their slides: "
        f"{shorten(file.name for file in known)}. Pass one table of patients, and name that of the "
        "slides: --set data.slide_table=FILE"
    )


def _join(
    clini: Path, slides: Path, found: Findings, *, slide: str | None, patient: str | None
) -> "pd.DataFrame":
    """Return a row for each slide, with the cells of its patient."""
    one, other = (tables.read_table(path, pad=True) for path in (clini, slides))
    owner, key = (_column(f, p, "patient", patient) for f, p in ((one, clini), (other, slides)))
    _column(other, slides, "slide", slide)
    twice = one[owner][one[owner].duplicated() & one[owner].map(is_known)]
    found.problem(
        f"Patients with more than one row in {clini.name}", dict.fromkeys(twice), "Leave one."
    )
    named = other[other[key].isin(one[owner])]
    found.note(
        f"Patients of {slides.name} that are not in {clini.name}",
        dict.fromkeys(other[key][~other.index.isin(named.index)]),
        "Their slides were left out.",
    )
    alone = one[owner][~one[owner].isin(other[key])]
    found.note(f"Patients of {clini.name} without a slide", alone, "They were left out.")
    if not len(named):
        raise CohortError(
            f"No patient of {slides} is in {clini}: {shorten(dict.fromkeys(other[key]))}, and "
            f"{shorten(one[owner])}. Correct the names."
        )
    cells = one.drop_duplicates(owner).set_index(owner)
    own = named.drop(columns=[name for name in other if name != key and name in cells])
    joined = own.join(cells, on=key)
    return joined.rename(columns={key: patient or owner})


def _column(frame: "pd.DataFrame", path: Path, role: str, named: str | None) -> str:
    """Return the column of a role: the named one, or one with a known name."""
    column = named if named in frame.columns else find_column(frame, COLUMNS[role])
    if column is None:
        hint = suggest(named, list(frame.columns)) if named else ""
        raise CohortError(
            f"{path} has no column for the {role}. Its columns are {', '.join(frame.columns)}. "
            f"Name it with --set data.{role}=COLUMN.{hint}"
        )
    return column


def _patho_bench(folder: Path, found: Findings) -> "pd.DataFrame":
    """Return the slides of a task, with its label and folds; other labels are left out."""
    frame = tables.read_table(folder / PATHO_BENCH, pad=True)
    config = folder / CONFIG
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    task, sample = (_value(text, key) for key in ("task_col", "sample_col"))
    if task is None:
        return frame
    if sample == "case_id":
        advice = "Set [data] unit = 'patient' (--set data.unit=patient), as Patho-Bench does."
        found.notes.append(f"The label {task} is of patients. {advice}")
    extra = _values(text, "extra_cols")  # time and event of a survival task, beside its label
    kept = {"case_id", "slide_id", *(extra or [task])}
    return frame[[c for c in frame if c in kept or re.fullmatch(r"fold_\d+", str(c))]]


def _value(text: str, key: str) -> str | None:
    """Return a value of one line of YAML."""
    found = re.search(rf"^{key}:[ \t]*['\"]?([^'\"#\n]*?)['\"]?[ \t]*(?:#.*)?$", text, re.MULTILINE)
    return found[1] or None if found else None


def _values(text: str, key: str) -> list[str]:
    """Return a list of YAML, in one line or with an item in each."""
    found = re.search(rf"^{key}:[ \t]*(\[[^\]]*\]|(?:\n[ \t]*-[^\n]*)+)", text, re.MULTILINE)
    return re.findall(r"[^\s,'\"\[\]-][^,'\"\[\]\n]*", found[1]) if found else []
