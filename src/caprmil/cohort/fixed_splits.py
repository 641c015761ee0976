"""Splits that are given, in columns of the table or in files."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from caprmil.cohort import folds
from caprmil.cohort.folds import Listing, Split, SplitConfig
from caprmil.cohort.patient_units import (
    join_listings,
)
from caprmil.errors import CohortError
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.paths import as_path, join_path
from caprmil.io.tables import Row
from caprmil.slides.names import slide_name


def read_fixed(
    listed: Mapping[str, Row],
    usable: Collection[str],
    patients: Mapping[str, str],
    folder: Path,
    config: SplitConfig,
    found: Findings,
) -> list[Split]:
    """Return the splits in `files` or the table, if kind is fixed.

    `patients` are those of slides that are split by patient.
    """
    listings = folds.from_columns(listed)
    if config.kind != "fixed":
        advice = 'Set [splits] kind = "fixed" to use them.'
        found.note("Columns with a split, not used", listings, advice)
        return []
    try:
        if config.files is not None:
            listings = _read_files(config.files, folder)
    except CohortError as problem:
        found.problems.append(str(problem))
        return []
    if not listings:
        found.problems.append(
            '[splits] kind is "fixed", but the table has no split. Add a column split (train, val, '
            "test) or columns fold_0, fold_1, ..., or set [splits] files."
        )
    if patients:
        listings = join_listings(listings, patients)
    return folds.read(listings, {*listed, *patients.values()}, usable, found)


def _read_files(files: str, folder: Path) -> dict[str, Listing]:
    """Return the slides in CLAM's split files, in order of their number."""
    path = as_path(files)
    path = path if path.exists() else join_path(folder, files)
    numbered = {
        int(match[1]): file
        for file in path.glob("*.csv")
        if (match := re.fullmatch(r"splits_(\d+)\.csv", file.name))
    }
    chosen = [path] if path.is_file() else [numbered[number] for number in sorted(numbered)]
    if not chosen:
        raise CohortError(f"[splits] files: there is no splits_0.csv, splits_1.csv, ... in {path}.")
    return {
        file.name: [
            (slide_name(cell), str(part))
            for part, cells in tables.read_table(file, pad=True).items()
            for cell in cells
            if cell
        ]
        for file in chosen
    }
