"""On a cluster that loses workers, nodes and drivers, all results are bit-identical.

The cluster has two Ray nodes, both on this machine, with a worker each.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from filelock import FileLock

from caprmil import config
from caprmil.executors import Executor, JobStatus, RayExecutor
from caprmil.experiments import reproduce as protocols
from caprmil.experiments.status import read_status
from caprmil.experiments.sweep.plan import Plan
from caprmil.experiments.sweep.runner import run_sweep
from caprmil.features.extract import Extraction, SlideEncoder
from caprmil.io.leftovers import temporary_name
from caprmil.slides.slide import find_slides
from caprmil.synthetic import BenchmarkCohort, Section
from caprmil.training import cross_validation as training
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe
from executor_workers import RAY_ENVIRONMENT, Logged, equal_bags, make_extraction, run_contents

pytestmark = pytest.mark.slow
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


class TwoNodes:
    """A cluster of two nodes. The second one can be killed and started again."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {**NODE, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second: Any = None
        self.executor = RayExecutor(self.cluster.address)
        self.on_sigterm = signal.getsignal(signal.SIGTERM)
        self.executor.__enter__()

    def start_second(self) -> None:
        if self.second is None:
            self.second = self.cluster.add_node(**NODE)

    def kill_second(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = None

    def close(self) -> None:
        self.executor.__exit__()
        assert signal.getsignal(signal.SIGTERM) == self.on_sigterm  # Ray sets its own
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    """The cluster for all tests of this module. Ray takes seconds to start."""
    threads, on_sigterm = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        # A worker has as many cores as this process has threads, and a node here has one core.
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        found = TwoNodes()
        try:
            yield found
        finally:
            found.close()
            torch.set_num_threads(threads)
            signal.signal(signal.SIGTERM, on_sigterm)  # the head node sets its own


@pytest.fixture
def two(cluster: TwoNodes) -> TwoNodes:
    cluster.start_second()
    return cluster


class SlowExtraction(Extraction):
    """Encodes slowly, and logs the begin and the end of each slide."""

    def _worker_factory(self, executor: Executor) -> Callable[[], Any]:
        job = Extraction(out=self.out, encoder=self.encoder, config=self.config, batch=self.batch)
        return partial(Logged, SlideEncoder, self.out.parent / "log.txt", 0.4, job)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("slides")
    for number in range(8):
        Section(seed=number, width=1120, height=1120).write(folder / f"s{number}.tiff")
    return find_slides([folder])


def read_log(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def running_tasks(log: Path, second: str, *, on_second: bool) -> list[tuple[str, int]]:
    """Return the tasks that run on the second node, or on the first, with their processes."""
    running: dict[str, tuple[int, str]] = {}
    for event, name, pid, node in read_log(log):
        if event == "begin":
            running[name] = int(pid), node
        else:
            running.pop(name, None)
    return [(name, pid) for name, (pid, node) in running.items() if (node == second) == on_second]


def kill_worker_and_node(log: Path, cluster: TwoNodes, killed: list[str]) -> Thread:
    """Kill the worker of the first node in the middle of a task, and then the second node."""
    second_id = str(cluster.second.node_id)

    def kill() -> None:
        first, second = (
            partial(running_tasks, log, second_id, on_second=where) for where in (False, True)
        )
        wait_for(lambda: len(read_log(log)) >= 3 and bool(first()) and bool(second()))
        ((name, pid), *_) = first()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: bool(second()))
        cluster.kill_second()
        last = [task for _, task, _, node in read_log(log) if node == second_id][-2:]
        # Not finished there, or finished just before the kill, perhaps with another one begun.
        killed.extend([name, *(task for task, _ in second()), *last])

    thread = Thread(target=kill, daemon=True)
    thread.start()
    return thread


def wait_for_workers(run: Path) -> None:
    """Wait until no fold is locked: a worker may outlive its driver for some seconds."""
    for lock in (run / "folds").glob(".fold-*.lock"):
        with FileLock(lock, timeout=120):
            pass


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def check_log(log: Path, names: set[str], killed: list[str]) -> None:
    """Check that every task ended, and that only the killed ones began more than once.

    The result of a task can be lost with its node just after its end. It then ends twice.
    """
    ended = Counter(name for event, name, *_ in read_log(log) if event == "end")
    begun = Counter(name for event, name, *_ in read_log(log) if event == "begin")
    assert ended.keys() == names
    assert {name for name, times in ended.items() if times > 1} <= set(killed)
    repeated = {name for name, times in begun.items() if times > 1}
    assert repeated <= set(killed)
    assert killed


def test_an_extraction_that_loses_a_worker_and_a_node_loses_nothing(
    two: TwoNodes, slides: dict[str, Path], tmp_path: Path
) -> None:
    make_extraction(tmp_path / "plain").run(slides)
    log, killed = tmp_path / "log.txt", list[str]()
    thread = kill_worker_and_node(log, two, killed)
    records = make_extraction(tmp_path / "ray", SlowExtraction).run(slides, executor=two.executor)
    thread.join()
    assert [record.state for record in records] == ["done"] * 8
    check_log(log, set(slides), killed)
    assert equal_bags(tmp_path / "plain", tmp_path / "ray", slides)
    assert read_status(tmp_path / "ray").count() == {"done": 8}


def test_a_cross_validation_that_loses_a_worker_and_a_node_loses_nothing(
    two: TwoNodes, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(tiny_recipe, splits=replace(tiny_recipe.splits, folds=6))
    plain = cross_validate(recipe, tmp_path / "plain" / "run", device="cpu", progress=False)
    log, killed = tmp_path / "log.txt", list[str]()
    monkeypatch.setattr(training, "FoldWorker", partial(Logged, training.FoldWorker, log, 0.7))
    thread = kill_worker_and_node(log, two, killed)
    out = tmp_path / "ray" / "run"
    run = cross_validate(recipe, out, device="cpu", progress=False, executor=two.executor)
    thread.join()
    check_log(log, {f"run/{fold.name}" for fold in run.splits}, killed)
    assert run_contents(run.folder) == run_contents(plain.folder)


def test_a_driver_that_is_killed_or_interrupted_resumes(
    tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, epochs=20))
    plain = cross_validate(recipe, tmp_path / "plain" / "run", device="cpu", progress=False)
    (tmp_path / "recipe.toml").write_text(config.dump(recipe))
    out = tmp_path / "ray" / "run"
    command = [sys.executable, "-m", "caprmil", "train", str(tmp_path / "recipe.toml"), "--no-mean"]
    start = partial(
        subprocess.Popen,
        [*command, "--out", str(out), "--device", "cpu", "--ray"],
        env=os.environ | RAY_ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for how, fold in ((signal.SIGKILL, 0), (signal.SIGINT, 2)):
        with start() as process:
            checkpoint = out / f"folds/.fold-{fold}.part/last.ckpt"
            wait_for(lambda path=checkpoint: path.exists() or process.poll() is not None, 300)
            assert process.poll() is None, process.communicate()[1]
            assert read_status(out).count()["running"] >= 1
            os.kill(process.pid, how)
            output = process.communicate(timeout=60)[1]
        if how == signal.SIGINT:
            assert process.returncode == 130
            assert "Repeat the command to resume." in output
            assert "running" not in read_status(out).count()
        wait_for_workers(out)
        for path in (out / ".status").glob("*.json"):
            if status := JobStatus.read(path):  # otherwise its worker has removed it just now
                replace(status, last_heartbeat=0.0).write(path)  # as if a minute had passed
        assert not {"running", "failed"} & set(read_status(out).count())
        for part in out.glob("folds/.*.part"):
            with FileLock(part.with_suffix(".lock"), timeout=120):  # a worker may train it again
                if part.exists():  # as left by a worker that was killed while writing
                    (part / temporary_name("history.csv")).touch()
    cross_validate(recipe, out, device="cpu", progress=False)  # also without Ray
    assert run_contents(out) == run_contents(plain.folder)


def test_a_sweep_on_ray_has_the_same_results_and_a_search_has_all_its_trials(
    two: TwoNodes, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    small = replace(
        tiny_recipe,
        splits=replace(tiny_recipe.splits, folds=2),
        train=replace(tiny_recipe.train, epochs=1, warmup_epochs=0),
        loggers={},
    )
    grid = Plan(recipe=small, axes={"model.tokens": "2,4"})
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    plain = run_sweep(grid, tmp_path / "plain", **options)
    on_ray = run_sweep(grid, tmp_path / "ray", **options, executor=two.executor)
    assert [r.point for r in on_ray.points] == [r.point for r in plain.points]
    assert [r.scores for r in on_ray.points] == [r.scores for r in plain.points]
    search = replace(grid, axes={"train.lr": "1e-4..1e-2"}, search="bayes", prune=True)
    found = run_sweep(search, tmp_path / "search", trials=4, **options, executor=two.executor)
    assert len(found.points) + len(found.pruned) == 4


def test_a_reproduction_on_ray_has_the_same_table(two: TwoNodes, tmp_path: Path) -> None:
    labels = BenchmarkCohort(protocol="camelyon16").write(tmp_path / "stand-in")
    options: dict[str, Any] = {"changes": protocols.REHEARSAL, "device": "cpu", "progress": False}
    plain, on_ray = (
        protocols.reproduce(
            "camelyon16",
            labels,
            labels.parent / "features",
            ["mean"],
            tmp_path / name,
            **options,
            executor=executor,
        )
        for name, executor in (("plain", None), ("ray", two.executor))
    )
    assert on_ray.rows() == plain.rows()
    assert "to do" not in read_status(tmp_path / "ray").count()
