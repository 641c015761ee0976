"""The benchmark of learning: it runs on tiny input, resumes, and counts updates."""

from pathlib import Path

import pytest

import learning

BUDGET = learning.Budget(
    train_bags=8, validation_bags=4, test_bags=6, epochs=2, warmup_epochs=1, batch_size=3
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "budget_for", lambda patches: BUDGET)


def run(page: Path, ways: str) -> str:
    options = {"tasks": "rare", "ways": ways, "patches": 40, "seeds": 1, "processes": 1}
    learning.main(
        [word for n, v in options.items() for word in (f"--{n}", str(v))] + ["--out", str(page)]
    )
    return page.read_text()


def test_ways_can_be_added_and_finished_ones_are_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert "| abmil |" in run(page, "abmil")
    text = run(page, "abmil;caprmil, all but probes")
    assert "1 of 2 are already in" in capsys.readouterr().out
    assert text.count("\n| abmil |") == 2
    assert text.count("\n| caprmil, all but probes |") == 4  # also of its tokens and gradients
    assert (tmp_path / "page-40.png").stat().st_size > 5000


def test_updates_are_counted_until_the_validation_auc_is_high() -> None:
    curves = [[0.5, 0.95, 0.99], [0.5, 0.6, 0.7]]
    cell = [learning.Result("rare", 40, "abmil", 0, "", "", 0.9, c, {}, 1.0) for c in curves]
    assert [result.learnt_after for result in cell] == [2, None]
    assert BUDGET.steps == 3
    assert learning.learnt(cell, BUDGET) == "6, 1 of 2"


def test_an_unknown_way_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "page.md", "caprmil, lucky")
    assert stopped.value.code == 2
