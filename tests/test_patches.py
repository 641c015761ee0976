"""The patch grid: squares, sizes and order; and their pixels."""

from pathlib import Path

import numpy as np
import pytest
import pyvips
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from caprmil.errors import RecipeError, SlideError
from caprmil.slides import patches
from caprmil.slides.patches import PatchConfig, _grid_means, cover, lay_grid, read, side_level0
from caprmil.slides.slide import Slide


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Slide:
    """A slide of 1500 x 1000 px whose red and green are x and y, in units of 8 px."""
    y, x = np.mgrid[:1000, :1500]
    image = np.stack([x // 8, y // 8, np.full_like(x, 128)], axis=2).astype(np.uint8)
    path = tmp_path_factory.mktemp("slides") / "ramp.tiff"
    tags = {"xres": 2000, "yres": 2000, "resunit": "cm"}  # per mm: 0.5 um/px
    pyvips.Image.new_from_array(image).tiffsave(str(path), tile=True, pyramid=True, **tags)
    return Slide(path)


def everywhere(slide: Slide, scale: float = 10) -> NDArray[np.bool_]:
    width, height = slide.size
    return np.ones((round(height / scale), round(width / scale)), dtype=bool)


def scaled(slide: Slide, mpp: float) -> Slide:
    return Slide(slide.path, mpp=mpp)


def test_patches_are_in_row_major_order_and_do_not_overlap(slide: Slide) -> None:
    grid = lay_grid(slide, everywhere(slide), 10, PatchConfig(px=100, mpp=1.0, min_tissue=0))
    assert grid.coords[:3].tolist() == [[0, 0], [200, 0], [400, 0]]
    assert grid.coords.tolist() == sorted(grid.coords.tolist(), key=lambda xy: (xy[1], xy[0]))
    assert (grid.side, grid.step) == (200, 200)


def test_the_overlap_is_in_pixels_of_the_patch(slide: Slide) -> None:
    config = PatchConfig(px=100, mpp=1.0, overlap=25, min_tissue=0)
    grid = lay_grid(slide, everywhere(slide), 10, config)
    assert (grid.side, grid.step) == (200, 150)


def test_fractional_steps_do_not_drift(slide: Slide) -> None:
    odd = scaled(slide, 0.2527)
    grid = lay_grid(odd, everywhere(odd), 10, PatchConfig(px=24, mpp=0.5, min_tissue=0))
    step = 24 * 0.5 / 0.2527
    columns = np.unique(grid.coords[:, 0])
    assert grid.step == pytest.approx(step)
    assert np.abs(columns - step * np.arange(len(columns))).max() <= 0.5


def test_only_squares_with_enough_tissue_are_kept(slide: Slide) -> None:
    mask = np.zeros((100, 150), dtype=bool)  # 10 px per mask pixel
    mask[:, :40] = True  # to x = 400
    for least, columns in [(0.25, {0, 300}), (0.5, {0}), (0.0, {0, 300})]:
        config = PatchConfig(px=300, mpp=0.5, min_tissue=least)
        assert set(lay_grid(slide, mask, 10, config).coords[:, 0].tolist()) == columns


def test_the_area_outside_the_slide_counts_as_no_tissue(slide: Slide) -> None:
    grid = lay_grid(slide, everywhere(slide), 10, PatchConfig(px=400, mpp=0.5, min_tissue=0))
    corner = grid.tissue[(grid.coords == [1200, 800]).all(axis=1)]
    assert corner == pytest.approx((300 / 400) * (200 / 400))


@pytest.mark.parametrize(("side", "columns", "rows"), [(200, 8, 5), (449, 4, 3), (740, 2, 2)])
def test_patches_of_a_whole_picture_cover_it_to_its_edges_and_stay_inside(
    slide: Slide, side: int, columns: int, rows: int
) -> None:
    grid = cover(slide, everywhere(slide), 10, PatchConfig(px=side, mpp=0.5, min_tissue=1))
    covered = np.zeros((1000, 1500), bool)
    for x, y in grid.coords.tolist():
        assert 0 <= x <= 1500 - side
        assert 0 <= y <= 1000 - side
        covered[y : y + side, x : x + side] = True
    missed = np.argwhere(~covered)
    assert len(missed) == 0 or side == 740  # 20 px of 1500 remain: less than a tenth of a patch
    assert len(grid) == columns * rows
    assert len(set(map(tuple, np.rint(grid.coords / grid.step).tolist()))) == len(grid)


def test_a_picture_that_is_smaller_than_a_patch_is_one_patch(slide: Slide) -> None:
    grid = cover(slide, everywhere(slide), 10, PatchConfig(px=2000, mpp=0.5))
    assert (grid.coords.tolist(), grid.side) == ([[0, 0]], 2000)


def test_no_tissue_gives_no_patches(slide: Slide) -> None:
    nothing = np.zeros((100, 150), dtype=bool)
    assert len(lay_grid(slide, nothing, 10, PatchConfig(min_tissue=0))) == 0
    assert list(read(slide, lay_grid(slide, nothing, 10, PatchConfig()))) == []


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 99), side=st.floats(0.4, 5), x=st.floats(0, 11), y=st.floats(0, 8))
def test_tissue_shares_equal_a_count_on_a_finer_grid(
    seed: int, side: float, x: float, y: float
) -> None:
    mask = np.random.default_rng(seed).random((8, 11)) < 0.4
    fine = 200
    counted = 0.0
    xs, ys = (np.floor(s + (np.arange(fine) + 0.5) * side / fine).astype(int) for s in (x, y))
    for row in ys[ys < 8]:
        counted += mask[row, xs[xs < 11]].sum()
    exact = _grid_means(mask, np.array([x]), np.array([y]), side)[0, 0]
    assert exact == pytest.approx(counted / fine**2, abs=0.02)


@pytest.mark.parametrize(
    ("mpp", "magnification", "real"),
    [  # microns per pixel of "20x" and "10x" patches by the nominal rule
        (0.2277, 20, 0.455),
        (0.263, 20, 0.526),
        (0.299, 20, 0.598),
        (0.301, 20, 0.301),
        (0.243, 10, 0.972),
    ],
)
def test_the_nominal_rule_is_the_rule_of_trident(
    slide: Slide, mpp: float, magnification: int, real: float
) -> None:
    config = PatchConfig(mpp=10 / magnification, scale_rule="nominal")
    side = side_level0(config, scaled(slide, mpp))
    assert side == round(side)
    assert side * mpp / 224 == pytest.approx(real, abs=0.001)


def test_the_exact_rule_gives_exact_microns_per_pixel(slide: Slide) -> None:
    for mpp in (0.2277, 0.243, 0.263, 0.299, 0.301):
        side = side_level0(PatchConfig(mpp=0.5), scaled(slide, mpp))
        assert side * mpp / 224 == pytest.approx(0.5)


def test_a_coarse_slide_is_not_upsampled(slide: Slide) -> None:
    with pytest.raises(
        SlideError, match=r"has 0.5 um/px, which is too coarse for patches of 0.25 um/px.*--mpp"
    ):
        lay_grid(slide, everywhere(slide), 10, PatchConfig(mpp=0.25))


def test_the_nominal_rule_refuses_slides_beyond_its_buckets(slide: Slide) -> None:
    with pytest.raises(SlideError, match="Use the exact scale rule"):
        side_level0(PatchConfig(mpp=4.0, scale_rule="nominal"), scaled(slide, 3.0))


@pytest.mark.parametrize(
    "wrong",
    [{"px": 0}, {"overlap": 224}, {"mpp": 900.0}, {"min_tissue": 1.5}, {"scale_rule": "about"}],
)
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RecipeError):
        PatchConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("mpp", [0.5, 1.0, 1.3])
def test_pixels_match_the_coordinates_in_order(slide: Slide, mpp: float) -> None:
    grid = lay_grid(slide, everywhere(slide), 10, PatchConfig(px=32, mpp=mpp, min_tissue=1))
    pixels = np.concatenate(list(read(slide, grid, batch=7, workers=3)))
    assert pixels.shape == (len(grid), 32, 32, 3)
    centres = (grid.coords + grid.side / 2) / 8 - 0.5  # values of the ramp at the centre
    assert np.abs(pixels[..., :2].mean((1, 2)) - centres).max() < 0.6


def test_prefetching_is_bounded(slide: Slide, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = lay_grid(slide, everywhere(slide), 10, PatchConfig(px=16, mpp=0.5, min_tissue=0))
    count = 0
    plain = Slide.read

    def counted(self: Slide, x: float, y: float, side: float, px: int) -> object:
        nonlocal count
        count += 1
        return plain(self, x, y, side, px)

    monkeypatch.setattr(Slide, "read", counted)
    stream = patches.read(slide, grid, batch=4, workers=2)
    next(stream)
    stream.close()
    assert count <= 4 * (2 + 2)
    assert len(grid) > 1000


def test_a_damaged_tile_is_an_error_while_reading_patches(slide: Slide, tmp_path: Path) -> None:
    path = tmp_path / "broken.tiff"
    noise = np.random.default_rng(0).integers(0, 255, (2000, 2000, 3), dtype=np.uint8)
    image = pyvips.Image.new_from_array(noise)
    image.tiffsave(str(path), tile=True, compression="jpeg", xres=1000, yres=1000)
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = bytes(third)
    path.write_bytes(content)
    broken = Slide(path)
    grid = lay_grid(broken, everywhere(broken), 10, PatchConfig(px=64, mpp=1.0, min_tissue=0))
    with pytest.raises(SlideError, match=r"broken.tiff cannot be read.*Copy it again"):
        list(read(broken, grid))
