"""Cases in forked children, each with a limit of time and memory.

The parent imports everything once and does no work, so it has no threads and a fork is cheap and
safe. A child runs a batch of cases. If it dies or exceeds a limit, the case in progress has failed,
and another child runs the rest. A case that failed in a batch is repeated alone, to tell what can
be reproduced by itself from what needs the cases before it. Linux only.
"""

import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

SECONDS = 10.0  # of processor time; under load, a case may wait longer for it
PATIENCE = 6.0  # wall time, as a multiple of the limit
MOST_MEMORY = 2 * 2**30  # bytes above what the parent has
BATCH = 25
KEEP = False  # keep the folders of cases, and show whole tracebacks


class BrokenPromiseError(Exception):
    """A case that failed: something that must not happen did, or something was lost."""


@dataclass(frozen=True)
class Case:
    """Something to try. `run` is called in an empty folder, the working directory of its child."""

    name: str
    run: Callable[[Path], None] = field(repr=False)
    seconds: float = SECONDS
    alone: bool = False  # in a child of its own
    attempts: int = 1  # what it counts as


@dataclass(frozen=True)
class Result:
    """The result of a case: no failure, or the text of it."""

    case: Case
    failure: str = ""
    seconds: float = 0.0  # of processor time
    before: tuple[str, ...] = ()  # the cases before it in the same process, if they are needed


def run_cases(
    cases: Sequence[Case], folder: Path, *, jobs: int, repeat: bool = True
) -> Iterator[Result]:
    """Run cases in `jobs` children at once, and yield the results as they come."""
    waiting = list(_batches(cases))
    running: list[_Child] = []
    failed: list[Result] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Child(waiting.pop(0), folder))
            readable = select.select([child.pipe for child in running], [], [], 0.25)[0]
            for child in list(running):
                results = child.read() if child.pipe in readable else []
                results += child.check()
                for result in results:
                    if result.failure and repeat:
                        failed.append(result)
                    else:
                        yield result
                if child.ended:
                    running.remove(child)
                    waiting[:0] = [child.rest] if child.rest else []
    finally:
        for child in running:
            child.stop()
    for result in failed:
        yield _again(result, folder)


def _again(result: Result, folder: Path) -> Result:
    """Repeat a failed case alone."""
    again = next(run_cases([replace(result.case, alone=True)], folder, jobs=1, repeat=False))
    if again.failure or not result.before:
        return replace(result, failure=again.failure or result.failure, before=())
    return result


def _batches(cases: Sequence[Case]) -> Iterator[list[Case]]:
    batch: list[Case] = []
    for case in cases:
        if case.alone:
            yield [case]
            continue
        batch.append(case)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class _Child:
    """A child with a batch of cases, as the parent sees it."""

    count = 0

    def __init__(self, cases: Sequence[Case], folder: Path) -> None:
        _Child.count += 1
        self.cases, self.folder = cases, folder / f"child-{_Child.count}"
        self.at, self.ended, self.text = 0, False, b""
        self.folder.mkdir(parents=True)
        self.output = self.folder / "output.txt"
        self.pipe, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.pipe)
            _work(cases, self.folder, self.output, write)
        os.close(write)
        self._start()

    def _start(self) -> None:
        self.started, self.cpu = time.monotonic(), _cpu_seconds(self.pid)

    @property
    def rest(self) -> list[Case]:
        return list(self.cases[self.at :])

    def read(self) -> list[Result]:
        data = os.read(self.pipe, 2**16)
        if not data:
            return self._died()
        *lines, self.text = (self.text + data).split(b"\n")
        results = []
        for line in lines:
            results.append(self._result(*json.loads(line)))
            self._start()
        return results

    def check(self) -> list[Result]:
        """Kill the child if its case has taken too long."""
        if self.ended or self.at >= len(self.cases):
            return []
        limit = self.cases[self.at].seconds
        cpu = _cpu_seconds(self.pid) - self.cpu
        wall = time.monotonic() - self.started
        if cpu <= limit and wall <= PATIENCE * limit:
            return []
        self.stop()
        failure = f"hangs: more than {limit:g} s ({cpu:.1f} s of processor time)"
        return [self._result(failure, cpu)]

    def stop(self) -> None:
        if not self.ended:
            _kill_all(self.pid)
            os.waitpid(self.pid, 0)
            self._close()

    def _died(self) -> list[Result]:
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        tail = _tail(self.output)
        self._close()
        if self.at >= len(self.cases):
            return []
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return [self._result(f"the process died: {name}\n{tail}")]

    def _close(self) -> None:
        os.close(self.pipe)
        if not KEEP:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.ended = True

    def _result(self, failure: str, seconds: float = 0.0) -> Result:
        before = tuple(case.name for case in self.cases[: self.at])
        result = Result(self.cases[self.at], failure, seconds, before)
        self.at += 1
        return result


def _work(cases: Sequence[Case], folder: Path, output: Path, write: int) -> None:
    """Run cases, and send the failure of each, or an empty text. Never returns."""
    try:
        os.setpgid(0, 0)
        redirect(output)
        limit_memory()
        for number, case in enumerate(cases):
            os.ftruncate(1, 0)
            begin = sum(os.times()[:4])
            failure = _failure(case, folder / str(number))
            result = (failure[:5000], sum(os.times()[:4]) - begin)
            os.write(write, json.dumps(result).encode() + b"\n")
    finally:
        os._exit(0)


def _failure(case: Case, folder: Path) -> str:
    before = _peak_memory()
    folder.mkdir(parents=True)
    os.chdir(folder)
    try:
        case.run(folder)
    except BrokenPromiseError as failure:
        return str(failure)
    except BaseException:  # whatever it is, it should have been an error of ours
        return "a traceback\n" + _short(traceback.format_exc())
    finally:
        os.chdir("/")
        if not KEEP:
            shutil.rmtree(folder, ignore_errors=True)
    used = _peak_memory() - before
    return f"takes {used / 2**30:.1f} GB of memory" if used > MOST_MEMORY else ""


def redirect(output: Path | int) -> None:
    """Send what this process prints, in Python or not, to a file or a pipe."""
    target = output
    if isinstance(output, Path):
        target = os.open(output, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((nothing, target, target)):
        os.dup2(source, number)
    for source in {nothing, target} - {0, 1, 2}:
        os.close(source)
    # New streams: those of the parent may be of a file, with a position, and this may be a pipe.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)


def limit_memory() -> None:
    """Limit the address space to what there is and twice what a case may take; dump no core."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MOST_MEMORY, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def start(work: Callable[[], None], output: Path | int) -> int:
    """Fork a process that does some work and ends, and return its id. It prints to `output`."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        redirect(output)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """Return the exit code of a process, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_in_child(work: Callable[[], None], *, kill_after: float | None = None) -> tuple[int, str]:
    """Do some work in a new process, and return its exit code and what it printed."""
    read, write = os.pipe()
    pid = start(work, write)
    os.close(write)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    printed = b""
    while data := os.read(read, 2**16):
        printed += data
    os.close(read)
    return wait(pid), printed.decode("utf-8", "replace")


def _kill_all(pid: int) -> None:
    """Kill a child and the processes that it started: they share its group."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its ended children, 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _peak_memory() -> int:
    own, children = (
        resource.getrusage(who).ru_maxrss * 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return max(own, children)


def _tail(path: Path) -> str:
    text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-6:])


def _short(text: str) -> str:
    """Return the last lines of a traceback, without those of this campaign."""
    lines = [line for line in text.splitlines() if line.strip()]
    return text if KEEP else "\n".join(lines[:1] + lines[-5:])
