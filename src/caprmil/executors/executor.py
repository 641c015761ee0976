"""Tasks, the workers that run them, and what every executor offers.

A task can be repeated without harm, and its result is stored atomically: a slide to encode, a fold
to train, a point of a sweep. If a process dies, only the task that it was running is lost.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from caprmil.io.progress import Bar


@dataclass(frozen=True)
class Task:
    """One unit of work: its name, its status file, and the payload for the worker."""

    name: str
    status_file: Path
    payload: Any = None


@dataclass(frozen=True)
class Succeeded:
    """A task that was run, and the result that its worker returned."""

    task: Task
    result: Any


@dataclass(frozen=True)
class Failed:
    """A task that will not be tried again."""

    task: Task
    reason: str
    attempts: int = 1
    error: Exception | None = None
    """The exception, if it was raised in this process."""


class Worker:
    """Runs tasks of one kind, one after the other.

    A worker is created in the process where it runs, once for many tasks. It may hold what is slow
    to load, such as an encoder or cached bags.
    """

    prefetches = False
    """Whether the worker uses `prefetch`."""

    def run(self, task: Task, report: Bar) -> Any:
        """Return the result of a task. A CaprmilError means that a retry would not help."""
        raise NotImplementedError

    def prefetch(self, task: Task) -> None:
        """Start to prepare the next task in the background, while the current one runs."""

    def close(self) -> None:
        """Release resources."""


WorkerFactory: TypeAlias = Callable[[], Worker]
OnProgress: TypeAlias = Callable[[Task, float, float, str], None]
"""Called with the progress of a running task: task, done, total, message."""


class Executor(Protocol):
    """Runs tasks."""

    remote: bool
    """Whether tasks run in other processes, which may have other devices than this one."""

    def run(
        self, tasks: Iterable[Task], make_worker: WorkerFactory, on_progress: OnProgress
    ) -> Iterator[Succeeded | Failed]:
        """Yield the outcome of each task as soon as it is known.

        The next task is taken from `tasks` only when a worker is free for it. So the outcomes that
        were yielded before can decide which task comes next.
        """
        ...
