"""Costs: memory checked by hand, models left unchanged, tables next to the paper's figures."""

import os
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
from caprmil.experiments.cost import Cost, LiveTensors, cost_tables
from caprmil.models import MODELS, create
from caprmil.models.caprmil import CAPRMIL
from caprmil.models.mean import MeanMIL
from caprmil.runs.run import Run

pytestmark = pytest.mark.slow

MIB = 2**20


def some_cost(name: str, **changes: object) -> Cost:
    numbers = {"train_ms": 2.0, "inference_ms": 1.0, "train_peak_mib": 4.0}
    spreads = {"train_ms_spread": 0.1, "inference_ms_spread": 0.1, "inference_peak_mib": 3.0}
    sizes = {"in_dim": 1024, "n_outputs": 2, "n_patches": 1000, "device": "cpu"}
    counted = {"parameters": 314_318, "flops": 625_969_664}
    counted["flops_as_written"] = changes.get("flops", counted["flops"])  # type: ignore[assignment]
    return Cost(name=name, **(sizes | counted | numbers | spreads | changes))  # type: ignore[arg-type]


# Memory


def test_live_tensors_count_once_until_they_are_freed() -> None:
    with LiveTensors() as live:
        first = torch.zeros(1000)
        assert live.now == 4000
        second = first * 2
        view = second.view(10, 100)
        assert live.now == 8000
        del first, second
        assert live.now == 4000  # the view keeps the storage alive
        del view
    assert (live.now, live.peak) == (0, 8000)


def test_the_backward_pass_is_counted() -> None:
    weights = torch.ones(1000, requires_grad=True)
    with LiveTensors(exclude=[weights]) as live:
        loss = weights.exp().sum()  # 4000 saved for the backward pass, 4 of the sum
        assert live.now == 4004
        loss.backward()
    # In the backward pass: the saved tensor, the gradient, the sum, and the initial gradient of 1.
    assert live.peak == 4000 + 4000 + 4 + 4
    assert live.now == 4000 + 4


def test_excluded_tensors_do_not_count() -> None:
    held = torch.zeros(1000)
    with LiveTensors(exclude=[held]) as live:
        held.add_(1)
        held.view(10, 100).mul_(2)
    assert live.peak == 0


def test_the_memory_of_mean_is_as_counted_by_hand() -> None:
    patches, width = 500, 128
    measured = cost.measure(MeanMIL(64, 2), patches, repeats=1)
    layer, sums = 4 * patches * width, 3 * 4  # three running sums start as scalars
    assert measured.inference_peak_mib * MIB == 2 * layer + sums  # before and after GELU


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_agrees_with_the_resident_memory_of_the_process() -> None:
    program = """
from pathlib import Path
from caprmil.experiments.cost.measure import Bench
from caprmil.models import create
def resident():  # the peak of this process alone; getrusage includes that of its parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
Bench(create("abmil", 256, 2), 100).train_twice()  # load what torch loads once
bench = Bench(create("abmil", 256, 2), 12_000)
before = resident()
bench.train_twice()
print(resident() - before, bench.peak_mib(bench.train_twice))
"""
    # Separate pages for each tensor: otherwise the allocator keeps freed memory.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown, counted = map(float, done.stdout.split())
    assert counted > 60
    assert grown == pytest.approx(counted, rel=0.1)


def test_memory_grows_with_the_bag_and_is_reproducible() -> None:
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


def test_measuring_changes_neither_the_model_nor_the_random_state() -> None:
    model = CAPRMIL(32, 2, dim=16, heads=2).train()
    before, mode = deepcopy(model.state_dict()), model.training
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    cost.measure(model, 50, repeats=1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training is mode
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.rand(1) == expected


def test_models_are_measured_in_alternation(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    forward = MeanMIL.forward

    def recorded(self: MeanMIL, *args: object, **options: object) -> object:
        order.append(self.in_dim)
        return forward(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MeanMIL, "forward", recorded)
    steps: list[tuple[int, int]] = []
    cost.compare(
        {"a": MeanMIL(3, 2), "b": MeanMIL(4, 2)}, 10, repeats=2, progress=lambda *n: steps.append(n)
    )
    assert order[:16] == [3, 3, 4, 4, 4, 4, 3, 3] * 2  # two warm-up rounds, two that count
    assert steps[-1] == (10, 10)


def test_a_bag_without_patches_is_refused() -> None:
    with pytest.raises(ValueError, match="n_patches=0"):
        cost.measure(MeanMIL(3, 2), 0)


# Tables


def test_the_papers_figures_are_shown_only_for_its_bag_and_models() -> None:
    row = cost_tables.rows([some_cost("caprmil")])[0]
    assert row[1:5] == ["0.314", "0.314", "0.626", "0.628"]
    assert cost_tables.rows([some_cost("caprmil", n_patches=999)])[0][1:5] == [*row[1:4], "-"]
    assert cost_tables.rows([some_cost("caprmil", in_dim=512)])[0][2] == "-"
    assert cost_tables.rows([some_cost("caprmil (my-run)")])[0][2] == "-"


def test_a_figure_that_differs_from_the_papers_has_a_note() -> None:
    transmil = some_cost("transmil", parameters=2_672_146, flops=27_671_000_000)
    notes = cost_tables.notes([some_cost("caprmil"), transmil])
    (note,) = [line for line in notes if line.startswith("transmil")]
    assert "the paper has 85.02 GFLOP, torch's counter finds 27.67" in note
    assert not [line for line in notes if line.startswith("caprmil")]


def test_operations_as_written_are_those_of_the_papers_equations() -> None:
    model = CAPRMIL(1024, 2)
    projection, maps, mlp = 1024 * 128, 3 * 128 * 128, 2 * 128 * 512  # products per patch
    tokens = 3 * 8 * 16 * 4  # assignment, aggregation and context of 8 heads with 4 tokens
    per_bag = 8 * (4 * 16 * 48 + 2 * 4 * 4 * 16) + 128 * 2  # the tokens, and the classifier
    by_hand = 2 * (1000 * (projection + maps + mlp + tokens) + per_bag)
    assert cost.flops(model, as_written=True) == pytest.approx(by_hand, rel=1e-3)
    assert cost.flops(model) < 0.7 * by_hand


def test_operations_are_printed_as_written_and_as_computed() -> None:
    measured = cost.measure(CAPRMIL(1024, 2), 1000, name="caprmil", repeats=1)
    (note,) = [line for line in cost_tables.notes([measured]) if line.startswith("caprmil")]
    assert "as written 0.626, as computed 0.418 GFLOP" in note
    assert "The paper counts them as written" in note
    assert "no way of counting" not in note
    elsewhere = cost_tables.notes([replace(measured, n_patches=999)])[-1]
    assert "as computed 0.418" in elsewhere
    assert "paper" not in elsewhere


def test_a_figure_that_equals_neither_count_is_compared_with_both() -> None:
    changes = {"parameters": 2_672_146, "flops": 12_000_000_000}
    transmil = replace(some_cost("transmil", **changes), flops_as_written=27_671_000_000)
    note = cost_tables.notes([transmil])[-1]
    assert "85.02 GFLOP, as written 27.671, as computed 12.000. We found no way" in note


def test_the_parameters_of_dgrmil_differ_from_the_papers() -> None:
    dgrmil = some_cost("dgrmil", parameters=4_211_218, flops=79_880_000_000)
    (note,) = [line for line in cost_tables.notes([dgrmil]) if line.startswith("dgrmil")]
    assert note == "dgrmil: the paper has 4.34 M parameters, this model 4.211 M."


def test_rounding_has_no_note() -> None:
    ours = {"mean": 131_458, "abmil": 657_283, "caprmil+gated": 347_471}
    for name, parameters in ours.items():
        flops = round(1e9 * paper.GIGAFLOPS.get(name, 1.0))
        assert not [
            note
            for note in cost_tables.notes([some_cost(name, parameters=parameters, flops=flops)])
            if note.startswith(name)
        ]


def test_tables_have_one_row_per_model_in_every_format() -> None:
    costs = [some_cost("caprmil"), replace(some_cost("my_model"), train_ms=1 / 3)]
    assert cost_tables.as_markdown(costs).count("\n| ") == 3
    assert cost_tables.as_latex(costs).count(r" \\") == 4
    assert r"my\_model" in cost_tables.as_latex(costs)
    head, _, last = cost_tables.as_csv(costs).splitlines()
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
    result = CliRunner().invoke(app, [*words, *options], catch_exceptions=False)
    assert result.exit_code == 0
    files = {"cost.csv", "cost.md", "cost.tex", "cost.png", "performance.png", "commands.txt"}
    assert {file.name for file in (tmp_path / "o").iterdir()} == files
    assert "caprmil (run)" in (tmp_path / "o/cost.md").read_text()
    again = CliRunner().invoke(app, [*words, *options])
    assert "already exists" in str(again.exception)
