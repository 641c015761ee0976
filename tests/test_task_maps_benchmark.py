"""The benchmark of maps on tasks with planted patches trains, measures every map, and resumes."""

from pathlib import Path

import pytest

import task_maps
from task_maps import Recipe

PLAN = task_maps.Plan(
    patches=60, explained=2, recipe=Recipe(train_bags=16, test_bags=20, epochs=4, lr=3e-3)
)


def test_a_table_has_the_mean_and_the_worst_seed_and_the_default_in_bold() -> None:
    results = [
        task_maps.Result("rare", "caprmil", seed, "x", 1.0, 2, {"sampled influence": area}, {}, {})
        for seed, area in enumerate((0.5, 1.0))
    ]
    assert "| **sampled influence** | **** | **0.75 (0.50)** |" in task_maps.table(results, "areas")


@pytest.mark.slow
def test_the_page_has_every_map_and_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task_maps, "Plan", lambda: PLAN)
    out, record = tmp_path / "page.md", tmp_path / "record.jsonl"
    options = ["--tasks", "proportion", "--seeds", "0", "--processes", "1"]
    options += ["--out", str(out), "--record", str(record)]
    task_maps.main(options)
    first = out.read_text()
    assert "python benchmarks/task_maps.py --tasks proportion --seeds 0\n" in first
    assert all(f"| {name} |" in first.replace("**", "") for name in task_maps.MAPS)
    task_maps.main(options)
    assert out.read_text() == first
    assert "1 of 1 are already in" in capsys.readouterr().out
