"""Notes: what is said of a unit as long as it is not done, in a small file beside the results.

FOLDER/.units/NAME.json    running, waiting for another try, or failed; which try, where, why

That a unit is done is said by its result alone, and its note is removed. Whoever works on a unit
signs its note every few seconds: a note that says "running" and was not signed for a minute is of
a process that is gone. This needs a common folder, and clocks that agree to within that minute, but
no locks, which not every storage has, and no word from a process that was killed.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Literal

from caprmil.errors import CaprmilError
from caprmil.io.atomic import write_text
from caprmil.io.progress import Bar

FOLDER = ".units"
BEAT = 5.0  # seconds between two signs of life
LOST = 60.0  # seconds without one, after which nobody is thought to be alive


@dataclass(frozen=True, kw_only=True)
class Note:
    """What is known of a unit that is not done."""

    state: Literal["running", "waiting", "failed"]
    attempt: int = 1
    where: str = ""
    since: float = 0.0
    signed: float = 0.0
    reason: str = ""
    trace: str = ""
    done: float = 0.0
    total: float = 0.0
    remark: str = ""

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self), indent=2) + "\n", replace=True)


def place(folder: Path, name: str) -> Path:
    """Return where the note of a unit is."""
    return folder / FOLDER / f"{name}.json"


def read(path: Path) -> Note | None:
    """Return a note, if there is one that can be understood."""
    try:
        return Note(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read_notes(folder: Path) -> dict[str, tuple[Note, float]]:
    """Return the notes in a folder by unit, each with the seconds since its last sign of life."""
    found = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        if not path.name.startswith(".") and (note := read(path)):
            found[path.stem] = note, time.time() - note.signed
    return found


def here() -> str:
    """Return the name of this process for those who look for it."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def said(problem: BaseException) -> str:
    """Return an error as one line: its own words if it is ours, else its kind too."""
    more = "".join(f" ({note})" for note in getattr(problem, "__notes__", ()))
    if isinstance(problem, CaprmilError):
        return f"{problem}{more}"
    return f"{type(problem).__name__}: {problem}{more}"


@contextmanager
def attended(path: Path, *, attempt: int = 1, listen: Bar | None = None) -> Iterator[Bar]:
    """Keep a note on a unit while it is in work; yield what is called with how far it is.

    If it is done, or is interrupted, the note goes. If it fails, the note says why. Of two who have
    the same unit, one only waits for the other: their notes are one, for as long as both are there.
    """
    now = time.time()
    note = Note(state="running", attempt=attempt, where=here(), since=now, signed=now)
    note.write(path)
    news, ended = [note], Event()

    def tell(done: float, total: float, remark: str = "") -> None:
        news[0] = replace(note, done=done, total=total, remark=remark)
        if listen is not None:
            listen(done, total, remark)

    def beat() -> None:
        while not ended.wait(BEAT):
            with suppress(OSError, CaprmilError):  # a sign of life is not worth a night's work
                replace(news[0], signed=time.time()).write(path)

    heart = Thread(target=beat, name="beat", daemon=True)
    heart.start()
    try:
        yield tell
    except Exception as problem:
        _stop(heart, ended)
        trace = "" if isinstance(problem, CaprmilError) else traceback.format_exc()
        replace(news[0], state="failed", reason=said(problem), trace=trace).write(path)
        raise
    except BaseException:
        _stop(heart, ended)
        path.unlink(missing_ok=True)
        raise
    else:
        _stop(heart, ended)
        path.unlink(missing_ok=True)


def _stop(heart: Thread, ended: Event) -> None:
    ended.set()
    heart.join()
