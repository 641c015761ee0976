"""The hard benchmark of bags: a page and a figure, runs that are resumed, a rule to stop."""

from pathlib import Path
from typing import Any

import pytest

import hard_tasks
from caprmil.models import list_models
from task_models import StopRule


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = hard_tasks.Budget(
        train_bags=8, validation_bags=4, test_bags=6, epochs=3, warmup_epochs=1
    )
    monkeypatch.setattr(hard_tasks, "budget_for", lambda patches: budget)
    monkeypatch.setattr(hard_tasks, "SIZES", (20, 40))
    monkeypatch.setattr(hard_tasks, "SMALLEST", 20)
    monkeypatch.setattr(hard_tasks, "RATES", (1e-3, 3e-3))
    monkeypatch.setattr(hard_tasks, "TUNING_TASKS", ("rare",))


def run(folder: Path, **changes: Any) -> str:
    options = {
        "ways": "mean", "sizes": "20,40", "tasks": "rare,proportion", "seeds": 2, "processes": 1
    }  # fmt: skip
    arguments = ["--out", str(folder / "page.md")]
    for name, value in (options | changes).items():
        arguments += [f"--{name}", str(value)]
    hard_tasks.main(arguments)
    return (folder / "page.md").read_text()


def test_the_page_has_tables_the_command_the_rates_and_a_figure(tmp_path: Path) -> None:
    page = run(tmp_path)
    assert "python benchmarks/hard_tasks.py\n" in page
    assert "train_bags = 240\n" in page
    assert "![AUC of every model on every task](page.png)" in page
    assert page.count("| (oracle) |") == 2
    assert page.count("\n| mean |") == 5  # scores and updates of two sizes, and learning rates
    assert (tmp_path / "page.png").stat().st_size > 5000


def test_a_run_that_was_stopped_is_resumed_and_other_models_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(tmp_path)
    record = tmp_path / "page.jsonl"
    lines = record.read_text().splitlines()
    assert len(lines) == 2 + 16  # two rates; two seeds of two tasks and sizes, mean and oracle
    record.write_text("\n".join(lines[:6]) + "\n")
    assert run(tmp_path).split("### ")[1:] == first.split("### ")[1:]
    assert "4 of 16 are already in" in capsys.readouterr().out
    both = run(tmp_path, ways="abmil", sizes="20", tasks="rare", seeds=1)
    assert both.count("\n| mean |") == 5
    assert both.count("\n| abmil |") == 3


def test_the_learning_rate_with_the_best_validation_auc_is_chosen() -> None:
    def result(lr: float, validation: float, updates: int) -> hard_tasks.Result:
        job = hard_tasks.make_job("rare", 20, "mean", 100, lr)
        return hard_tasks.Result(*job, "", 0.5, validation, updates, 1.0)

    tried = [result(1e-4, 0.8, 60), result(1e-3, 0.9, 90), result(1e-2, 0.9, 60)]
    assert hard_tasks.chosen_rates(tried) == {"mean": 1e-2}
    assert hard_tasks.chosen_rates(tried[:2]) == {"mean": 1e-3}


def test_a_training_ends_when_its_curve_is_flat_or_its_task_is_solved() -> None:
    rule = StopRule(patience=4)
    assert not rule.ends([0.5, 0.6, 0.7, 0.8, 0.9])
    assert rule.ends([0.5, 0.5, 0.5, 0.5, 0.5])
    assert not rule.ends([0.5, 0.5, 0.5, 0.5, 0.6])
    assert rule.ends([0.7, 1.0, 1.0, 1.0])


def test_an_unknown_name_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, ways="abmill")
    assert "Did you mean 'abmil'" in capsys.readouterr().err


def test_every_model_is_in_the_benchmark() -> None:
    assert set(list_models()) <= set(hard_tasks.WAYS)
