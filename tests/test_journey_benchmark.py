"""The benchmark of whole commands attributes their time to phases, and prints tables."""

import sys
from pathlib import Path

import pytest

import journey
import packed_steps
import phases
from caprmil.runs.run import Run


def test_a_command_is_measured_by_phase(tiny_run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = ["--only", "predict-bag", "--run", str(tiny_run.folder), "--rounds", "1"]
    journey.main([*words, "--threads", "2", "--out", str(page)])
    assert not page.exists()  # a part does not replace the page
    journey.main([*words, "--page", "--out", str(page)])
    rows = [line.split("|") for line in page.read_text().splitlines() if line.startswith("| ")]
    measured = {row[1].strip(): row[2].strip() for row in rows}
    assert float(measured["`predict` of a bag"]) > float(measured["imports"]) > 0.3
    assert "forward" not in measured  # nothing is trained


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        (["caprmil/training/module.py:fit", "torch/optim/adamw.py:step"], "optimiser"),
        (["torch/optim/adamw.py:step", "caprmil/training/module.py:training_step"], "forward"),
        (["torch/optim/adamw.py:step", "torch/_tensor.py:backward"], "backward"),
        (["caprmil/cohort/cohort_bags.py:f", "caprmil/features/bags.py:read"], "checking bags"),
        (["caprmil/evaluation/baselines.py:f", "caprmil/features/bags.py:read"], "scoring"),
        (["caprmil/runs/scoring.py:f", "matplotlib/figure.py:draw"], "scoring"),
        (["caprmil/figures/style.py:save", "matplotlib/figure.py:draw"], "figures"),
        (["caprmil/runs/run.py:predict", "importlib._bootstrap:_load"], "imports"),
        (["caprmil/runs/run.py:predict"], "rest"),
    ],
)
def test_time_is_that_of_the_functions_that_run(stack: list[str], phase: str) -> None:
    found: list[str] = []
    call = lambda: found.append(phases.phase_of(sys._getframe().f_back))  # noqa: E731
    for entry in reversed(stack):  # the innermost calls `phase_of`, the others the next one
        file, _, name = entry.partition(":")
        scope = {"call": call}
        exec(compile(f"def {name}(): call()", file, "exec"), scope)
        call = scope[name]
    call()
    assert found == [phase]


def test_steps_on_packed_bags_are_compared() -> None:
    times = packed_steps.measure(patches=6, bags=2, width=8, rounds=1)
    assert list(times)[3] == "2 packed"
    assert list(times)[:2] == ["the limit", "the plain form, one bag"]
    assert all(time > 0 for time in times.values())
