"""Atomic writes: a file is complete or absent, and an existing one is not overwritten."""

from collections.abc import Callable
from pathlib import Path

import pytest

from caprmil.errors import CaprmilError
from caprmil.io.atomic import atomic_write, remove_leftovers, write_text
from caprmil.io.leftovers import temporary_name


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "note.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
    assert (path.read_text(), names(path.parent)) == ("half", ["note.txt"])


def test_the_temporary_file_is_hidden_in_the_same_folder_with_the_same_suffix(
    tmp_path: Path,
) -> None:
    with atomic_write(tmp_path / "figure.png") as temporary:
        assert (temporary.parent, temporary.name[0], temporary.suffix) == (tmp_path, ".", ".png")
        temporary.touch()


@pytest.mark.parametrize("replace", [False, True])
def test_an_existing_file_is_replaced_only_with_replace(tmp_path: Path, replace: bool) -> None:
    path = write_text(tmp_path / "note.txt", "mine")
    if replace:
        write_text(path, "ours", replace=True)
    else:
        with pytest.raises(CaprmilError, match=r"note\.txt already exists"):
            write_text(path, "ours")
    assert (path.read_text(), names(tmp_path)) == ("ours" if replace else "mine", ["note.txt"])


def interrupt(path: Path, between: Callable[[], object], **options: bool) -> None:
    """Call `between` in the middle of a write."""
    with atomic_write(path, **options) as temporary:
        temporary.write_text("ours")
        between()


def test_a_file_written_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    with pytest.raises(CaprmilError, match="already exists"):
        interrupt(path, lambda: path.write_text("theirs"))
    assert (path.read_text(), names(tmp_path)) == ("theirs", ["note.txt"])


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_text(tmp_path / "note.txt", "mine")
    with pytest.raises(ZeroDivisionError):
        interrupt(path, lambda: 1 / 0, replace=True)
    assert (path.read_text(), names(tmp_path)) == ("mine", ["note.txt"])


def test_only_temporary_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: 999_999_999)  # no process has this id
        files = [temporary_name("a.h5"), temporary_name("b.h5"), ".mine.a.h5", "a.h5"]
    files.append(temporary_name("a.h5"))  # of this process, which is running
    for name in files:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "a.h5")
    assert sorted(names(tmp_path)) == sorted(files[1:])
