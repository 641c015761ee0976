"""Tiles: the pixels of the slide, read from the right level."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from caprmil.slides.slide import Slide
from caprmil.viewer import tiles
from caprmil.viewer.tiles import Pyramid, is_joined, tile
from viewer_requests import rounded_down, rounded_up, texture

TILE = 64  # with small tiles, small slides have many


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", TILE)
        yield


@pytest.fixture(scope="module", params=[rounded_down, rounded_up])
def pyramidal(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Slide]:
    path = tmp_path_factory.mktemp("pyramid") / "odd.tiff"
    with Slide(request.param(path, texture(461, 309)), mpp=0.25) as slide:
        yield slide


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slide]:
    """An image without levels."""
    path = tmp_path_factory.mktemp("plain") / "plain.png"
    Image.fromarray(texture(750, 625)).save(path, compress_level=1)
    with Slide(path, mpp=0.25) as slide:
        yield slide


def test_a_tile_is_read_from_the_coarsest_level_that_is_fine_enough(
    pyramidal: Slide, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    block = pyramidal.block
    monkeypatch.setattr(
        pyramidal, "block", lambda level, *area: (read.append(level), block(level, *area))[1]
    )
    pyramid = Pyramid(*pyramidal.size)
    for zoom in range(pyramid.top + 1):
        tile(pyramidal, zoom, 0, 0)
    # Level n is 2 ** n times as coarse, however its size was rounded.
    last = len(pyramidal.levels) - 1
    assert last >= 2
    assert read == [min(pyramid.top - zoom, last) for zoom in range(pyramid.top + 1)]


def test_a_tile_has_the_pixels_of_the_slide(pyramidal: Slide) -> None:
    pyramid = Pyramid(*pyramidal.size)
    for zoom, x, y in [(pyramid.top, 2, 1), (pyramid.top - 1, 1, 0), (0, 0, 0)]:
        side = TILE * pyramid.scale(zoom)
        expected = pyramidal.read(x * side, y * side, side, TILE)
        wide, high = pyramid.size(zoom, x, y)
        np.testing.assert_array_equal(tile(pyramidal, zoom, x, y), expected[:high, :wide])


def whole(slide: Slide, zoom: int) -> Any:
    across, down = Pyramid(*slide.size).counts(zoom)
    rows = [[tile(slide, zoom, x, y) for x in range(across)] for y in range(down)]
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def check_seams(slide: Slide, up: int) -> None:
    pyramid = Pyramid(*slide.size)
    zoom = max(0, pyramid.top - up)
    scale = pyramid.scale(zoom)
    image = whole(slide, zoom)
    assert image.shape[:2] == tuple(-(-side // scale) for side in slide.size[::-1])
    y, x = (np.arange(n - 1) for n in image.shape[:2])
    middle = (scale - 1) // 2
    expected = texture(*slide.size)[y[:, None] * scale + middle, x * scale + middle].astype(float)
    error = np.abs(image[: len(y), : len(x)] - expected)
    assert error.mean() < 9  # a few pixels of waves that are hundreds of pixels long
    if image.shape[1] > TILE + 2:  # the error next to a seam is not larger
        assert error[:, TILE - 2 : TILE + 2].mean() < error.mean() + 3


@pytest.mark.parametrize("up", [0, 1, 2, 3])
def test_tiles_join_without_seams(pyramidal: Slide, up: int) -> None:
    check_seams(pyramidal, up)


@pytest.mark.parametrize("up", [2, 3, 4])
def test_joined_tiles_have_no_seams(plain: Slide, up: int) -> None:
    check_seams(plain, up)


def test_a_tile_of_a_slide_without_levels_is_joined_from_the_next_zoom(plain: Slide) -> None:
    assert [is_joined(plain, 2**n) for n in range(5)] == [False, False, False, True, True]
    pyramid = Pyramid(*plain.size)
    children = [tile(plain, 1, x, y) for y in (0, 1) for x in (0, 1)]
    calls: list[tuple[int, ...]] = []

    def child(*address: int) -> Any:
        calls.append(address)
        return children[2 * address[2] + address[1]]

    assert tile(plain, 0, 0, 0, child=child).shape[:2] == pyramid.size(0, 0, 0)[::-1]
    assert calls == [(1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)]


@given(width=st.integers(1, 300_000), height=st.integers(1, 300_000))
def test_tiles_cover_a_slide_of_any_size(width: int, height: int) -> None:
    pyramid = Pyramid(width, height)
    assert pyramid.counts(0) == (1, 1)
    assert pyramid.scale(pyramid.top) == 1
    for zoom in range(pyramid.top + 1):
        across, down = pyramid.counts(zoom)
        wide, high = pyramid.size(zoom, across - 1, down - 1)
        assert 1 <= wide <= TILE
        assert 1 <= high <= TILE
        assert not pyramid.has(zoom, across, 0)
        assert not pyramid.has(zoom, 0, down)
