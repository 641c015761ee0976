"""Synthetic bags with a rare signal: reproducible, with the requested share of tumour."""

from pathlib import Path

import numpy as np
import pytest

from caprmil.cohort.cohort import load_cohort
from caprmil.errors import CaprmilError, CohortError
from caprmil.features import bags
from caprmil.synthetic import RareSignal

SMALL = RareSignal(slides=6, width=32, patches=(100, 200), signal=0.05)


def test_a_slide_is_the_same_every_time() -> None:
    for one, other in zip(SMALL.bag(3), RareSignal(**vars(SMALL)).bag(3), strict=True):
        assert np.array_equal(one, other)


def test_slides_and_seeds_differ() -> None:
    other = RareSignal(**{**vars(SMALL), "seed": 1})
    first = [study.bag(n)[0][0, 0] for study in (SMALL, other) for n in (0, 1)]
    assert len(set(first)) == 4


@pytest.mark.parametrize("number", range(6))
def test_every_second_slide_has_its_share_of_tumour(number: int) -> None:
    features, coords, tumour = SMALL.bag(number)
    assert tumour.sum() == (round(0.05 * len(features)) if number % 2 else 0)
    assert 100 <= len(features) == len(coords) < 200


def test_the_rarest_tumour_is_one_patch() -> None:
    assert RareSignal(**{**vars(SMALL), "signal": 0.0001}).bag(1)[2].sum() == 1


def test_tumour_patches_are_neighbours() -> None:
    _, coords, tumour = RareSignal(patches=(2500, 2501)).bag(1)
    spread = [np.ptp(coords[which], axis=0).max() for which in (tumour, ~tumour)]
    assert spread[0] < spread[1] / 3


def test_tumour_is_shifted_along_one_direction() -> None:
    plain, signal = (RareSignal(**{**vars(SMALL), "strength": s}).bag(1) for s in (0.0, 10.0))
    shift = signal[0] - plain[0]
    assert np.allclose(shift[~signal[2]], 0)
    assert np.allclose(np.linalg.norm(shift[signal[2]], axis=1), 10, rtol=1e-4)


def test_a_written_cohort_has_the_generated_content(tmp_path: Path) -> None:
    cohort, _ = load_cohort(SMALL.write(tmp_path), tmp_path / "features")
    assert cohort.target.classes == ("normal", "tumour")
    assert [entry.label for entry in cohort.entries] == [0, 1, 0, 1, 0, 1]
    stored = bags.read(cohort["slide_003"].path).features
    assert np.allclose(stored, SMALL.bag(3)[0], atol=0.01)  # stored as float16


def test_existing_bags_are_not_written_again(tmp_path: Path) -> None:
    table = SMALL.write(tmp_path)
    files = sorted((tmp_path / "features").iterdir())
    files[0].unlink()
    before = [file.stat().st_mtime_ns for file in files[1:]]
    assert SMALL.write(tmp_path) == table
    assert files[0].exists()
    assert [file.stat().st_mtime_ns for file in files[1:]] == before


def test_a_folder_with_another_cohort_or_table_is_not_changed(tmp_path: Path) -> None:
    study = RareSignal(slides=4, width=8, patches=(3, 5))
    table = study.write(tmp_path)
    with pytest.raises(CohortError, match="another cohort"):
        RareSignal(slides=4, width=8, patches=(3, 5), seed=1).write(tmp_path)
    table.write_text("mine")
    with pytest.raises(CaprmilError, match="already exists"):
        study.write(tmp_path)
    assert table.read_text() == "mine"
