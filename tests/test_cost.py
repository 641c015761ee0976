"""What costs promise: bytes one can count by hand, models left as they were, honest tables."""

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.experiments import cost, paper
from caprmil.experiments.cost import Cost, LiveTensors, tables
from caprmil.models import MODELS, create
from caprmil.models.caprmil import CAPRMIL
from caprmil.models.mean import MeanMIL
from caprmil.runs.run import Run

MIB = 2**20


def some_cost(name: str, **changes: object) -> Cost:
    numbers = {"train_ms": 2.0, "inference_ms": 1.0, "train_peak_mib": 4.0}
    spreads = {"train_ms_spread": 0.1, "inference_ms_spread": 0.1, "inference_peak_mib": 3.0}
    sizes = {"in_dim": 1024, "n_outputs": 2, "n_patches": 1000, "device": "cpu"}
    counted = {"parameters": 314_318, "flops": 625_969_664}
    return Cost(name=name, **(sizes | counted | numbers | spreads | changes))  # type: ignore[arg-type]


# Memory


def test_live_tensors_are_counted_once_and_forgotten_when_they_die() -> None:
    with LiveTensors() as live:
        first = torch.zeros(1000)
        assert live.now == 4000
        second = first * 2
        view = second.view(10, 100)
        assert live.now == 8000
        del first, second
        assert live.now == 4000  # the view keeps its storage
        del view
    assert (live.now, live.peak) == (0, 8000)


def test_a_backward_pass_is_seen() -> None:
    weights = torch.ones(1000, requires_grad=True)
    with LiveTensors(besides=[weights]) as live:
        loss = weights.exp().sum()  # 4000 kept for the way back, 4 of the sum
        assert live.now == 4004
        loss.backward()
    # On the way back: what was kept, the gradient, the sum, and the one that the way starts with.
    assert live.peak == 4000 + 4000 + 4 + 4
    assert live.now == 4000 + 4


def test_what_was_there_before_does_not_count() -> None:
    held = torch.zeros(1000)
    with LiveTensors(besides=[held]) as live:
        held.add_(1)
        held.view(10, 100).mul_(2)
    assert live.peak == 0


def test_the_memory_of_mean_is_what_one_counts_by_hand() -> None:
    patches, width = 500, 128
    measured = cost.measure(MeanMIL(64, 2), patches, repeats=1)
    layer, sums = 4 * patches * width, 3 * 4  # three running sums begin as single numbers
    assert measured.inference_peak_mib * MIB == 2 * layer + sums  # before GELU, and after


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel in Linux's way")
def test_memory_is_what_the_system_gives() -> None:
    program = """
from pathlib import Path
from caprmil.cost.measuring import Bench
from caprmil.models import create
def resident():  # the peak of this process alone; getrusage carries over that of its parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
Bench(create("abmil", 256, 2), 100).train_twice()  # torch's own, once and for all
bench = Bench(create("abmil", 256, 2), 30_000)
before = resident()
bench.train_twice()
print(resident() - before, bench.peak_mib(bench.train_twice))
"""
    # Each tensor in pages of its own: else the allocator keeps what was freed, for later.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown, counted = map(float, said.stdout.split())
    assert counted > 150
    assert grown == pytest.approx(counted, rel=0.1)


def test_memory_grows_with_the_bag_and_is_the_same_twice() -> None:
    small, again, large = (
        cost.measure(CAPRMIL(32, 2, dim=16, heads=2), n, repeats=1) for n in (100, 100, 1000)
    )
    assert (small.train_peak_mib, small.inference_peak_mib) == (
        again.train_peak_mib,
        again.inference_peak_mib,
    )
    assert 5 < large.inference_peak_mib / small.inference_peak_mib < 11
    assert small.train_peak_mib > small.inference_peak_mib


# Measuring


@pytest.mark.parametrize("name", [*sorted(MODELS), "caprmil+attention", "caprmil+abmil"])
def test_every_model_can_be_measured(name: str) -> None:
    model = create(name, 32, 2)
    measured = cost.measure(model, 50, name=name, repeats=1)
    assert measured.parameters == sum(p.numel() for p in model.parameters())
    assert measured.flops > 0
    assert min(measured.train_ms, measured.inference_ms) > 0
    assert measured.train_peak_mib > measured.inference_peak_mib > 0


def test_measuring_teaches_a_model_nothing() -> None:
    model = CAPRMIL(32, 2, dim=16, heads=2).train()
    before, mode = deepcopy(model.state_dict()), model.training
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    cost.measure(model, 50, repeats=1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training is mode
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.rand(1) == expected  # the caller's randomness is left alone too


def test_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    forward = MeanMIL.forward

    def heard(self: MeanMIL, *args: object, **options: object) -> object:
        order.append(self.in_dim)
        return forward(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MeanMIL, "forward", heard)
    told: list[tuple[int, int]] = []
    cost.compare(
        {"a": MeanMIL(3, 2), "b": MeanMIL(4, 2)}, 10, repeats=2, progress=lambda *n: told.append(n)
    )
    assert order[:16] == [3, 3, 4, 4, 4, 4, 3, 3] * 2  # two rounds to warm up, two that count
    assert told[-1] == (10, 10)


def test_a_bag_of_no_patches_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="n_patches=0"):
        cost.measure(MeanMIL(3, 2), 0)


# Tables


def test_the_papers_figures_stand_only_beside_what_they_were_made_on() -> None:
    row = tables.rows([some_cost("caprmil")])[0]
    assert row[1:5] == ["0.314", "0.314", "0.626", "0.628"]
    assert tables.rows([some_cost("caprmil", n_patches=999)])[0][1:5] == [*row[1:4], "-"]
    assert tables.rows([some_cost("caprmil", in_dim=512)])[0][2] == "-"
    assert tables.rows([some_cost("caprmil (my-run)")])[0][2] == "-"


def test_a_figure_that_does_not_come_out_is_said_to() -> None:
    transmil = some_cost("transmil", parameters=2_672_146, flops=27_671_000_000)
    said = tables.notes([some_cost("caprmil"), transmil])
    (note,) = [line for line in said if line.startswith("transmil")]
    assert "the paper has 85.02 GFLOP, torch's counter finds 27.67" in note
    assert not [line for line in said if line.startswith("caprmil")]


def test_the_weights_of_dgrmil_that_nothing_uses_are_missed() -> None:
    dgrmil = some_cost("dgrmil", parameters=4_211_218, flops=79_880_000_000)
    (note,) = [line for line in tables.notes([dgrmil]) if line.startswith("dgrmil")]
    assert note == "dgrmil: the paper has 4.34 M parameters, this model 4.211 M."


def test_small_differences_of_rounding_are_not_held_against_the_paper() -> None:
    ours = {"mean": 131_458, "abmil": 657_283, "caprmil+gated": 347_471}
    for name, parameters in ours.items():
        flops = round(1e9 * paper.GIGAFLOPS.get(name, 1.0))
        assert not [
            note
            for note in tables.notes([some_cost(name, parameters=parameters, flops=flops)])
            if note.startswith(name)
        ]


def test_tables_have_a_line_a_model_in_every_format() -> None:
    costs = [some_cost("caprmil"), replace(some_cost("my_model"), train_ms=1 / 3)]
    assert tables.as_markdown(costs).count("\n| ") == 3
    assert tables.as_latex(costs).count(r" \\") == 4
    assert r"my\_model" in tables.as_latex(costs)
    head, _, last = tables.as_csv(costs).splitlines()
    assert float(dict(zip(head.split(","), last.split(","), strict=True))["train_ms"]) == 1 / 3


# The command


def test_the_command_writes_tables_and_pictures(tiny_run: Run, tmp_path: Path) -> None:
    words = [
        "cost",
        "--models",
        "mean",
        "--run",
        str(tiny_run.folder),
        "--out",
        str(tmp_path / "o"),
    ]
    options = ["--patches", "60", "--features", "64", "--repeats", "1", "--device", "cpu"]
    said = CliRunner().invoke(app, [*words, *options], catch_exceptions=False)
    assert said.exit_code == 0
    files = {"cost.csv", "cost.md", "cost.tex", "cost.png", "performance.png"}
    assert {file.name for file in (tmp_path / "o").iterdir()} == files
    assert "caprmil (run)" in (tmp_path / "o/cost.md").read_text()
    again = CliRunner().invoke(app, [*words, *options])
    assert "already exists" in str(again.exception)
