"""Synthetic thumbnails: reproducible images with a consistent ground truth."""

import numpy as np
import pytest

from caprmil.errors import UnknownNameError
from caprmil.synthetic.thumbnails import CASES, thumbnail

SMALL = (160, 200)


@pytest.mark.parametrize("case", CASES)
def test_an_image_and_its_truth_are_consistent(case: str) -> None:
    made = thumbnail(case, shape=SMALL)
    assert (made.image.shape, made.image.dtype) == ((*SMALL, 3), np.uint8)
    assert made.truth.shape == made.pen.shape == SMALL
    assert made.truth.any() == ("blank" not in case)
    assert made.pen.any() == (CASES[case].ink != "")
    assert not (made.truth & made.pen).any()


def test_the_same_seed_gives_the_same_image() -> None:
    first, again, other = (thumbnail("scraps", seed, shape=SMALL) for seed in (3, 3, 4))
    assert (first.image == again.image).all()
    assert (first.truth == again.truth).all()
    assert (first.truth != other.truth).any()


def test_tissue_is_darker_than_glass() -> None:
    made = thumbnail("pale", shape=SMALL)
    assert made.image[made.truth].mean() < made.image[~made.truth].mean() - 5


def test_an_unknown_case_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"no case called 'blanc'\. Did you mean 'blank'"):
        thumbnail("blanc")
