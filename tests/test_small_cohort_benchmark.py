"""The benchmark on sixty slides: it runs on tiny input, and repeats nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

import small_cohort
from caprmil.synthetic import SlideCohort
from quick_scoring import quick_scoring

pytestmark = pytest.mark.slow


def test_the_table_has_a_row_per_recipe_and_finished_seeds_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slides = SlideCohort(slides=12, width=1120, height=1120, tumour=0.3)
    monkeypatch.setattr(small_cohort, "FULL", replace(small_cohort.FULL, cohort=slides))
    recipes = {"mean": ("mean.toml", ("train.epochs=1",))}
    monkeypatch.setattr(small_cohort, "RECIPES", recipes)
    page = tmp_path / "page.md"
    words = ["--seeds", "1", "--processes", "1", "--out", str(page), "--work", str(tmp_path)]
    with quick_scoring():
        small_cohort.main(words)
        first = page.read_text()
        assert "| mean | 1 |" in first
        small_cohort.main(words)
    assert "1 of 1 are already in" in capsys.readouterr().out
    assert page.read_text() == first
