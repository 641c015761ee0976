"""Tables of text: a pandas DataFrame whose columns are recognised by many names.

A table comes from CSV, TSV, XLSX or Parquet, or is a DataFrame. Cells are text as in the file, ""
where nothing is known. The index says where a row is, for errors: file and line.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO, StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union
from zipfile import ZipFile

from caprmil.errors import CohortError, one_line
from caprmil.io.paths import as_path

if TYPE_CHECKING:
    import pandas as pd

TableLike: TypeAlias = Union[str, PathLike[str], "pd.DataFrame"]

# What a column may be called, in any case, with spaces or underscores; the first is taken.
COLUMNS = {
    "slide": ("slide", "slide_id", "slide_name", "image_id", "image", "filename", "file", "wsi"),
    "patient": ("patient", "patient_id", "case_id", "case"),
    "label": ("label", "target", "class", "y", "y_true", "truth", "true_label"),
    "path": ("path", "bag", "features", "feature_path"),
    "fold": ("fold",),
    "mpp": ("mpp", "um_px", "um/px", "mpp_x", "slide_mpp", "microns_per_pixel"),
}
UNKNOWN = (
    *("", "na", "nan", "n/a", "#n/a", "<na>", "nat", "none", "null"),
    *("inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"),
)
"""Cells without a value, in lower case, as pandas, R, Excel and databases write them."""
EXCEL, PARQUET = (".xlsx", ".xlsm"), (".parquet", ".pq")
CELLS = 20_000_000  # more than any table of slides has: a small file can declare billions
XML = 2**24, 100  # bytes of a sheet that are read in any case, and how many times those of its file

Row = dict[str, str]


def read_table(source: TableLike, *, pad: bool = False) -> "pd.DataFrame":
    """Read a table as text. The separator of a text file is found: comma, semicolon or tab.

    Blank lines are left out, and so are columns without a name, such as an index of pandas. With
    `pad`, cells that are missing at the end of a line are empty.
    """
    import pandas as pd  # here: a command that reads no table does not wait for it

    if isinstance(source, pd.DataFrame):
        return _as_text(source, "the table")
    path = as_path(source)
    if not path.is_file():
        raise CohortError(f"There is no file {path}.")
    suffix = path.suffix.lower()
    if suffix in (*EXCEL, *PARQUET):
        return _read_binary(path, suffix)
    return _read_text(path, pad=pad)


def table_name(source: TableLike) -> str:
    """Return what a table is called in errors."""
    import pandas as pd

    return "The table" if isinstance(source, pd.DataFrame) else str(as_path(source))


def _read_text(path: Path, *, pad: bool) -> "pd.DataFrame":
    """Read lines with the csv module, which knows the line of each row; pandas does not."""
    import pandas as pd

    try:
        text = path.read_bytes().decode("utf-8-sig")
        reader = csv.reader(StringIO(text, newline=""), delimiter=_separator(text))
        lines = [([cell.strip() for cell in line], reader.line_num) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise CohortError(
            f"{path} is not a table in UTF-8 ({problem}). Save it as .csv in UTF-8."
        ) from problem
    lines = [(cells, number) for cells, number in lines if any(cells)]
    if len(lines) < 2:
        raise _no_rows(str(path))
    header, rows = lines[0][0], [(cells, f"{path}, line {number}") for cells, number in lines[1:]]
    _check_cells(path, len(rows) * len(header))
    frame = pd.DataFrame(
        [_fit(cells, len(header), position, pad=pad) for cells, position in rows],
        index=[position for _, position in rows],
        dtype=object,
    )
    return _named(frame, header, str(path))


def _read_binary(path: Path, suffix: str) -> "pd.DataFrame":
    package = "openpyxl" if suffix in EXCEL else "pyarrow"
    content = BytesIO(path.read_bytes())
    try:
        frame = (_read_excel if suffix in EXCEL else _read_parquet)(path, content)
        return _as_text(frame, str(path))  # cells of a parquet file are decoded here
    except ImportError:
        raise CohortError(f"{path} needs a package: pip install {package}") from None
    except CohortError:
        raise
    except Exception as problem:  # each format raises errors of its own
        raise CohortError(f"{path} cannot be read ({problem}). Save it as .csv.") from problem


def _read_excel(path: Path, content: BytesIO) -> "pd.DataFrame":
    """Return the first sheet. A sheet with one cell in its last row and column is not filled up."""
    import pandas as pd
    from openpyxl import load_workbook  # type: ignore[import-untyped]

    with ZipFile(content) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > max(XML[0], XML[1] * len(content.getvalue())):
        raise CohortError(f"{path} has {size / 1e6:,.0f} MB of text. Save it as .csv.")
    sheet = load_workbook(content, read_only=True, data_only=True).worksheets[0]
    sheet.reset_dimensions()  # they may be wrong
    lines, width = [], 0
    for line in sheet.iter_rows(values_only=True):
        if any(cell is not None for cell in line):
            lines.append(line)
            width = max(width, len(line))
            _check_cells(path, len(lines) * width)
    if not lines:
        raise _no_rows(str(path))
    header, *rows = [line + (None,) * (width - len(line)) for line in lines]
    return pd.DataFrame(rows, columns=["" if cell is None else cell for cell in header])


def _read_parquet(path: Path, content: BytesIO) -> "pd.DataFrame":
    from pyarrow.parquet import ParquetFile, read_metadata  # type: ignore[import-untyped]

    found = read_metadata(content)
    columns = [found.schema.column(at) for at in range(found.num_columns)]
    if lists := [column.path for column in columns if column.max_repetition_level]:
        raise CohortError(f"{path} has lists in its cells ({lists[0]}). Write one value per cell.")
    # Not the values that each part of a column declares: damaged ones end the process there.
    rows = sum(found.row_group(number).num_rows for number in range(found.num_row_groups))
    _check_cells(path, max(found.num_rows, rows) * found.num_columns)
    # A text that is repeated is stored once, and so it is kept once: it may be long.
    texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    # Not pandas.read_parquet: an error in a thread of pyarrow ends the process.
    file = ParquetFile(content, read_dictionary=texts)
    return file.read(use_threads=False, use_pandas_metadata=True).to_pandas()


def _check_cells(path: Path, cells: int) -> None:
    if cells > CELLS:
        raise CohortError(
            f"{path} has {cells:,} cells, and a table of slides may have {CELLS:,}. Remove columns "
            "and rows that are not needed."
        )


def _as_text(frame: "pd.DataFrame", name: str) -> "pd.DataFrame":
    """Return a DataFrame of any types as text, with the number of each row in its index."""
    import pandas as pd

    if not len(frame):
        raise _no_rows(name)
    text = pd.DataFrame(
        {number: _cells(frame.iloc[:, number]) for number in range(frame.shape[1])},
        index=[f"{name}, row {number}" for number in range(1, len(frame) + 1)],
        dtype=object,
    )
    return _named(text, [str(column).strip() for column in frame.columns], name)


def _cells(column: "pd.Series[Any]") -> list[str]:
    """Return the cells of a column as text. A value of a categorical column is one object."""
    import pandas as pd

    if isinstance(column.dtype, pd.CategoricalDtype):
        values = [*map(_cell, column.cat.categories), ""]  # the last one, -1, is for gaps
        return [values[code] for code in column.cat.codes]
    return [_cell(value) for value in column]


def _cell(value: object) -> str:
    if value is None or value != value:  # also pandas' NaT
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # whole numbers in a column with gaps
    return str(value).strip()


def _named(frame: "pd.DataFrame", header: Sequence[str], name: str) -> "pd.DataFrame":
    """Return the columns that have a name, each name once."""
    import pandas as pd

    kept = [at for at, column in enumerate(header) if column and column[:8] != "Unnamed:"]
    for column, times in Counter(header[at] for at in kept).items():
        if times > 1:
            raise CohortError(
                f"{name} has {times} columns called '{column}'. Rename or remove one."
            )
    frame = frame.iloc[:, kept]
    frame.columns = pd.Index([header[at] for at in kept], dtype=object)
    return frame


def _no_rows(name: str) -> CohortError:
    return CohortError(
        f"{name} has no rows. It needs a line of column names, then a line for each slide."
    )


def _separator(text: str) -> str:
    """Return the separator that gives most known columns in the header, then most columns.

    Counting separators alone would be misled by names that hold them, such as `age; in years`.
    """
    header = next((line for line in StringIO(text, newline="") if line.strip(" \t\r\n,;")), "")
    known = [word for words in COLUMNS.values() for word in words]

    def columns(mark: str) -> tuple[int, int]:
        names = next(csv.reader([header], delimiter=mark), [])
        return len(matching_columns(names, known)), len(names)

    return max(",;\t", key=columns)


def _fit(cells: list[str], width: int, position: str, *, pad: bool) -> list[str]:
    """Return a line with one cell for each column."""
    if any(cells[width:]) or (len(cells) < width and not pad):
        raise CohortError(
            f"{position}: {len(cells)} cells, but {width} columns. Put quotes around a cell that "
            "holds the separator."
        )
    return (cells + [""] * width)[:width]


def matching_columns(header: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return the columns that are called one of these words, in the order of the words."""
    spelt = [(name.strip().lower().replace(" ", "_"), name) for name in header]
    return [name for word in words for spelling, name in spelt if spelling == word]


def rows(table: "pd.DataFrame") -> list[Row]:
    """Return the cells of each row by the names of their columns."""
    names = [str(name) for name in table.columns]
    return [dict(zip(names, cells, strict=True)) for cells in table.itertuples(index=False)]


def find_column(table: "pd.DataFrame", words: Iterable[str]) -> str | None:
    """Return the first column that is called one of these words."""
    return next(iter(matching_columns(table.columns, words)), None)


def names(table: "pd.DataFrame", column: str) -> tuple[str, ...]:
    """Return a column in which no cell may be empty."""
    for position, cell in table[column].items():
        if not cell:
            raise CohortError(f"{position}: the {column} is missing.")
    return tuple(table[column])


def numbers(table: "pd.DataFrame", column: str) -> list[float]:
    """Return a column in which every cell must be a number."""
    try:
        return [float(cell) for cell in table[column].tolist()]
    except ValueError:
        position, cell = next(item for item in table[column].items() if not is_number(item[1]))
        shown = one_line(cell)
        raise CohortError(f"{position}: {one_line(column)} is '{shown}', not a number.") from None


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str]
) -> str:
    """Return a table in Markdown, with notes below it."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def is_known(cell: str) -> bool:
    """Return whether a cell has a value."""
    return cell.lower() not in UNKNOWN


def with_cells(cells: Mapping[str, str]) -> list[str]:
    """Return the names of rows, each with its cell in brackets if that is not empty."""
    return [f"{name} ({cell})" if cell else name for name, cell in cells.items()]


def is_number(cell: str) -> bool:
    """Return whether a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
