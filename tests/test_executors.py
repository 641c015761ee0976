"""Executors run every task once, retry it if its worker dies, and report every failure.

The last part starts Ray on this machine. tests/test_cluster.py has two nodes.
"""

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.errors import CaprmilError
from caprmil.executors import (
    Failed,
    LocalExecutor,
    RayExecutor,
    Succeeded,
    Task,
    job_status,
    read_statuses,
)
from caprmil.executors.job_status import heartbeat, status_path
from executor_workers import (
    RAY_ENVIRONMENT,
    CannotStart,
    ListsGpus,
    ListsPrefetched,
    PayloadWorker,
    Prefetching,
    ReturnsLock,
    Sleeping,
    count_starts,
)


def make_tasks(folder: Path, **payloads: str) -> list[Task]:
    folder.mkdir(parents=True, exist_ok=True)
    return [Task(name, status_path(folder, name), each) for name, each in payloads.items()]


def ignore_progress(*_: object) -> None:
    pass


# In this process


def test_tasks_run_in_order_and_leave_no_status(tmp_path: Path) -> None:
    reported: list[tuple[Any, ...]] = []
    tasks = make_tasks(tmp_path, a="", b="")
    found = list(LocalExecutor().run(tasks, PayloadWorker, lambda *args: reported.append(args)))
    assert [each.result for each in found if isinstance(each, Succeeded)] == ["A", "B"]
    assert [(task.name, *rest) for task, *rest in reported] == [
        ("a", 1, 2, "half"),
        ("b", 1, 2, "half"),
    ]
    assert read_statuses(tmp_path) == {}


def test_a_worker_prefetches_the_next_task(tmp_path: Path) -> None:
    found = LocalExecutor().run(
        make_tasks(tmp_path, a="", b="", c=""), ListsPrefetched, ignore_progress
    )
    assert [each.result for each in found if isinstance(each, Succeeded)] == ["b", "b,c", "b,c"]


def test_a_task_is_not_taken_before_a_worker_is_free(tmp_path: Path) -> None:
    taken: list[str] = []

    def tasks() -> Iterator[Task]:
        for task in make_tasks(tmp_path, a="", b="", c=""):
            taken.append(task.name)
            yield task

    for number, _ in enumerate(LocalExecutor().run(tasks(), PayloadWorker, ignore_progress), 1):
        assert len(taken) == number


def test_a_failure_has_a_reason_and_the_other_tasks_still_run(tmp_path: Path) -> None:
    found = list(
        LocalExecutor().run(
            make_tasks(tmp_path, a="refuse", b="bug", c=""), PayloadWorker, ignore_progress
        )
    )
    assert [type(each) for each in found] == [Failed, Failed, Succeeded]
    reasons = {name: status.reason for name, status in read_statuses(tmp_path).items()}
    assert reasons == {"a": "This slide is broken.", "b": "TypeError: an unexpected error"}
    assert "Traceback" in read_statuses(tmp_path)["b"].traceback


# Status files


def test_the_status_of_a_running_task_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_status, "HEARTBEAT_SECONDS", 0.02)
    path = status_path(tmp_path, "a")
    with heartbeat(path) as report:
        before = read_statuses(tmp_path)["a"].last_heartbeat
        wait_for(lambda: read_statuses(tmp_path)["a"].last_heartbeat > before)
        report(3, 7, "epochs")
        wait_for(lambda: read_statuses(tmp_path)["a"].done == 3)
    assert read_statuses(tmp_path) == {}


def test_an_interrupted_task_leaves_no_status(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), heartbeat(status_path(tmp_path, "a")):
        raise KeyboardInterrupt
    assert read_statuses(tmp_path) == {}


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# Ray


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray"], "local"),
        (["--ray", "--device", "cpu"], "local"),
        (["--ray", "auto"], "auto"),
        (["--ray", "10.0.0.7:6379"], "10.0.0.7:6379"),
    ],
)
def test_ray_is_an_option_with_or_without_an_address(
    words: list[str],
    address: str,
    tiny_cohort: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from caprmil.cli import run_commands

    addresses: list[str] = []

    def find_executor(ray: str, *_: object) -> None:
        addresses.append(ray)
        raise CaprmilError("enough")

    monkeypatch.setattr(run_commands, "find_executor", find_executor)
    options = ["--features", str(tiny_cohort.parent / "features"), "--out", str(tmp_path / "run")]
    CliRunner().invoke(app, ["train", *words, *options, str(tiny_cohort)])
    assert addresses == [address]


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CaprmilError, match=r'pip install "caprmil\[cluster\]"'):
        RayExecutor()


def test_an_address_without_a_server_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CaprmilError, match=rf"Cannot connect to a Ray cluster at {address}"):
            RayExecutor(address).__enter__()


@pytest.fixture(scope="module")
def executor() -> Iterator[RayExecutor]:
    """An executor with two workers on this machine, and a GPU that exists only for Ray."""
    import torch

    threads, on_sigterm = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        # A worker has as many cores as this process has threads.
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        found = RayExecutor()
        options: dict[str, Any] = {"address": "local", "num_cpus": 2, "num_gpus": 1}
        options |= {"include_dashboard": False, "log_to_driver": False, "logging_level": 40}
        found.ray.init(object_store_memory=100 * 2**20, **options)
        try:
            yield found
        finally:
            found.ray.shutdown()
            torch.set_num_threads(threads)
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray sets its own


@pytest.mark.slow
def test_on_ray_a_task_that_dies_or_fails_is_tried_three_times_and_the_others_still_run(
    executor: RayExecutor, tmp_path: Path
) -> None:
    payloads = {"a": "", "b": "die", "c": "bug", "d": "refuse", "e": "die once", "f": ""}
    outcomes = executor.run(make_tasks(tmp_path, **payloads), PayloadWorker, ignore_progress)
    found = {each.task.name: each for each in outcomes}
    results = {name: each.result for name, each in found.items() if isinstance(each, Succeeded)}
    failures = {name: each.reason for name, each in found.items() if isinstance(each, Failed)}
    assert results == {"a": "A", "e": "E", "f": "F"}
    assert failures["c"] == "TypeError: an unexpected error"
    assert failures["d"] == "This slide is broken."
    assert failures["b"].startswith("Its worker was lost")
    starts = {name: count_starts(tmp_path, name) for name in payloads}
    assert starts == {"a": 1, "b": 3, "c": 3, "d": 1, "e": 2, "f": 1}
    states = {name: status.state for name, status in read_statuses(tmp_path).items()}
    assert states == dict.fromkeys("bcd", "failed")


@pytest.mark.slow
def test_closing_the_iterator_stops_the_running_tasks(
    executor: RayExecutor, tmp_path: Path
) -> None:
    outcomes = executor.run(
        make_tasks(tmp_path, **{f"t{n}": "" for n in range(50)}), PayloadWorker, ignore_progress
    )
    next(iter(outcomes))
    outcomes.close()  # type: ignore[attr-defined]
    assert read_statuses(tmp_path) == {}
    assert len((tmp_path / "started.txt").read_text().split()) < 50


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_an_error_with_the_reason(
    executor: RayExecutor, tmp_path: Path
) -> None:
    with pytest.raises(CaprmilError, match=r"No worker can start\. There is no encoder here"):
        list(executor.run(make_tasks(tmp_path, a=""), CannotStart, ignore_progress))


@pytest.mark.slow
def test_on_ray_a_worker_prefetches_the_next_task(
    executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "max_workers", 1)
    found = executor.run(make_tasks(tmp_path, a="", b="", c=""), ListsPrefetched, ignore_progress)
    assert [each.result for each in found if isinstance(each, Succeeded)] == ["b", "b,c", "b,c"]


@pytest.mark.slow
def test_a_task_that_a_dead_worker_had_prefetched_is_run_by_another(
    executor: RayExecutor, tmp_path: Path
) -> None:
    payloads = {"a": "die", **dict.fromkeys("bcdef", "")}
    found = list(executor.run(make_tasks(tmp_path, **payloads), Prefetching, ignore_progress))
    assert {each.task.name for each in found if isinstance(each, Succeeded)} == set("bcdef")
    assert [each.task.name for each in found if isinstance(each, Failed)] == ["a"]


@pytest.mark.slow
def test_a_task_behind_a_long_one_is_run_by_a_free_worker(
    executor: RayExecutor, tmp_path: Path
) -> None:
    payloads = {"long": "3", **dict.fromkeys("bcdefg", "")}
    found = list(executor.run(make_tasks(tmp_path, **payloads), Sleeping, ignore_progress))
    assert [each.task.name for each in found][-1] == "long"
    assert sorted(each.task.name for each in found if isinstance(each, Succeeded)) == sorted(
        payloads
    )
    assert all(count_starts(tmp_path, name) == 1 for name in payloads)


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled_is_a_failure_after_three_attempts(
    executor: RayExecutor, tmp_path: Path
) -> None:
    (found,) = executor.run(make_tasks(tmp_path, a=""), ReturnsLock, ignore_progress)
    assert isinstance(found, Failed)
    assert found.attempts == 3
    assert [status.state for status in read_statuses(tmp_path).values()] == ["failed"]


@pytest.mark.slow
def test_workers_share_a_gpu_and_have_their_own_cores(
    executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "gpus", 0.5)
    found = executor.run(make_tasks(tmp_path, a="", b=""), ListsGpus, ignore_progress)
    assert {each.result for each in found if isinstance(each, Succeeded)} == {"gpu 0"}
    assert executor.capacity() == 2
    monkeypatch.setattr(executor, "gpus", 0.1)
    assert executor.capacity() == 2, "there are two cores"
    monkeypatch.setattr(executor, "cores", lambda: 0.1)
    assert executor.capacity() == 10
    monkeypatch.setattr(executor, "gpus", 0.6)
    assert executor.capacity() == 1, "a share of one GPU is not of two"
    monkeypatch.undo()
    monkeypatch.setattr(executor, "gpus", 1.0)
    monkeypatch.setattr(executor, "reader_threads", 2)
    assert (executor.cores(), executor.capacity()) == (2, 1)


@pytest.mark.slow
def test_a_worker_larger_than_any_node_is_refused(
    executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayExecutor, "cores", lambda _: 999)
    with pytest.raises(CaprmilError, match="No node of the cluster has 999 cores"):
        list(executor.run(make_tasks(tmp_path, a=""), PayloadWorker, ignore_progress))
