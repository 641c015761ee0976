"""Tables: rows of text with a header, and columns recognised by many names."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from caprmil.errors import CohortError
from caprmil.io.paths import as_path

# What a column may be called, in any case, with spaces or underscores; the first is taken.
COLUMNS = {
    "slide": ("slide", "slide_id", "slide_name", "image_id", "image", "filename", "file", "wsi"),
    "patient": ("patient", "patient_id", "case_id", "case"),
    "label": ("label", "target", "class", "y", "y_true", "truth", "true_label"),
    "path": ("path", "bag", "features", "feature_path"),
    "fold": ("fold",),
    "mpp": ("mpp", "um_px", "um/px", "mpp_x", "slide_mpp", "microns_per_pixel"),
}
UNKNOWN = ("", "na", "nan", "n/a")  # cells that say nothing, as pandas and R write them

Row = dict[str, str]


@dataclass(frozen=True)
class Table:
    """A table as columns of text: cell n of each is in the same row."""

    path: Path
    columns: dict[str, tuple[str, ...]]
    places: tuple[str, ...]
    """Where each row stands, for errors: the file and the line."""

    def rows(self) -> list[Row]:
        """Return the cells of each row by the names of their columns."""
        cells = zip(*self.columns.values(), strict=True)
        return [dict(zip(self.columns, row, strict=True)) for row in cells]

    def placed(self, column: str) -> Iterator[tuple[str, str]]:
        """Return each cell of a column with its place."""
        return zip(self.columns[column], self.places, strict=True)

    def names(self, column: str) -> tuple[str, ...]:
        """Return a column in which no cell may be empty."""
        for cell, place in self.placed(column):
            if not cell:
                raise CohortError(f"{place}: the {column} is missing.")
        return self.columns[column]

    def numbers(self, column: str) -> list[float]:
        """Return a column in which every cell must be a number."""
        for cell, place in self.placed(column):
            if not is_number(cell):
                raise CohortError(f"{place}: {column} is '{cell}', not a number.")
        return [float(cell) for cell in self.columns[column]]


def read(path: str | Path, *, pad: bool = False) -> Table:
    """Read a table in UTF-8 with commas, semicolons or tabs, which its header says.

    Blank lines are left out, and so are columns without a name, such as an index of pandas. With
    `pad`, cells that are missing at the end of a line are empty.
    """
    path = as_path(path)
    if not path.is_file():
        raise CohortError(f"There is no file {path}.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        reader = csv.reader(StringIO(text, newline=""), delimiter=_separator(text))
        lines = [([cell.strip() for cell in line], reader.line_num) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise CohortError(
            f"{path} is no table in UTF-8 ({problem}). Save it as .csv in UTF-8."
        ) from problem
    lines = [(cells, number) for cells, number in lines if any(cells)]
    if len(lines) < 2:
        raise CohortError(
            f"{path} has no rows. It needs a line of column names, then a line for each slide."
        )
    header, places = lines[0][0], tuple(f"{path}, line {number}" for _, number in lines[1:])
    rows = [
        _fit(cells, len(header), place, pad=pad)
        for (cells, _), place in zip(lines[1:], places, strict=True)
    ]
    columns = list(zip(header, zip(*rows, strict=True), strict=True))
    named = [(name, cells) for name, cells in columns if name and name[:8] != "Unnamed:"]
    for name, times in Counter(name for name, _ in named).items():
        if times > 1:
            raise CohortError(f"{path} has {times} columns called '{name}'. Rename or remove one.")
    return Table(path, dict(named), places)


def _separator(text: str) -> str:
    """Return the mark that makes most sense of the header: most known columns, then most columns.

    Counting marks alone would be misled by names that hold them, such as `age; in years`.
    """
    header = next((line for line in StringIO(text, newline="") if line.strip(" \t\r\n,;")), "")
    known = [word for words in COLUMNS.values() for word in words]

    def sense(mark: str) -> tuple[int, int]:
        names = next(csv.reader([header], delimiter=mark), [])
        return len(called(names, known)), len(names)

    return max(",;\t", key=sense)


def _fit(cells: list[str], width: int, place: str, *, pad: bool) -> list[str]:
    """Return a line with one cell for each column."""
    if any(cells[width:]) or (len(cells) < width and not pad):
        raise CohortError(
            f"{place}: {len(cells)} cells, but {width} columns. Put quotes around a cell that "
            "holds the separator."
        )
    return (cells + [""] * width)[:width]


def called(header: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return the columns that are called one of these words, in the order of the words."""
    spelt = [(name.strip().lower().replace(" ", "_"), name) for name in header]
    return [name for word in words for spelling, name in spelt if spelling == word]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str]) -> str:
    """Return a table in Markdown, with remarks below it."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def is_known(cell: str) -> bool:
    """Tell whether a cell says anything."""
    return cell.lower() not in UNKNOWN


def is_number(cell: str) -> bool:
    """Tell whether a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
