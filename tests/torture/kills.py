"""Kills: SIGKILL at a file-system event or at a random time, then the same command again.

The second run must end well, and every file must be as after a run that nothing disturbed: nothing
lost, nothing changed, no temporary file left over. If the command had finished before the kill, it
may refuse to do its work again.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from calls import last_lines
from children import BrokenPromiseError, Case
from corpus import Corpus
from long_commands import COMMANDS, LongCommand, contents, differences

POINTS = 500
FEWEST = 5  # points of a command
BY_TIME = 0.2  # share of the points at a random time
SECONDS = 120.0
WATCHED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

When = Callable[[str, str], bool]


def kill_at_event(
    folder: Path, number: int = 0, *, when: When | None = None, counted: Path | None = None
) -> None:
    """Kill this process before its n-th event in a folder, or before the first that `when` chooses.

    An event is the opening of a file for writing, a rename, a removal, a new folder. Libraries that
    write files without Python are not seen, but the renames of their files are. With `counted`,
    the number of events so far is kept in that file.
    """
    count, root = 0, str(folder.resolve()) + os.sep

    def watch(event: str, values: tuple[object, ...]) -> None:
        nonlocal count
        if event not in WATCHED or not _writes(event, values):
            return
        path = values[1] if event == "os.rename" else values[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if not name.startswith(root) or name == str(counted):
            return
        count += 1
        if count == number or (when is not None and when(event, name)):
            os.kill(os.getpid(), signal.SIGKILL)
        if counted is not None:
            counted.write_text(str(count))

    sys.addaudithook(watch)


def _writes(event: str, values: tuple[object, ...]) -> bool:
    if event != "open":
        return True
    _, mode, flags = values
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & WRITING)


@dataclass(frozen=True)
class Reference:
    """A run that nothing disturbed: its files, its events and its time."""

    command: LongCommand
    contents: dict[str, object]
    events: int
    seconds: float
    size: int  # bytes of the files that it wrote, in pages


@cache
def measure(command: LongCommand, corpus: Corpus) -> Reference:
    """Run a command undisturbed, once in a campaign.

    A command that does not write the same twice shows in the kills of it: they all fail.
    """
    folder = corpus.folder.parent / "undisturbed"
    own, counted = folder / command.name, folder / f"{command.name}.count"
    command.prepare(corpus, own)
    begin = time.monotonic()
    code, printed = command.run_in_child(corpus, own, lambda: kill_at_event(own, counted=counted))
    seconds = time.monotonic() - begin
    if code != 0:
        raise BrokenPromiseError(f"{command.name} fails undisturbed:\n{printed}")
    return Reference(command, contents(own), int(counted.read_text()), seconds, _size(own))


def _size(folder: Path) -> int:
    """Return the bytes of a folder in pages, without hard links to the corpus."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink == 1]
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


def cases(corpus: Corpus, _: Path, scale: float, names: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the kill points of every command."""
    for command in COMMANDS:
        if names and command.name not in names:
            continue
        points = max(FEWEST, round(POINTS * scale * command.share))
        try:
            reference = measure(command, corpus)
        except BrokenPromiseError as failure:
            yield failed(f"kills/{command.name}/undisturbed", failure)
            continue
        events = _spread(round(points * (1 - BY_TIME)), reference.events)
        chance = random.Random(command.name)
        shares = [round(chance.random(), 3) for _ in range(points - len(events))]
        for where in (*(f"event-{n}" for n in events), *(f"time-{share}" for share in shares)):
            yield kill_point(corpus, reference, where)


def kill_point(corpus: Corpus, reference: Reference, where: str) -> Case:
    """Return the case of a kill at event-N, or at time-SHARE of the time that a command takes."""
    kind, _, number = where.partition("-")
    point = int(number) if kind == "event" else float(number)
    name = f"kills/{reference.command.name}/{where}"
    return Case(name, _killed(corpus, reference, point), SECONDS, alone=True)


def failed(name: str, failure: Exception) -> Case:
    """Return a case that fails: the command cannot be tried."""

    def run(_: Path) -> None:
        raise failure

    return Case(name, run)


def _spread(points: int, events: int) -> list[int]:
    """Return numbers of events from the first to the last, evenly spread."""
    points = max(1, min(points, events))
    return sorted({1 + round(n * (events - 1) / max(1, points - 1)) for n in range(points)})


def _killed(corpus: Corpus, reference: Reference, point: float) -> Callable[[Path], None]:
    """Return the case of a kill at an event (an integer) or after a share of the time."""
    command = reference.command

    def run(folder: Path) -> None:
        command.prepare(corpus, folder)
        if isinstance(point, int):
            command.run_in_child(corpus, folder, lambda: kill_at_event(folder, point))
        else:
            command.run_in_child(corpus, folder, kill_after=point * reference.seconds)
        check_second_run(reference, corpus, folder)

    return run


def check_second_run(reference: Reference, corpus: Corpus, folder: Path) -> None:
    """Give the command again: afterwards, everything must be as after an undisturbed run."""
    code, printed = reference.command.run_in_child(corpus, folder)
    problem = differences(contents(folder), reference.contents)
    if code not in (0, 2) or (code == 2 and problem):
        said = last_lines(printed, 4)
        raise BrokenPromiseError(f"the second run ends with {code}: {said}\n{problem}".strip())
    if problem:
        raise BrokenPromiseError(problem)
