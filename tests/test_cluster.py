"""What a cluster promises: with workers, nodes and drivers killed, the same answer to the last bit.

Two nodes of Ray, both on this machine, with a worker on each.
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

import numpy as np
import pytest
import torch

from caprmil import config
from caprmil.executors import Executor, JobStatus, RayExecutor
from caprmil.experiments import reproduce as protocols
from caprmil.experiments.status import read_status
from caprmil.experiments.sweep.plan import Plan
from caprmil.experiments.sweep.runner import run_sweep
from caprmil.features import bags
from caprmil.features.extract import Encoding, Extraction
from caprmil.features.settings import ExtractionConfig
from caprmil.runs.run import Run
from caprmil.slides.patches import PatchConfig
from caprmil.slides.slide import find_slides
from caprmil.synthetic import BenchmarkCohort, Section
from caprmil.training import cross_validation as training
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe
from executor_workers import Logged, MeanColour

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker has as many cores as this process has threads, and a node here has one core."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Two:
    """A cluster of two nodes, the second of which may be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {**NODE, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second = self.cluster.add_node(**NODE)
        self.executor = RayExecutor(self.cluster.address)
        self.executor.__enter__()

    def kill_second(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)

    def second_id(self) -> str:
        return str(self.second.node_id)

    def close(self) -> None:
        self.executor.__exit__()
        self.cluster.shutdown()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    found = Two()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayExecutor]:
    """Two workers on one node."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    executor = RayExecutor()
    options: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "log_to_driver": False,
    }
    executor.ray.init(num_cpus=2, object_store_memory=100 * 2**20, logging_level=40, **options)
    try:
        yield executor
    finally:
        executor.ray.shutdown()


class Slow(Extraction):
    """Encodes slowly, and logs what is begun and ended."""

    def _worker_factory(self, executor: Executor) -> Callable[[], Any]:
        job = Extraction(out=self.out, encoder=self.encoder, config=self.config, batch=self.batch)
        return partial(Logged, Encoding, self.out.parent / "log.txt", 0.4, job)


def extraction(out: Path, kind: type[Extraction] = Extraction) -> Extraction:
    settings = ExtractionConfig(patches=PatchConfig(px=64, mpp=2.0))
    return kind(out=out, encoder=MeanColour(), config=settings, batch=8)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("slides")
    for number in range(8):
        Section(seed=number, width=2016, height=2016).write(folder / f"s{number}.tiff")
    return find_slides([folder])


def same_bags(one: Path, two: Path, slides: dict[str, Path]) -> bool:
    pairs = [(bags.read(one / f"{name}.h5"), bags.read(two / f"{name}.h5")) for name in slides]
    return all(
        np.array_equal(a.features, b.features)
        and np.array_equal(np.asarray(a.coords), np.asarray(b.coords))
        for a, b in pairs
    )


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run but its logs and pictures, which hold the time of day."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and "log" not in f.parts]
    return {
        str(file.relative_to(folder)): b"" if file.suffix == ".png" else file.read_bytes()
        for file in files
    }


def logged(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def open_units(path: Path, second: str, *, on_second: bool) -> list[tuple[str, int]]:
    """Return the units in work on the second node, or on the other, with their processes."""
    at_work: dict[str, tuple[int, str]] = {}
    for word, name, pid, node in logged(path):
        if word == "begin":
            at_work[name] = int(pid), node
        else:
            at_work.pop(name, None)
    return [(name, pid) for name, (pid, node) in at_work.items() if (node == second) == on_second]


def harm(log: Path, two: Two, killed: list[str]) -> Thread:
    """Kill the worker of the first node when it has begun a unit, and then the second node."""

    def strike() -> None:
        first, second = (
            partial(open_units, log, two.second_id(), on_second=where) for where in (False, True)
        )
        wait_for(lambda: len(logged(log)) >= 3 and bool(first()) and bool(second()))
        ((name, pid), *_) = first()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: bool(second()))
        killed.extend([name, *(unit for unit, _ in second())])
        two.kill_second()

    thread = Thread(target=strike, daemon=True)
    thread.start()
    return thread


def wait_for(true: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def check_log(log: Path, names: set[str], killed: list[str]) -> None:
    """See that every unit was ended once, and only what was killed was begun again."""
    ended = Counter(name for word, name, *_ in logged(log) if word == "end")
    begun = Counter(name for word, name, *_ in logged(log) if word == "begin")
    assert ended == dict.fromkeys(names, 1)
    again = {name for name, times in begun.items() if times > 1}
    assert again <= set(killed)
    assert len(killed) == 2


def test_slides_and_folds_on_ray_are_the_same_to_the_last_bit(
    one: RayExecutor, slides: dict[str, Path], tiny_recipe: Recipe, tiny_run: Run, tmp_path: Path
) -> None:
    few = dict(list(slides.items())[:3])
    extraction(tmp_path / "plain").run(few)
    records = extraction(tmp_path / "ray").run(few, executor=one)
    assert [record.state for record in records] == ["done"] * 3
    assert same_bags(tmp_path / "plain", tmp_path / "ray", few)
    run = cross_validate(tiny_recipe, tmp_path / "run", device="cpu", progress=False, executor=one)
    assert contents(run.folder) == contents(tiny_run.folder)
    assert read_status(run.folder).count() == {"done": 4}


@pytest.mark.slow
def test_an_encode_that_loses_a_worker_and_a_node_loses_nothing(
    two: Two, slides: dict[str, Path], tmp_path: Path
) -> None:
    extraction(tmp_path / "plain").run(slides)
    log, killed = tmp_path / "log.txt", list[str]()
    thread = harm(log, two, killed)
    records = extraction(tmp_path / "ray", Slow).run(slides, executor=two.executor)
    thread.join()
    assert [record.state for record in records] == ["done"] * 8
    check_log(log, set(slides), killed)
    assert same_bags(tmp_path / "plain", tmp_path / "ray", slides)
    assert read_status(tmp_path / "ray").count() == {"done": 8}


@pytest.mark.slow
def test_a_cross_validation_that_loses_a_worker_and_a_node_loses_nothing(
    two: Two, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(tiny_recipe, splits=replace(tiny_recipe.splits, folds=6))
    plain = cross_validate(recipe, tmp_path / "plain" / "run", device="cpu", progress=False)
    log, killed = tmp_path / "log.txt", list[str]()
    monkeypatch.setattr(training, "Folds", partial(Logged, training.Folds, log, 0.7))
    thread = harm(log, two, killed)
    out = tmp_path / "ray" / "run"
    run = cross_validate(recipe, out, device="cpu", progress=False, executor=two.executor)
    thread.join()
    check_log(log, {f"run/{fold.name}" for fold in run.splits}, killed)
    assert contents(run.folder) == contents(plain.folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "stopped"])
def test_a_driver_that_is_killed_or_stopped_goes_on(
    tiny_recipe: Recipe, tmp_path: Path, how: signal.Signals
) -> None:
    recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, epochs=20))
    plain = cross_validate(recipe, tmp_path / "plain" / "run", device="cpu", progress=False)
    (tmp_path / "recipe.toml").write_text(config.dump(recipe))
    out = tmp_path / "ray" / "run"
    words = ["train", str(tmp_path / "recipe.toml"), "--out", str(out), "--device", "cpu", "--ray"]
    start = partial(
        subprocess.Popen, [sys.executable, "-m", "caprmil", *words], env=os.environ | QUIET,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with start() as process:
        wait_for(lambda: (out / "folds/.fold-0.part/last.ckpt").exists())
        assert read_status(out).count()["running"] >= 1
        os.kill(process.pid, how)
        said = process.communicate(timeout=60)[1]
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "The same command goes on from here." in said
        assert "running" not in read_status(out).count()
    for path in (out / ".status").glob("*.json"):
        replace(JobStatus.read(path), last_heartbeat=0.0).write(path)  # as if a minute had passed
    assert not {"running", "failed"} & set(read_status(out).count())
    with start() as process:
        assert process.wait(timeout=240) == 0
    assert contents(out) == contents(plain.folder)


@pytest.mark.slow
def test_a_sweep_on_ray_is_the_same_and_a_search_has_as_many_trials(
    one: RayExecutor, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    small = replace(
        tiny_recipe, splits=replace(tiny_recipe.splits, folds=2), train=replace(
            tiny_recipe.train, epochs=2), loggers={},
    )  # fmt: skip
    grid = Plan(recipe=small, axes={"model.tokens": "2,4,8"})
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    plain = run_sweep(grid, tmp_path / "plain", **options)
    on_ray = run_sweep(grid, tmp_path / "ray", **options, executor=one)
    assert [r.point for r in on_ray.points] == [r.point for r in plain.points]
    assert [r.scores for r in on_ray.points] == [r.scores for r in plain.points]
    search = replace(grid, axes={"train.lr": "1e-4..1e-2"}, search="bayes", prune=True)
    first = run_sweep(search, tmp_path / "search", trials=3, **options, executor=one)
    more = run_sweep(search, tmp_path / "search", trials=5, **options, executor=one)
    assert [r.point for r in more.points][:3] == [r.point for r in first.points]
    assert len(more.points) + len(more.pruned) == 5


@pytest.mark.slow
def test_a_reproduction_on_ray_has_the_same_table(one: RayExecutor, tmp_path: Path) -> None:
    labels = BenchmarkCohort(protocol="camelyon16").write(tmp_path / "stand-in")
    options: dict[str, Any] = {"changes": protocols.REHEARSAL, "device": "cpu", "progress": False}
    plain, on_ray = (
        protocols.reproduce(
            "camelyon16",
            labels,
            labels.parent / "features",
            ["mean", "abmil"],
            tmp_path / name,
            **options,
            executor=executor,
        )
        for name, executor in (("plain", None), ("ray", one))
    )
    assert on_ray.rows() == plain.rows()
    assert "to do" not in read_status(tmp_path / "ray").count()
