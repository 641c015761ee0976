"""Several new files that belong together: all of them appear, or none does.

They are written into a hidden folder and renamed at the end. A list of their digests, written
before the first rename, tells the next start what a process that was killed between two renames
has left. Only files with these very contents are removed then: files of a user stay.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from caprmil.errors import CaprmilError
from caprmil.io.atomic import CHECK_FOLDER, atomic_write, check_new, write_text
from caprmil.io.leftovers import clear, final_name, is_abandoned, temporary_folder, temporary_name
from caprmil.io.paths import RemotePath, as_path

DIGESTS = "digests.json"  # in the hidden folder, next to that of the files
FILES = "files"


def check_new_files(folder: str | os.PathLike[str], names: Iterable[str]) -> None:
    """Raise if one of the files exists or cannot be written. To be called before long work.

    What a killed writer of these files has left is removed.
    """
    folder, names = as_path(folder), list(names)
    if names:
        _remove_unfinished(folder, names)
    for name in names:
        check_new(folder / name)


@contextmanager
def new_files(folder: str | os.PathLike[str], names: Iterable[str]) -> Iterator[Path]:
    """Yield an empty folder; files that are written there appear in `folder` at the end, together.

    `names` are all that may be written, as relative paths. Nothing is overwritten. If anything
    fails, no file appears. In a remote `folder` the files appear one after the other.
    """
    folder, names = as_path(folder), list(names)
    check_new_files(folder, names)
    if isinstance(folder, RemotePath):
        with temporary_folder() as local:
            yield Path(local)
            for name in _written(Path(local), names):
                with atomic_write(folder / name) as copy:
                    shutil.copyfile(Path(local) / name, copy)
        return
    hidden = folder / temporary_name(_title(names))
    try:
        (hidden / FILES).mkdir(parents=True)
        yield hidden / FILES
        _publish(hidden, folder, _written(hidden / FILES, names))
    except OSError as problem:
        raise CaprmilError(
            f"{folder} cannot be written ({problem.strerror or problem}). {CHECK_FOLDER}"
        ) from problem
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _publish(hidden: Path, folder: Path, names: list[str]) -> None:
    """Rename the files into their folder. If one cannot be, those before it are removed again."""
    digests = {name: _digest(hidden / FILES / name) for name in names}
    write_text(hidden / DIGESTS, json.dumps(digests))
    renamed: list[Path] = []
    try:
        for name in names:
            target = folder / name
            check_new(target)  # another process may have written it meanwhile
            target.parent.mkdir(parents=True, exist_ok=True)
            (hidden / FILES / name).replace(target)
            renamed.append(target)
    except BaseException:
        for target in renamed:
            with suppress(OSError):
                target.unlink(missing_ok=True)
        raise


def _remove_unfinished(folder: Path, names: list[str]) -> None:
    """Remove the files of a writer that was killed before all of them had their names."""
    if isinstance(folder, RemotePath):
        return
    for hidden in folder.glob(".caprmil-*"):
        if final_name(hidden) != _title(names) or not is_abandoned(hidden) or hidden.is_symlink():
            continue
        for name, digest in _read_digests(hidden).items():
            path, inside = folder / name, ".." not in PurePosixPath(name).parts
            regular = inside and not path.is_symlink() and path.is_file()
            if regular and path.is_relative_to(folder) and _digest(path) == digest:
                path.unlink(missing_ok=True)
        clear([hidden])


def _title(names: list[str]) -> str:
    """Return what the hidden folder is for: commands with other files do not touch it."""
    return f"{PurePosixPath(names[0]).name}.files"


def _written(folder: Path, names: list[str]) -> list[str]:
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert set(found) <= set(names), f"{sorted(set(found) - set(names))} were not announced"
    return [name for name in names if name in found]


def _read_digests(hidden: Path) -> dict[str, str]:
    try:
        found = json.loads((hidden / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # killed before it was written
        return {}
    return found if isinstance(found, dict) else {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
