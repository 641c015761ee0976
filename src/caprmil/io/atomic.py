"""Files: written whole or not at all, and never over what somebody made."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from caprmil.errors import CaprmilError
from caprmil.io.paths import as_path, check_remote_writable, is_remote, upload_when_done


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a passing name in the same folder; what was written there becomes `path` at the end.

    If anything goes wrong before that, `path` is as it was. Folders are made on the way. The
    passing name is hidden and keeps the ending, which says the format to some writers. For a
    `path` elsewhere it lies in local scratch.
    """
    path = as_path(path)
    if is_remote(path):
        with upload_when_done(path, replace=replace) as passing:
            yield passing
        return
    if not replace:
        check_new(path)
    passing = path.with_name(f".{uuid4().hex[:8]}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield passing
        with passing.open("rb+") as stream:
            os.fsync(stream.fileno())
        if not replace:
            check_new(path)  # somebody may have been quicker
        passing.replace(path)
    except OSError as problem:
        raise CaprmilError(
            f"{path} cannot be written ({problem.strerror or problem}). "
            "Check space and rights in its folder."
        ) from problem
    finally:
        with suppress(OSError):
            passing.unlink(missing_ok=True)


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Remove what a writer of `path` left beside it when it was killed. Nobody may be writing."""
    path = as_path(path)
    if is_remote(path):
        return  # its passing files are in local scratch
    passing = re.compile(rf"\.[0-9a-f]{{8}}\.{re.escape(path.name)}")
    for left in path.parent.glob(".*"):
        if passing.fullmatch(left.name):
            left.unlink(missing_ok=True)


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise if something is there: before long work whose result would have no place."""
    path = as_path(path)
    if path.exists():
        raise CaprmilError(f"{path} already exists. Move it away, or choose another name.")
    check_writable(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise if nothing could be made there: again, better before than after."""
    path = as_path(path)
    if is_remote(path):
        check_remote_writable(path)
        return
    place = next(place for place in Path(path).absolute().parents if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise CaprmilError(
            f"{path} cannot be created: {place} is not a folder that you can write to."
        )


def write_text(path: str | os.PathLike[str], text: str, *, replace: bool = False) -> Path:
    """Write a text file whole or not at all."""
    with atomic_write(path, replace=replace) as passing:
        passing.write_text(text, encoding="utf-8")
    return as_path(path)
