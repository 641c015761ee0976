"""Leftovers: temporary files and folders of processes that were killed.

A temporary name has the machine and the process that it belongs to. So leftovers differ from what a
user made, and from what another process is writing at this moment.
"""

import hashlib
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir, mkdtemp
from uuid import uuid4

NO_TEMPORARY_FOLDER = (
    "No folder for temporary files can be written. Check the free space and the limit of file "
    "sizes (ulimit -f), or set TMPDIR to another folder."
)
ABANDONED_SECONDS = 24 * 3600.0  # without a change, for what a process of another machine made

_NAME = re.compile(r"\.?caprmil-([0-9a-f]{8})-([0-9]{1,9})-[0-9a-z_]{8}(\..*)?", re.DOTALL)


def temporary_name(name: str) -> str:
    """Return a hidden name for a file or folder that gets its own name when it is complete."""
    return f".{_prefix()}{uuid4().hex[:8]}.{name}"


def final_name(path: Path) -> str | None:
    """Return the name that a temporary file or folder is to get; None for any other path."""
    match = _NAME.fullmatch(path.name)
    return match[3].removeprefix(".") if match and match[3] else None


def temporary_folder() -> "TemporaryDirectory[str]":
    """Return a context manager for a new folder in TMPDIR, after removing those left over there."""
    clear_temporary_folders()
    return TemporaryDirectory(prefix=_prefix())


def make_temporary_folder() -> Path:
    """Return a new folder in TMPDIR, after removing those left over there."""
    clear_temporary_folders()
    return Path(mkdtemp(prefix=_prefix()))


def has_temporary_folder() -> bool:
    """Return whether there is a folder for temporary files. Python tries it once, by writing."""
    try:
        gettempdir()
    except FileNotFoundError:
        return False
    return True


def clear_temporary_folders() -> None:
    """Remove the folders in TMPDIR that killed processes of this user have left."""
    with suppress(OSError):
        clear(path for path in Path(gettempdir()).glob("caprmil-*") if _is_own_folder(path))


def clear_leftovers(folder: Path, *, locked: bool = False) -> None:
    """Remove all leftovers in a local folder and below it.

    `locked` means that no other process writes there, on this machine or another: everything
    temporary is a leftover then.
    """
    for parent, folders, files in os.walk(folder):
        clear((Path(parent) / name for name in (*folders, *files)), locked=locked)


def is_abandoned(path: Path) -> bool:
    """Return whether a path is temporary and its process is gone."""
    match = _NAME.fullmatch(path.name)
    return match is not None and _is_abandoned(path, match[1], int(match[2]))


def clear(paths: Iterable[Path], *, locked: bool = False) -> None:
    """Remove those paths that are leftovers. What cannot be removed stays."""
    for path in paths:
        if _NAME.fullmatch(path.name) is None or not (locked or is_abandoned(path)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _prefix() -> str:
    return f"caprmil-{_machine()}-{os.getpid()}-"


@cache
def _machine() -> str:
    """Return a name for where process ids are unique: the machine, or a container on it."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:8]


def _is_abandoned(path: Path, machine: str, process: int) -> bool:
    """Return whether the process of a temporary path is gone."""
    if machine == _machine() and os.name == "posix":
        return not _is_running(process)
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime > ABANDONED_SECONDS
    return False


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


def _is_own_folder(path: Path) -> bool:
    """Return whether a path in a shared folder is a folder of this user, and not a link."""
    with suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False
