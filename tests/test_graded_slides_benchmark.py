"""Generated slides with grades, and the benchmark on them: it runs on tiny input."""

from pathlib import Path

import numpy as np
import pytest

import graded_slides
from caprmil.synthetic import KINDS, GradedSlides
from quick_scoring import quick_scoring

TINY = GradedSlides(slides=24, width=700, height=700, grades=3)


def test_the_grade_of_a_slide_is_the_range_of_its_share_of_tumour() -> None:
    cohort = GradedSlides(slides=12)
    edges = np.linspace(0, cohort.tumour, cohort.grades)  # of the grades above 0
    for number in range(cohort.slides):
        kinds = cohort.section(number).truth()
        share = (kinds == KINDS.index("tumour")).sum() / (kinds > 0).sum()
        expected = 0 if share == 0 else np.searchsorted(edges, share)
        assert int(cohort.label_of(number)) == expected


@pytest.mark.slow
def test_the_table_has_a_row_per_seed_and_finished_seeds_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(graded_slides, "COHORT", TINY)
    quick = (*graded_slides.CHANGES, "train.epochs=1", "train.warmup_epochs=0", "model.dim=16")
    monkeypatch.setattr(graded_slides, "CHANGES", quick)
    page = tmp_path / "page.md"
    words = ["--seeds", "1", "--out", str(page), "--work", str(tmp_path / "work")]
    with quick_scoring():
        graded_slides.main(words)
        first = page.read_text()
        assert "| quadratic kappa | 0 |" in first
        assert "| adjacent accuracy | mean |" in first
        graded_slides.main(words)
    assert "1 of 1 are already in" in capsys.readouterr().out
    assert page.read_text() == first
