"""Atomic writes: a file appears when it is complete, and never replaces one by accident."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EDQUOT, EFBIG, ENOSPC, EPERM, EROFS
from pathlib import Path

from caprmil.errors import CaprmilError
from caprmil.io.leftovers import clear, final_name, temporary_name
from caprmil.io.paths import RemotePath, as_path, check_remote_writable, upload_when_done

FULL, FORBIDDEN = (ENOSPC, EDQUOT, EFBIG, EROFS), (EACCES, EPERM)
"""Errors of a full or read-only disk, a quota or a limit; and of missing permissions."""
CHECK_FOLDER = "Check the free space and the permissions of its folder."


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary file in the same folder, which is renamed to `path` at the end.

    If anything fails before that, `path` stays as it was. Missing folders are created. The
    temporary file is hidden and has the same suffix, from which some writers take the format. For
    a remote `path` it is in a local temporary folder.
    """
    path = as_path(path)
    if isinstance(path, RemotePath):
        with upload_when_done(path, replace=replace) as temporary:
            yield temporary
        return
    if not replace:
        _require_new(path)
    temporary = path.with_name(temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        if not replace:
            _require_new(path)  # another process may have written it meanwhile
        temporary.replace(path)
    except OSError as problem:
        raise CaprmilError(
            f"{path} cannot be written ({problem.strerror or problem}). {CHECK_FOLDER}"
        ) from problem
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_leftovers(path: str | os.PathLike[str], *, locked: bool = False) -> None:
    """Remove the temporary files and folders of killed writers of `path`.

    For `locked` see `clear_leftovers`.
    """
    path = as_path(path)
    if isinstance(path, RemotePath):
        return  # its temporary files are in TMPDIR
    found = path.parent.glob(".caprmil-*")
    clear((file for file in found if final_name(file) == path.name), locked=locked)


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise if `path` exists or cannot be written. To be called before long work.

    What a killed writer of `path` has left is removed.
    """
    _require_new(path)
    remove_leftovers(path)


def _require_new(path: str | os.PathLike[str]) -> None:
    path = as_path(path)
    if path.exists():
        raise CaprmilError(f"{path} already exists. Move it away, or choose another name.")
    check_writable(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise if `path` cannot be written. To be called before long work."""
    path = as_path(path)
    if isinstance(path, RemotePath):
        check_remote_writable(path)
        return
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CaprmilError(
            f"{path} cannot be created: {folder} is not a folder that you can write to."
        )


def write_text(path: str | os.PathLike[str], text: str, *, replace: bool = False) -> Path:
    """Write a text file atomically, and return its path."""
    with atomic_write(path, replace=replace) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return as_path(path)
