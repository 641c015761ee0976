"""Reading of tables: text as in the file, from any program, with errors that name the line."""

from pathlib import Path

import pandas as pd
import pytest

from caprmil.errors import CohortError
from caprmil.io import tables
from caprmil.io.tables import COLUMNS, matching_columns


def read(folder: Path, content: str | bytes, **options: bool) -> pd.DataFrame:
    path = folder / "table.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return tables.read_table(path, **options)


def cells(table: pd.DataFrame) -> dict[str, list[str]]:
    return {str(name): column.tolist() for name, column in table.items()}


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_separators_line_ends_and_bom_make_no_difference(
    tmp_path: Path, mark: str, start: str, end: str
) -> None:
    lines = ["slide{0} age", "007{0}050", "{0}", "", '"a{0}b"{0}']
    table = read(tmp_path, start + end.join(lines).format(mark) + end)
    assert cells(table) == {"slide": ["007", f"a{mark}b"], "age": ["050", ""]}


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("slide;age, in years, rounded, or not;label", 3),
        ("slide,label,prob_;;;;;;;;", 3),
        ("who;what;why", 3),
        ('"age; in years, rounded";slide', 2),
        ("slide", 1),
    ],
)
def test_the_separator_is_the_one_that_gives_known_columns(
    tmp_path: Path, header: str, names: int
) -> None:
    assert len(read(tmp_path, f"{header}\nx\n", pad=True).columns) == names


def test_rows_have_their_columns_and_their_line(tmp_path: Path) -> None:
    table = read(tmp_path, 'slide,note\n\n\na,"two\nlines"\nb,\n')
    assert table.to_dict("records") == [
        {"slide": "a", "note": "two\nlines"},
        {"slide": "b", "note": ""},
    ]
    assert [position.rpartition("/")[2] for position in table.index] == [
        "table.csv, line 5",  # where the row ends
        "table.csv, line 6",
    ]


def test_columns_without_a_name_are_left_out(tmp_path: Path) -> None:
    table = read(tmp_path, ",slide,,Unnamed: 3\n0,a,x,y\n")
    assert cells(table) == {"slide": ["a"]}


def test_missing_cells_at_the_end_are_empty_only_with_pad(tmp_path: Path) -> None:
    assert cells(read(tmp_path, "slide,site\na\n", pad=True)) == {"slide": ["a"], "site": [""]}
    with pytest.raises(CohortError, match="line 2: 1 cells, but 2 columns"):
        read(tmp_path, "slide,site\na\n")


def test_additional_empty_cells_are_ignored(tmp_path: Path) -> None:
    assert cells(read(tmp_path, "slide,site\na,x,,\n")) == {"slide": ["a"], "site": ["x"]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "no rows"),
        (b"slide,label\n,\n", "no rows"),
        (b"slide,label\na,x,y\n", "line 2: 3 cells, but 2 columns"),
        (b"slide,slide\na,b\n", "2 columns called 'slide'"),
        (b"slide\n\xe9\n", "not a table in UTF-8"),
        ("slide\na\n".encode("utf-16"), "not a table in UTF-8"),
    ],
)
def test_a_file_that_is_not_a_table_is_refused(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    with pytest.raises(CohortError, match=rf"table\.csv.*{expected}"):
        read(tmp_path, content)


def test_the_error_of_a_cell_names_its_line(tmp_path: Path) -> None:
    table = read(tmp_path, "slide,age\na,1e3\n,old\n")
    with pytest.raises(CohortError, match="line 3: the slide is missing"):
        tables.names(table, "slide")
    with pytest.raises(CohortError, match="line 3: age is 'old', not a number"):
        tables.numbers(table, "age")
    assert tables.numbers(read(tmp_path, "slide,age\na,1e3\n"), "age") == [1000.0]


def test_columns_are_recognised_in_any_case_and_the_first_name_is_used() -> None:
    assert matching_columns(["WSI", "Slide ID", "age"], COLUMNS["slide"]) == ["Slide ID", "WSI"]
    assert matching_columns(["Slide", "slide"], COLUMNS["slide"]) == ["Slide", "slide"]


def test_no_name_belongs_to_two_roles() -> None:
    words = [word for role in COLUMNS.values() for word in role]
    assert len(set(words)) == len(words)


def test_a_markdown_table_has_a_rule_and_notes_below() -> None:
    text = tables.markdown_table(["a", "b"], [["1", "2"]], ["so it is"])
    assert text == "| a | b |\n| --- | --- |\n| 1 | 2 |\n\n- so it is\n"


def test_a_dataframe_a_workbook_and_parquet_are_the_same_table(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"slide": ["a", "b"], "label": [1.0, None], "age": [61, 58], "x": [0.5, 1]}
    )
    frame.to_excel(tmp_path / "t.xlsx", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    expected = {"slide": ["a", "b"], "label": ["1", ""], "age": ["61", "58"], "x": ["0.5", "1"]}
    for source in (frame, tmp_path / "t.xlsx", tmp_path / "t.parquet"):
        assert cells(tables.read_table(source)) == expected
    assert cells(tables.read_table(tmp_path / "t.csv"))["label"] == ["1.0", ""]


def test_a_damaged_workbook_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"PK no workbook")
    with pytest.raises(CohortError, match=r"t\.xlsx cannot be read"):
        tables.read_table(tmp_path / "t.xlsx")


def test_a_parquet_file_whose_text_is_damaged_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"slide": ["abcdefgh", "b"], "label": ["x", "y"]}).to_parquet(
        path, compression=None, use_dictionary=False
    )
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abc\xff\xfe\xfdgh"))
    with pytest.raises(CohortError, match=r"t.parquet cannot be read .* Save it as .csv"):
        tables.read_table(path)
