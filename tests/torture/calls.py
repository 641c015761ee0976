"""Calls of the package: commands as from a terminal, and functions that read a file."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from children import BrokenPromiseError

ALLOWED = (0, 2)  # done, or an error that a user can correct


class Ended(NamedTuple):
    """How a command ended: its exit code, and what it printed."""

    code: int
    printed: str


def command(*words: object, codes: Iterable[int] = ALLOWED) -> Ended:
    """Run a command in this process, as from a terminal.

    Any other end is a failure: another code, a traceback, or an error without a line that says so.
    """
    from caprmil.cli import run

    before = os.lseek(1, 0, os.SEEK_END)
    code = 0
    try:
        with warnings.catch_warnings(action="ignore"):
            run([str(word) for word in words])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    printed = printed_since(before)
    if "Traceback (most recent call last)" in printed:
        raise BrokenPromiseError(f"prints a traceback\n{last_lines(printed)}")
    if code not in codes:
        raise BrokenPromiseError(f"ends with exit code {code}\n{last_lines(printed)}")
    if code == 2:
        check_error(printed)
    return Ended(code, printed)


def check_error(printed: str) -> None:
    """Check that a command that failed says why, in one line."""
    said = [line for line in printed.splitlines() if line.startswith(("error:", "failed:"))]
    other = ("Usage:", "could not be read", "failed:")
    if not said and not any(word in printed for word in other):
        raise BrokenPromiseError(f"exit code 2 without a reason\n{last_lines(printed)}")


def printed_since(start: int) -> str:
    """Return what this process printed since a position in its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    end = os.lseek(1, 0, os.SEEK_END)
    return os.pread(1, end - start, start).decode("utf-8", "replace")


def last_lines(text: str, count: int = 5) -> str:
    """Return the end of a text."""
    return "\n".join(line for line in text.splitlines()[-count:])


def reads(function: Callable[[Path], object], path: Path) -> bool:
    """Return whether a function reads a file. An error of ours is an answer, others are not."""
    from caprmil.errors import CaprmilError

    try:
        with warnings.catch_warnings(action="ignore"):
            function(path)
    except CaprmilError as error:
        message = str(error)
        if not message or "Traceback" in message:
            raise BrokenPromiseError(f"an error that says nothing: {message!r}") from None
        return False
    return True
