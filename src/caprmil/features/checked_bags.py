"""Which bags were read completely and are sound, so that they are not read again to check them.

It is remembered in the user's cache folder, by size, times and number of each file and a digest of
its two ends. Only this early check is left out: whoever uses a bag reads and checks all of it.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from caprmil.errors import CaprmilError
from caprmil.io.atomic import write_text
from caprmil.io.cache_folder import cache_folder
from caprmil.io.json_files import parse_json
from caprmil.io.paths import RemotePath

METHOD = 1  # of checking; another one checks again
WORTHWHILE = 2**28  # bytes of bags below which nothing is remembered: they are read in a second
RECENT = 2.0  # seconds after a change in which a file may change again without a trace
KEPT_DAYS = 90
ENDS = 2**12  # bytes at each end of a file that its digest covers

State = list[Any]


class CheckedBags:
    """The bags that are remembered, of those in question."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.found: dict[str, State] = {}
        self.changed, self.file = False, self._file([*paths])
        if self.file is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                known = parse_json(self.file.read_bytes())
                if isinstance(known, dict) and known.get("method") == METHOD:
                    self.found = dict(known["bags"])

    @staticmethod
    def _file(paths: list[Path]) -> Path | None:
        """Return where bags are remembered; None if they are small, or stored elsewhere."""
        if not paths or any(isinstance(path, RemotePath) for path in paths):
            return None
        try:
            if sum(path.stat().st_size for path in paths) < WORTHWHILE:
                return None
            folder = os.path.commonpath([path.absolute().parent for path in paths])
        except (OSError, ValueError):
            return None
        name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
        return cache_folder() / "checked" / f"{name}.json"

    def has(self, path: Path) -> bool:
        """Return whether a bag was read, and is still the same file."""
        if self.file is None or (known := self.found.get(str(path.absolute()))) is None:
            return False
        return known == state_of(path)

    def add(self, path: Path, before: State | None) -> None:
        """Remember a bag that was just read, if its file has not changed since `before`."""
        if self.file is None or before is None or before != state_of(path):
            return
        if time.time() - max(before[1], before[2]) / 1e9 > RECENT:
            self.found[str(path.absolute())] = before
            self.changed = True

    def state(self, path: Path) -> State | None:
        """Return what a bag will be remembered by; None if nothing is remembered."""
        return None if self.file is None else state_of(path)

    def write(self) -> None:
        """Write what was added, and forget what was not used for long. It is not needed to work."""
        if self.file is None or not self.changed:
            return
        with suppress(OSError, UnicodeEncodeError, CaprmilError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            oldest = time.time() - KEPT_DAYS * 86_400
            for other in self.file.parent.glob("*.json"):
                if other.stat().st_mtime < oldest:
                    other.unlink(missing_ok=True)
            table = {"method": METHOD, "bags": self.found}
            write_text(self.file, json.dumps(table), replace=True)


def state_of(path: Path) -> State | None:
    """Return what tells a file from another, or from itself after a change."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            ends = hashlib.sha256(file.read(ENDS))
            if stat.st_size > ENDS:
                file.seek(max(ENDS, stat.st_size - ENDS))
                ends.update(file.read(ENDS))
    except OSError:
        return None
    times = stat.st_mtime_ns, stat.st_ctime_ns
    return [stat.st_size, *times, stat.st_ino, ends.hexdigest()]
