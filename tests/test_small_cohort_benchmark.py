"""The benchmark on sixty slides: it runs on tiny input, and repeats nothing."""

from pathlib import Path

import pytest

import small_cohort
from quick_scoring import quick_scoring

pytestmark = pytest.mark.slow


def test_the_table_has_a_row_per_recipe_and_finished_seeds_are_kept(
    tiny_cohort: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(small_cohort, "make_cohort", lambda _: tiny_cohort)
    recipes = {"mean": ("mean.toml", ("train.epochs=1",))}
    monkeypatch.setattr(small_cohort, "RECIPES", recipes)
    page = tmp_path / "page.md"
    words = ["--seeds", "1", "--processes", "1", "--out", str(page), "--work"]
    words += [str(tiny_cohort.parent)]
    with quick_scoring():
        small_cohort.main(words)
        first = page.read_text()
        assert "| mean | 1 |" in first
        small_cohort.main(words)
    assert "1 of 1 are already in" in capsys.readouterr().out
    assert page.read_text() == first
