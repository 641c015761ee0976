"""The scheduler retries tasks of lost workers, counts attempts, and replaces workers.

Ray is replaced by a stand-in whose workers do what a script says.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caprmil.errors import CaprmilError
from caprmil.executors import Failed, JobStatus, Succeeded, Task, scheduler
from caprmil.executors.job_status import status_path
from caprmil.executors.scheduler import Scheduler, TaskQueue


class LostError(Exception):
    """As `ray.exceptions.RayError`: a worker or its node is gone."""


class TaskError(LostError):
    """As `ray.exceptions.RayTaskError`: a method of a worker raised an error."""

    cause: Exception | None = None


class FakeRay:
    """A stand-in for Ray. Futures are functions, which are called by `get`."""

    exceptions = SimpleNamespace(RayError=LostError, RayTaskError=TaskError)

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def wait(self, futures: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return futures[:1], futures[1:]

    def get(self, future: Callable[[], Any]) -> Any:
        return future()

    def kill(self, worker: Any) -> None:
        self.killed.append(worker)


class SimpleWorker:
    """An actor with the methods `run` and `close`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = SimpleNamespace(remote=run)
        self.close = SimpleNamespace(remote=lambda: None)


Behaviour = Callable[[Task, int], tuple[str, Any]]


def run(
    tasks: list[Task],
    behaviour: Behaviour,
    *,
    start: Callable[[], bool] = lambda: False,
    capacity: Callable[[], int] = lambda: 1,
) -> list[Succeeded | Failed]:
    """Run tasks on workers that do what `behaviour` says about a task and its attempt."""

    def start_worker() -> tuple[Any, Any]:
        def submit(task: Task, attempt: int, _: Task | None) -> Callable[[], tuple[str, Any]]:
            return lambda: behaviour(task, attempt)

        return SimpleWorker(submit), lambda: start()

    found = Scheduler(FakeRay(), TaskQueue(iter(tasks), len(tasks)), start_worker, capacity)
    try:
        return list(found.outcomes(lambda *_: None))
    finally:
        found.stop()


def make_task(folder: Path, name: str = "a") -> Task:
    return Task(name, status_path(folder, name))


def begin(task: Task, attempt: int) -> None:
    JobStatus(state="running", attempt=attempt, process="here").write(task.status_file)


def lose_first(times: int, *, begun: bool) -> Behaviour:
    """Lose the worker of the first calls, and succeed from then on."""
    calls: list[int] = []

    def behaviour(task: Task, attempt: int) -> tuple[str, Any]:
        calls.append(attempt)
        if begun:
            begin(task, attempt)
        if len(calls) <= times:
            raise LostError("The actor died because its node has died. More follows.")
        return "succeeded", attempt

    return behaviour


def test_a_task_whose_worker_is_lost_is_retried_and_then_fails(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (second,) = run([task], lose_first(1, begun=True))
    assert second == Succeeded(task, 2)
    (third,) = run([task], lose_first(3, begun=True))
    reason = "Its worker was lost: The actor died because its node has died."
    assert third == Failed(task, reason, attempts=3)
    status = JobStatus.read(task.status_file)
    assert status is not None
    assert (status.state, status.attempt, status.reason) == ("failed", 3, reason)
    assert status.process == "here"


def test_a_worker_that_is_lost_before_the_task_begins_does_not_count_as_an_attempt(
    tmp_path: Path,
) -> None:
    (found,) = run([make_task(tmp_path)], lose_first(3, begun=False))
    assert isinstance(found, Succeeded)
    assert found.result == 1
    (found,) = run([make_task(tmp_path, "b")], lose_first(100, begun=False))
    assert isinstance(found, Failed), "but not for ever"


def test_between_two_attempts_the_status_is_waiting_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, seen = make_task(tmp_path), []

    def behaviour(task: Task, attempt: int) -> tuple[str, Any]:
        seen.append(JobStatus.read(task.status_file))
        return ("failed", "ValueError: x") if attempt == 1 else ("succeeded", None)

    with caplog.at_level(logging.WARNING, "caprmil"):
        run([task], behaviour)
    before, between = seen
    assert before is None
    assert between is not None
    assert (between.state, between.attempt, between.reason) == ("waiting", 1, "ValueError: x")
    assert "a failed and is retried: ValueError: x" in caplog.text


def test_a_task_that_is_refused_is_not_retried(tmp_path: Path) -> None:
    (found,) = run([make_task(tmp_path)], lambda *_: ("refused", "broken"))
    assert isinstance(found, Failed)
    assert (found.reason, found.attempts) == ("broken", 1)


def test_workers_that_all_die_while_they_start_are_an_error(tmp_path: Path) -> None:
    starts = []

    def start() -> bool:
        starts.append(1)
        raise LostError("out of memory")

    with pytest.raises(CaprmilError, match=r"No worker can start\. Workers die \(out of memory\)"):
        run([make_task(tmp_path)], lambda *_: ("succeeded", None), start=start)
    assert len(starts) == 3


def test_without_nodes_the_tasks_wait_until_one_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.0)
    capacities: Iterator[int] = iter([0, 0, 0])
    with caplog.at_level(logging.WARNING, "caprmil"):
        (found,) = run(
            [make_task(tmp_path)],
            lambda *_: ("succeeded", None),
            capacity=lambda: next(capacities, 1),
        )
    assert isinstance(found, Succeeded)
    assert caplog.text.count("Waiting for one to join") == 1
