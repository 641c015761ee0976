"""What writing a file promises: whole or not at all, and never over what somebody made."""

from collections.abc import Callable
from pathlib import Path

import pytest

from caprmil.errors import CaprmilError
from caprmil.io.atomic import atomic_write, remove_leftovers, write_text


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_appears_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "note.txt"
    with atomic_write(path) as passing:
        passing.write_text("half")
        assert not path.exists()
    assert (path.read_text(), names(path.parent)) == ("half", ["note.txt"])


def test_the_passing_name_is_hidden_and_keeps_folder_and_ending(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "figure.png") as passing:
        assert (passing.parent, passing.name[0], passing.suffix) == (tmp_path, ".", ".png")
        passing.touch()


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_is_replaced_only_when_told(tmp_path: Path, replace: bool) -> None:
    path = write_text(tmp_path / "note.txt", "mine")
    if replace:
        write_text(path, "ours", replace=True)
    else:
        with pytest.raises(CaprmilError, match=r"note\.txt already exists"):
            write_text(path, "ours")
    assert (path.read_text(), names(tmp_path)) == ("ours" if replace else "mine", ["note.txt"])


def interrupt(path: Path, between: Callable[[], object], **options: bool) -> None:
    """Write a file, and have something happen before it is done."""
    with atomic_write(path, **options) as passing:
        passing.write_text("ours")
        between()


def test_who_was_quicker_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    with pytest.raises(CaprmilError, match="already exists"):
        interrupt(path, lambda: path.write_text("theirs"))
    assert (path.read_text(), names(tmp_path)) == ("theirs", ["note.txt"])


def test_a_failure_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = write_text(tmp_path / "note.txt", "mine")
    with pytest.raises(ZeroDivisionError):
        interrupt(path, lambda: 1 / 0, replace=True)
    assert (path.read_text(), names(tmp_path)) == ("mine", ["note.txt"])


def test_sweeping_removes_what_a_killed_writer_left_and_nothing_else(tmp_path: Path) -> None:
    there = [".0123abcd.a.h5", ".0123abcd.b.h5", ".mine.a.h5", "a.h5"]
    for name in there:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "a.h5")
    assert sorted(names(tmp_path)) == sorted(there[1:])
