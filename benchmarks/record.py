"""Benchmarks that can be resumed: results in a file of JSON lines, and the page with the tables."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from caprmil.errors import RunError
from caprmil.io import progress
from caprmil.io.atomic import write_text


class Outcome(Protocol):
    """The result of a job: a dataclass that can be stored as JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def job(self) -> Any: ...

    @property
    def settings(self) -> str:
        """Digest of the settings."""


Job = TypeVar("Job")
Result = TypeVar("Result", bound=Outcome)


@dataclass(frozen=True)
class Record(Generic[Result]):
    """Results of one type and one digest of settings, in a file of JSON lines."""

    path: Path
    kind: type[Result]
    settings: str

    def kept(self) -> list[Result]:
        """Return the results of these settings, without incomplete lines."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text().splitlines():
            try:
                found.append(self.kind(**json.loads(line)))
            except (ValueError, TypeError):
                continue
        return [result for result in found if result.settings == self.settings]

    def complete(
        self, jobs: Sequence[Job], run: Callable[[Job], Result], *, processes: int | None = 2
    ) -> Iterator[Result]:
        """Yield the result of every job: the stored ones first, then the others."""
        done = {result.job: result for result in self.kept()}
        yield from (done[job] for job in jobs if job in done)
        to_do = [job for job in jobs if job not in done]
        if len(to_do) < len(jobs):
            print(f"{len(jobs) - len(to_do)} of {len(jobs)} are already in {self.path}.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        shown = sys.stderr.isatty()
        with progress.bar("Jobs", shown=shown) as step, self.path.open("a") as lines:
            if self.path.read_text()[-1:] not in ("", "\n"):
                lines.write("\n")  # the last line is incomplete
            for number, result in enumerate(work(to_do, run, processes), len(jobs) - len(to_do)):
                lines.write(json.dumps(asdict(result)) + "\n")
                lines.flush()
                step(number + 1, len(jobs), " ".join(map(str, result.job)))
                yield result


def one_by_one(jobs: Sequence[Job], run: Callable[[Job], Result]) -> Iterable[Result]:
    """Yield results in order, each from a new process, so that jobs do not affect each other."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for job in jobs:
            yield pool.submit(run, job).result()


def work(
    jobs: Sequence[Job], run: Callable[[Job], Result], processes: int | None
) -> Iterable[Result]:
    """Yield results as they are done, from this number of processes with one thread each.

    None: in order, each in a new process.
    """
    if processes is None:
        yield from one_by_one(jobs, run)
        return
    if processes <= 1:
        yield from map(run, jobs)
        return
    # spawn: a forked process would inherit torch's threads in an unknown state
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class Page:
    """A page with a part that a benchmark writes. The rest of the page is not changed."""

    end = "<!-- end -->"

    def __init__(self, path: Path, maker: str, title: str) -> None:
        self.path, self.title = path, title
        self.begin = f"<!-- begin: made by {maker} -->"
        self.around()  # a page without the marks is an error before the work, not after it

    def around(self) -> tuple[str, str]:
        """Return the text of the page before and after the part."""
        if not self.path.exists():
            return f"# {self.title}\n\n", "\n"
        before, begin, rest = self.path.read_text(encoding="utf-8").partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end:
            raise RunError(
                f"{self.path} has no marks for the tables. Add the lines {self.begin} and "
                f"{self.end}, or choose another name."
            )
        return before, after

    def write(self, part: str) -> None:
        """Write the part between the marks."""
        before, after = self.around()
        text = f"{before}{self.begin}\n{part.strip()}\n{self.end}{after}"
        write_text(self.path, text, replace=True)
