"""Training on several devices has the loss of one device, under any launcher, and ends cleanly."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from caprmil import config
from caprmil.errors import RunError
from caprmil.features import bags
from caprmil.features.batches import Sample
from caprmil.models import MILModel, create, list_models
from caprmil.runs.history import Row
from caprmil.runs.run import Run
from caprmil.synthetic import RareSignal
from caprmil.targets import Classification
from caprmil.training import distributed as devices
from caprmil.training.cross_validation import (
    adjust_batch_size,
    cross_validate,
    cross_validate_all,
)
from caprmil.training.data import EpochSampler, Steps
from caprmil.training.distributed import ProcessGroup
from caprmil.training.module import MILModule, TrainConfig, fit
from caprmil.training.recipe import ModelConfig, Recipe

pytestmark = pytest.mark.slow

TARGET = Classification(classes=("normal", "tumour"))
STUDY = RareSignal(slides=20, width=16, patches=(10, 30), signal=0.3, stain=0.5)
SLIDES = [Sample(f"s{n}", bags.from_arrays(STUDY.bag(n)[0]), n % 2) for n in range(20)]
QUICK: dict[str, Any] = {"epochs": 3, "warmup_epochs": 1, "lr": 3e-3, "patience": 100}
RANDOM = {"bayesmil", "dtfd", "sgpmil"}  # use random numbers in training, other ones on each device
CLOSE = {"rel": 1e-5, "abs": 1e-6}


@pytest.fixture(scope="module")
def two(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    """Two processes on the CPU, for all tests: they are slow to start."""
    with ProcessGroup("cpu", 2) as group:
        yield group


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 2)
        yield patch


def train(
    folder: Path,
    group: ProcessGroup | None = None,
    *,
    n: int = 9,
    n_validation: int = 7,
    model: str = "caprmil",
    on_epoch: Any = None,
    target: Classification = TARGET,
    **settings: Any,
) -> tuple[MILModel, list[Row]]:
    """Train without dropout, which differs between devices."""
    torch.manual_seed(0)
    made = create(model, 16, 2, **({"dim": 16, "heads": 2} if model == "caprmil" else {}))
    for part in made.modules():
        if isinstance(getattr(part, "p", None), float):
            part.p = 0.0
    history = fit(
        made,
        SLIDES[:n],
        SLIDES[20 - n_validation :],
        folder=folder,
        settings=TrainConfig(**QUICK | {"batch_size": 2} | settings),
        device="cpu",
        group=group,
        on_epoch=on_epoch,
        target=target,
    )
    return made, history


def same(one: list[Row], other: list[Row]) -> bool:
    """Return whether two histories are equal, up to the order of sums."""
    return len(one) == len(other) and all(
        a == pytest.approx(b, **CLOSE) for a, b in zip(one, other, strict=True)
    )


def weights(model: MILModel) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# First, as a process is in one group at a time, and the other tests share theirs


def test_the_error_of_a_worker_process_is_raised_by_the_main_process(
    tmp_path: Path, monkeypatch_module: pytest.MonkeyPatch
) -> None:
    order = list(EpochSampler(8, seed=0))
    slides = list(SLIDES[:8])
    lost = slides[order[1]]  # the second of a step belongs to the worker process
    slides[order[1]] = Sample(lost.slide, tmp_path / "lost.h5", lost.label)
    with pytest.raises(RunError, match="lost"), ProcessGroup("cpu", 2) as group:
        fit(
            create("mean", 16, 2),
            slides,
            folder=tmp_path,
            settings=TrainConfig(**QUICK | {"batch_size": 2}),
            group=group,
            target=TARGET,
        )
    assert not torch.distributed.is_initialized()


# Which device has which bag


@pytest.mark.parametrize(
    ("n", "batch_size", "world"), [(9, 2, 2), (10, 4, 3), (5, 4, 4), (3, 1, 1)]
)
def test_every_bag_is_on_one_device_and_all_have_the_same_weight(
    n: int, batch_size: int, world: int
) -> None:
    sampler = EpochSampler(n, seed=0)
    shares = [Steps(sampler, batch_size, rank=rank, world_size=world) for rank in range(world)]
    weight = np.zeros(n)
    for rank, steps in enumerate(shares):
        assert len(list(steps)) == len(steps)
        for number, own in enumerate(steps):
            count = steps.own(number)
            assert count in (0, len(own))
            # The mean over the bags of a device, and DDP's mean over devices.
            weight[own] += steps.weight(number) / len(own) / world
            assert steps.weight(number) > 0 or count == 0, rank
    sizes = [min(batch_size, n - first) for first in range(0, n, batch_size)]
    expected = np.repeat([1 / size for size in sizes], sizes)
    assert weight[list(sampler)] == pytest.approx(expected)


def test_one_device_has_the_batches_of_the_sampler() -> None:
    sampler = EpochSampler(5, seed=1)
    order = list(sampler)
    assert list(Steps(sampler, 2)) == [order[:2], order[2:4], order[4:]]
    assert [Steps(sampler, 2).weight(step) for step in range(3)] == [1, 1, 1]


# The loss of one process


def test_two_processes_with_one_bag_equal_one_process_with_two_bags(
    tmp_path: Path, two: ProcessGroup
) -> None:
    one, single = train(tmp_path / "one")  # nine bags: in the last step one device has none
    other, together = train(tmp_path / "two", two)
    assert same(single, together)
    torch.testing.assert_close(weights(other), weights(one), rtol=1e-4, atol=1e-6)
    assert not two.running


def test_bags_have_equal_weight_if_their_number_does_not_divide_evenly(
    tmp_path: Path, two: ProcessGroup
) -> None:
    options: dict[str, Any] = {"batch_size": 3, "clip": 0.1}
    options["target"] = replace(TARGET, class_weights="balanced")
    _, single = train(tmp_path / "one", n=11, **options)  # six of one class, five of the other
    _, together = train(tmp_path / "two", two, n=11, **options)
    assert same(single, together)


def test_a_single_validation_bag_is_counted_once(tmp_path: Path, two: ProcessGroup) -> None:
    _, single = train(tmp_path / "one", n_validation=1)
    _, together = train(tmp_path / "two", two, n_validation=1)
    assert same(
        [{"val_loss": row["val_loss"]} for row in single],
        [{"val_loss": row["val_loss"]} for row in together],
    )


def test_a_bag_that_only_fills_up_a_device_is_not_scored() -> None:
    right, wrong = torch.tensor([[0.0, 9.0]]), torch.tensor([[9.0, 0.0]])
    one, two, extra = (
        (logits, torch.tensor([1]), {"loss": loss})
        for logits, loss in ((right, 1.0), (right, 3.0), (wrong, 100.0))
    )
    group = SimpleNamespace(rank=0, gather=lambda _: [[one], [two], [extra]])
    model = create("mean", 16, 2)
    module = MILModule(model, TARGET, TrainConfig(), 0, n_validation=2, group=group)  # type: ignore[arg-type]
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.on_validation_epoch_end()
    assert module.validation_row["val_loss"] == 2.0


def test_early_stopping_is_the_same_on_two_devices(tmp_path: Path, two: ProcessGroup) -> None:
    early_stopping = {
        "epochs": 30,
        "warmup_epochs": 20,
        "warmup_lr": 1e-3,
        "lr": 0.1,
        "patience": 2,
    }
    one, single = train(tmp_path / "one", **early_stopping)
    other, together = train(tmp_path / "two", two, **early_stopping)
    assert len(together) == len(single) < 30
    torch.testing.assert_close(weights(other), weights(one), rtol=1e-3, atol=1e-4)


def test_two_devices_resume_a_training_of_one(tmp_path: Path, two: ProcessGroup) -> None:
    def stop(row: Row) -> None:
        if row["epoch"] == 1:
            raise KeyboardInterrupt

    _, whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "part", on_epoch=stop)
    _, resumed = train(tmp_path / "part", two)
    assert same(whole, resumed)


def test_only_the_main_process_writes(tmp_path: Path, two: ProcessGroup) -> None:
    train(tmp_path, two)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("history.csv", "kept.ckpt", "last.ckpt", "timing.json")
    ]


def test_every_parameter_has_a_gradient_from_every_bag() -> None:
    """DDP waits for the gradients of all parameters."""
    for name in list_models():
        for label in range(3):
            model = create(name, 16, 3).train()
            output = model(torch.randn(1, 40, 16))
            torch.stack(list(model.loss(output, torch.tensor([label])).values())).sum().backward()
            assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_every_model_trains_on_two_devices_as_on_one(tmp_path: Path, two: ProcessGroup) -> None:
    for name in set(list_models()) - {"dgrmil"}:
        _, single = train(tmp_path / f"{name} alone", model=name, lr=1e-3)
        _, together = train(tmp_path / name, two, model=name, lr=1e-3)
        assert name in RANDOM or same(single, together), name
        assert all(np.isfinite(row["val_loss"]) for row in together)


# Errors


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"devices": 3}, "--devices 3 is more than this machine has: CPU cores: 2. Use 2"),
        ({"devices": 0}, "1 or more"),
        ({"nodes": 2}, "--nodes 2 needs a launcher"),
    ],
    ids=str,
)
def test_missing_devices_are_an_error(
    wrong: dict[str, int], words: str, monkeypatch_module: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=words):
        ProcessGroup("cpu", **wrong)


def test_a_single_named_device_is_an_error_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "pick_device", torch.device)
    with pytest.raises(RunError, match="cuda:1 is one device"):
        ProcessGroup("cuda:1", 2)


def test_too_few_processes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(RunError, match=r"1 processes were started.*srun --nodes=1 --ntasks-per"):
        ProcessGroup("cpu", 2)


def test_a_model_with_state_between_bags_is_an_error(
    tmp_path: Path, tiny_recipe: Recipe, two: ProcessGroup
) -> None:
    with pytest.raises(RunError, match="DGRMIL carries centres from bag to bag"):
        train(tmp_path, two, model="dgrmil")
    with pytest.raises(RunError, match="compiled"):
        train(tmp_path, two, compile=True)
    assert list(tmp_path.iterdir()) == []


# A run


def test_devices_change_only_a_batch_size_that_is_too_small(
    tiny_recipe: Recipe, two: ProcessGroup
) -> None:
    large = config.parse({"cohort": "c.csv", "train": {"batch_size": 8}}, into=Recipe)
    assert adjust_batch_size(large, two) == large
    assert adjust_batch_size(tiny_recipe, two).train.batch_size == 2
    assert config.differences(tiny_recipe, adjust_batch_size(tiny_recipe, two)) == [
        "train.batch_size: 1 -> 2"
    ]


def without_dropout(recipe: Recipe, **train: Any) -> Recipe:
    """Return the recipe without dropout."""
    settings = {**recipe.model.settings, "dropout": 0.0}
    return replace(
        recipe,
        model=ModelConfig(name=recipe.model.name, settings=settings),
        train=replace(recipe.train, **train),
    )


def scores(run: Run) -> Any:
    return pytest.approx(run.predictions.answers, **CLOSE)


def test_a_run_on_two_devices_equals_one_on_one_device(
    tmp_path: Path, tiny_recipe: Recipe, two: ProcessGroup
) -> None:
    one = cross_validate(
        without_dropout(tiny_recipe, batch_size=2), tmp_path / "one", device="cpu", progress=False
    )
    shared = adjust_batch_size(without_dropout(tiny_recipe), two)
    out = tmp_path / "two"
    other = cross_validate_all({out: shared}, device="cpu", progress=False, group=two)[out]
    assert other.predictions.answers == scores(one)
    assert other.facts.digest == one.facts.digest


# Launchers and signals


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **more}


def command(recipe: Recipe, tmp_path: Path, *options: str) -> list[str]:
    file = tmp_path / "recipe.toml"
    file.write_text(config.dump(recipe))
    train = ["-m", "caprmil", "train", str(file), "--out", str(tmp_path / "run")]
    return [*train, "--device", "cpu", "--devices", "2", "--no-mean", *options]


def test_torchrun_can_start_the_processes(tmp_path: Path, tiny_recipe: Recipe) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [sys.executable, *launcher, *command(without_dropout(tiny_recipe), tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Written to") == 1
    one = cross_validate(
        without_dropout(tiny_recipe, batch_size=2), tmp_path / "one", device="cpu", progress=False
    )
    assert Run(tmp_path / "run").predictions.answers == scores(one)


def as_slurm(rank: int, *, port: int) -> dict[str, str]:
    """Return the variables that srun sets and Lightning reads, for two tasks on one node."""
    variables = {
        "NTASKS": 2,
        "NTASKS_PER_NODE": 2,
        "NNODES": 1,
        "PROCID": rank,
        "LOCALID": rank,
        "NODEID": 0,
        "JOB_NAME": "train",
    }
    return {f"SLURM_{name}": str(value) for name, value in variables.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_processes_of_slurm_on_one_node_connect_to_each_other(
    tmp_path: Path, tiny_recipe: Recipe
) -> None:
    port = devices.find_free_network_port()
    line = command(without_dropout(tiny_recipe, batch_size=2), tmp_path)
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(
            [sys.executable, *line],
            env=environment(**as_slurm(rank, port=port)),
            **options,
        )
        for rank in range(2)
    ]
    output = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], output
    assert "Written to" in output[0][0]
    assert output[1][0] == ""
    assert Run(tmp_path / "run").finished


def children(process: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True
    )
    return [int(word) for word in found.stdout.split()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def wait_for(what: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_all_processes_end_with_the_main_one_and_the_run_resumes(
    tmp_path: Path, tiny_recipe: Recipe
) -> None:
    line = [sys.executable, *command(without_dropout(tiny_recipe), tmp_path)]
    options: dict[str, Any] = {"env": environment(), "stderr": subprocess.PIPE, "text": True}
    signals = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    for number, (how, code) in enumerate(signals.items()):
        process = subprocess.Popen(line, **options)
        wait_for((tmp_path / "run" / "folds" / f".fold-{number}.part" / "last.ckpt").exists)
        (worker,) = children(process.pid)
        process.send_signal(how)
        _, output = process.communicate(timeout=60)
        assert process.returncode == code, output
        assert "Traceback" not in output
        wait_for(lambda worker=worker: not alive(worker), seconds=20)  # type: ignore[misc]
    ended = subprocess.run(line, **options, stdout=subprocess.PIPE, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Written to") == 1
    assert "note: 2 devices take one bag each" in ended.stderr
    assert Run(tmp_path / "run").finished


def test_a_script_needs_no_main_guard(tmp_path: Path, tiny_recipe: Recipe) -> None:
    (tmp_path / "recipe.toml").write_text(config.dump(tiny_recipe))
    script = tmp_path / "script.py"
    script.write_text(
        "from caprmil import cross_validate, read_recipe\n"
        f"recipe = read_recipe({str(tmp_path / 'recipe.toml')!r})\n"
        f"run = cross_validate(recipe, {str(tmp_path / 'run')!r}, device='cpu', devices=2)\n"
        "print(run.finished)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stdout == "True\n", ended.stderr
