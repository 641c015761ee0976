"""The status of unfinished tasks, in small files next to the results.

FOLDER/.status/NAME.json    running, waiting for a retry, or failed; attempt, process, reason

A finished task has a result and no status file. A running task updates its file every few seconds.
If the file of a running task is older than a minute, its process is gone. This needs a shared
folder and clocks that agree to within that minute. It needs no locks, which not every storage has,
and no message from a process that was killed.
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

from caprmil import config
from caprmil.errors import CaprmilError
from caprmil.io.atomic import write_text
from caprmil.io.json_files import parse_json
from caprmil.io.progress import Bar

FOLDER = ".status"
HEARTBEAT_SECONDS = 5.0
LOST_SECONDS = 60.0  # without a heartbeat; then the process counts as gone


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What is known about a task that is not finished."""

    state: Literal["running", "waiting", "failed"]
    attempt: int = 1
    process: str = ""
    started: float = 0.0
    last_heartbeat: float = 0.0
    reason: str = ""
    traceback: str = ""
    done: float = 0.0
    total: float = 0.0
    message: str = ""

    @classmethod
    def read(cls, path: Path) -> "JobStatus | None":
        """Return the status in a file, or None if there is none that can be read."""
        try:
            return config.parse(parse_json(path.read_bytes()), into=cls)
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self), indent=2) + "\n", replace=True)

    @property
    def silent_seconds(self) -> float:
        """The time since the last heartbeat."""
        return time.time() - self.last_heartbeat

    @property
    def lost(self) -> bool:
        """Whether the task was running and its process is gone."""
        return self.state == "running" and self.silent_seconds > LOST_SECONDS


def status_path(folder: Path, name: str) -> Path:
    """Return the path of the status file of a task."""
    return folder / FOLDER / f"{name}.json"


def read_statuses(folder: Path) -> dict[str, JobStatus]:
    """Return the status of each unfinished task in a folder, by name."""
    found = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        if not path.name.startswith(".") and (status := JobStatus.read(path)):
            found[path.stem] = status
    return found


def process_name() -> str:
    """Return the host and the id of this process."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def describe_error(error: BaseException) -> str:
    """Return an error in one line: the message, with the type unless it is a CaprmilError."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, CaprmilError):
        return f"{error}{notes}"
    return f"{type(error).__name__}: {error}{notes}"


@contextmanager
def heartbeat(path: Path, *, attempt: int = 1, on_progress: Bar | None = None) -> Iterator[Bar]:
    """Keep the status file of a task up to date while it runs; yield a callback for its progress.

    The file is removed on success and on an interrupt. After an error it has the reason. Two
    processes with the same task, of which one waits for the other, share the file.
    """
    now = time.time()
    start = JobStatus(
        state="running", attempt=attempt, process=process_name(), started=now, last_heartbeat=now
    )
    start.write(path)
    latest, ended = [start], Event()

    def report(done: float, total: float, remark: str = "") -> None:
        latest[0] = replace(start, done=done, total=total, message=remark)
        if on_progress is not None:
            on_progress(done, total, remark)

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError, CaprmilError):  # a missed heartbeat must not stop the task
                replace(latest[0], last_heartbeat=time.time()).write(path)

    thread = Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield report
    except Exception as error:
        _stop(thread, ended)
        trace = "" if isinstance(error, CaprmilError) else traceback.format_exc()
        reason = describe_error(error)
        replace(latest[0], state="failed", reason=reason, traceback=trace).write(path)
        raise
    except BaseException:
        _stop(thread, ended)
        path.unlink(missing_ok=True)
        raise
    else:
        _stop(thread, ended)
        path.unlink(missing_ok=True)


def _stop(thread: Thread, ended: Event) -> None:
    ended.set()
    thread.join()
