"""Files: written whole or not at all, and never over what somebody made."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from caprmil.errors import CaprmilError


@contextmanager
def beside(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a passing name in the same folder; what was written there becomes `path` at the end.

    If anything goes wrong before that, `path` is as it was. Folders are made on the way. The
    passing name is hidden and keeps the ending, which says the format to some writers.
    """
    path = Path(path)
    if not replace:
        refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    passing = path.with_name(f".{uuid4().hex[:8]}.{path.name}")
    try:
        yield passing
        with passing.open("rb+") as stream:
            os.fsync(stream.fileno())
        if not replace:
            refuse_existing(path)  # somebody may have been quicker
        passing.replace(path)
    finally:
        passing.unlink(missing_ok=True)


def refuse_existing(path: str | os.PathLike[str]) -> None:
    """Raise if something is there: before long work whose result would have no place."""
    if Path(path).exists():
        raise CaprmilError(f"{path} is there already. Move it away, or choose another name.")


def write_text(path: str | os.PathLike[str], text: str, *, replace: bool = False) -> Path:
    """Write a text file whole or not at all."""
    with beside(path, replace=replace) as passing:
        passing.write_text(text, encoding="utf-8")
    return Path(path)
