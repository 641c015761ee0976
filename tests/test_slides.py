"""Reading slides: exact field of view, white outside, and errors for damaged files."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openslide
import pytest
import pyvips
import tifffile
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from caprmil.errors import SlideError
from caprmil.slides import readers
from caprmil.slides import slide as slides
from caprmil.slides.readers import Pixels, SlideFile
from caprmil.slides.slide import Slide, exact_downsample, find_slides

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("CAPRMIL_DATA", ROOT.parent / "shared" / "data")) / "slides"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real slides are not available")
both_readers = pytest.mark.parametrize("fast", [True, False], ids=["libvips", "openslide"])

APERIO = "Aperio Image Library v12.0.15 \r\n{} (256x256) JPEG/RGB Q=70|AppMag = 40|MPP = 0.2500"


def texture(width: int, height: int, seed: int = 0) -> Pixels:
    """Return waves with some noise: unique at every position, and preserved by JPEG."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 17) + np.sin(y / 31), np.cos(y / 19), np.sin((x + y) / 23)]
    noise = np.random.default_rng(seed).normal(0, 4, (height, width, 3))
    return (128 + 45 * np.stack(waves, axis=-1) + noise).clip(0, 255).astype(np.uint8)


def coordinates(width: int, height: int) -> Pixels:
    """Return an image whose pixels encode their position."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x % 256, y % 256, 16 * (x // 256) + y // 256], axis=-1).astype(np.uint8)


def position(pixel: NDArray[Any]) -> tuple[int, int]:
    """Return the position that a pixel of `coordinates` encodes."""
    red, green, blue = map(int, pixel)
    return red + 256 * (blue // 16), green + 256 * (blue % 16)


def rounded_up(path: Path, image: Pixels, levels: int = 4, **options: Any) -> Path:
    """Write a pyramid of every second pixel, with level sizes rounded up."""
    first = {"resolution": (40000, 40000), "resolutionunit": "CENTIMETER", **options}
    first = {"photometric": "rgb", "tile": (256, 256), "metadata": None, **first}
    with tifffile.TiffWriter(path) as file:
        for level in range(levels):
            step = 2**level
            small = np.ascontiguousarray(image[::step, ::step])
            file.write(small, subfiletype=int(level > 0), **first)
    return path


def rounded_down(path: Path, image: Pixels, *, mpp: float = 0.25, **options: Any) -> Path:
    """Write a pyramid of means of four pixels, with level sizes rounded down, by libvips."""
    whole = pyvips.Image.new_from_array(image).copy(xres=1000 / mpp, yres=1000 / mpp)
    layout = {"tile": True, "tile_width": 128, "tile_height": 128, "pyramid": True}
    whole.tiffsave(str(path), **{**layout, "compression": "none", **options})
    return path


Write = Callable[..., Path]
both_roundings = pytest.mark.parametrize("write", [rounded_up, rounded_down])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slides")


@pytest.fixture(scope="module")
def up(folder: Path) -> Path:
    return rounded_up(folder / "up.tif", texture(1001, 801), compression="jpeg")


@pytest.fixture(scope="module")
def down(folder: Path) -> Path:
    return rounded_down(folder / "down.tif", texture(1001, 801), compression="jpeg", Q=90)


@pytest.fixture(scope="module")
def lossless(folder: Path) -> Path:
    return rounded_up(folder / "lossless.tif", texture(1001, 801), compression="deflate")


# The field of view


def test_a_patch_has_the_requested_field_of_view(folder: Path) -> None:
    """Rounded-up level sizes give reported downsamples such as 1.9988. Truncated to integers, they
    would give 2, 4/3 and 8/7 times the field of view at 20x, 10x and 5x of a 40x slide."""
    path = rounded_up(folder / "rounded.tif", coordinates(2001, 1801))
    reported = openslide.OpenSlide(path).level_downsamples
    for level, error in ((1, 2), (2, 4 / 3), (3, 8 / 7)):
        assert 2**level / int(reported[level]) == error
        side = 224 * 2**level
        with Slide(path) as slide:
            patch = slide.read(96, 8, side, 224)
        assert patch.shape == (224, 224, 3)
        assert position(patch[0, 0]) == (96, 8)
        assert position(patch[-1, -1]) == (96 + side - 2**level, 8 + side - 2**level)


@both_readers
@both_roundings
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_square_is_where_it_was_drawn(
    tmp_path: Path, write: Write, fast: bool, level: int
) -> None:
    step = 2**level
    side = 56 * step
    image = np.full((801, 1001, 3), 255, dtype=np.uint8)
    image[160 : 160 + side, 320 : 320 + side] = 0
    with Slide(write(tmp_path / "square.tif", image), fast=fast) as slide:
        inside = slide.read(320, 160, side, 56)
        around = slide.read(320 - step, 160 - step, side + 2 * step, 58)
    assert len(slide.levels) == 4
    assert inside[1:-1, 1:-1].max() == 0
    frame = [around[0, 30, 0], around[-1, 30, 0], around[30, 0, 0], around[30, -1, 0]]
    if fast:
        assert inside.max() == 0
        assert min(frame) == 255
    else:  # OpenSlide's coordinates are off by half a level-0 pixel
        assert inside.max() < 80
        assert min(frame) > 180


@both_roundings
def test_a_scale_between_levels_has_the_right_field_of_view(tmp_path: Path, write: Write) -> None:
    image = np.full((801, 1001, 3), 255, dtype=np.uint8)
    image[160:608, 320:768] = 0
    with Slide(write(tmp_path / "square.tif", image)) as slide:
        assert slide.read(320, 160, 448, 150).max() == 0
        wider = slide.read(320 - 44.8, 160 - 44.8, 448 * 1.2, 180)
    assert (wider < 128).sum(axis=(0, 1)).tolist() == [150 * 150] * 3


def test_downsampling_is_the_mean_of_the_covered_pixels(lossless: Path) -> None:
    image = texture(1001, 801)
    with Slide(lossless) as slide:
        patch = slide.read(100, 200, 300, 100)  # read from level 1
    naive = image[200:500:2, 100:400:2].astype(float)
    assert patch.mean() == pytest.approx(naive.mean(), abs=0.3)
    assert np.corrcoef(patch[..., 0].ravel(), image[201:500:3, 101:400:3, 0].ravel())[0, 1] > 0.98


@settings(deadline=None, max_examples=60)
@given(
    x=st.floats(-300, 1100),
    y=st.floats(-300, 900),
    side=st.floats(1, 600) | st.integers(1, 60).map(lambda n: n + 5e-7),
    px=st.integers(1, 60),
)
@example(x=46, y=46, side=12.0000009, px=9)  # rounding error beyond an integer
def test_any_square_can_be_read(lossless: Path, x: float, y: float, side: float, px: int) -> None:
    with Slide(lossless) as slide:
        assert slide.read(x, y, side, px).shape == (px, px, 3)


@both_readers
def test_returned_arrays_are_writable(lossless: Path, fast: bool) -> None:
    with Slide(lossless, fast=fast) as slide:
        for patch in (
            slide.read(0, 0, 64, 64),
            slide.read(0, 0, 90, 64),
            slide.read(-9, 0, 64, 64),
        ):
            patch += 1


# Downsamples of levels


@given(
    width=st.integers(64, 300_000),
    height=st.integers(64, 300_000),
    up=st.booleans(),
    levels=st.integers(1, 12),
)
def test_halved_levels_have_powers_of_two_for_any_rounding(
    width: int, height: int, up: bool, levels: int
) -> None:
    full = size = (width, height)
    for level in range(1, levels):
        size = tuple(-(-side // 2) if up else side // 2 for side in size)  # type: ignore[assignment]
        if min(size) < 4:  # 127 pixels reduced to one can be a downsample of 64 or 128
            break
        assert exact_downsample(full, size) == 2**level


@given(
    width=st.integers(2_000, 300_000),
    height=st.integers(2_000, 300_000),
    ratio=st.sampled_from([3, 4, 5, 6, 16]),
    up=st.booleans(),
)
def test_other_integer_downsamples_are_found(width: int, height: int, ratio: int, up: bool) -> None:
    size = tuple(-(-side // ratio) if up else side // ratio for side in (width, height))
    assert exact_downsample((width, height), size) == ratio  # type: ignore[arg-type]


def test_a_level_that_is_larger_than_the_first_one_has_its_quotient() -> None:
    """A damaged header can declare it."""
    assert exact_downsample((100, 100), (400, 1000)) == pytest.approx(0.5 / 10**0.5)


def test_a_fractional_downsample_is_the_quotient() -> None:
    assert exact_downsample((10_000, 5_000), (4_000, 2_000)) == pytest.approx(2.5)
    assert exact_downsample((10_000, 5_000), (4_700, 2_350)) == pytest.approx(10 / 4.7)


# Pixels outside the slide


@both_readers
@pytest.mark.parametrize(("x", "y"), [(-20, 300), (980, 300), (300, -20), (300, 780), (-20, -20)])
def test_pixels_outside_the_slide_are_white_on_all_sides(
    lossless: Path, fast: bool, x: int, y: int
) -> None:
    image = np.pad(texture(1001, 801), ((64, 64), (64, 64), (0, 0)), constant_values=255)
    with Slide(lossless, fast=fast) as slide:
        patch = slide.read(x, y, 64, 64)
    np.testing.assert_array_equal(patch, image[y + 64 : y + 128, x + 64 : x + 128])


@both_readers
@pytest.mark.parametrize(("x", "y"), [(-500, 0), (5000, 0), (0, -500), (0, 5000)])
def test_a_square_outside_the_slide_is_white(lossless: Path, fast: bool, x: int, y: int) -> None:
    with Slide(lossless, fast=fast) as slide:
        assert slide.read(x, y, 64, 64).min() == 255
        assert slide.read(x, y, 200, 64).min() == 255


@both_readers
@pytest.mark.parametrize("compression", ["jpeg", "deflate", None])
def test_tiles_that_were_not_scanned_are_white(
    tmp_path: Path, fast: bool, compression: str | None
) -> None:
    image = texture(768, 512)

    def tiles() -> Iterator[Pixels | None]:
        for number, (y, x) in enumerate(np.ndindex(2, 3)):
            tile = image[256 * y : 256 * (y + 1), 256 * x : 256 * (x + 1)]
            yield None if number == 2 else tile  # not in the centre, which is compared on opening

    tifffile.imwrite(
        tmp_path / "sparse.tif", tiles(), shape=image.shape, dtype=image.dtype,
        photometric="rgb", tile=(256, 256), compression=compression, metadata=None,
    )  # fmt: skip
    with Slide(tmp_path / "sparse.tif", fast=fast) as slide:
        for _ in range(2):
            assert slide.block(0, 512, 0, 256, 256).min() == 255
        assert slide.block(0, 256, 0, 256, 256).max() < 255


# Two readers


@pytest.mark.parametrize("name", ["up", "down", "lossless"])
def test_both_readers_give_the_same_pixels(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    with Slide(path) as fast, Slide(path, fast=False) as reference:
        assert fast.fast
        assert not reference.fast
        assert fast.levels == reference.levels
        for level, (width, height) in enumerate(each.size for each in fast.levels):
            a, b = (
                slide.block(level, 0, 0, width, height).astype(int) for slide in (fast, reference)
            )
            inside = np.abs(a - b)[:-1, :-1]  # OpenSlide blends its last pixels with transparency
            assert inside.max() == 0
            a, b = (slide.block(level, 31, 17, 60, 60).astype(int) for slide in (fast, reference))
            assert np.abs(a - b).max() <= (0 if level == 0 else 24)
            assert np.abs(a - b).mean() <= (0 if level == 0 else 4)


def test_opaque_regions_equal_their_composite_on_white(up: Path) -> None:
    with Slide(up, fast=False) as slide, openslide.OpenSlide(up) as reference:
        region = reference.read_region((100, 50), 0, (224, 224))
        white = Image.alpha_composite(Image.new("RGBA", region.size, "white"), region)
        np.testing.assert_array_equal(slide.read(100, 50, 224, 224), white.convert("RGB"))


def test_a_page_with_the_size_of_a_level_is_not_used_as_that_level(tmp_path: Path) -> None:
    image = texture(800, 600)
    with tifffile.TiffWriter(tmp_path / "pages.tif") as file:
        for page, kind in ((image, 0), (255 - image[::2, ::2], 0), (image[::2, ::2], 1)):
            file.write(
                np.ascontiguousarray(page), subfiletype=kind,
                photometric="rgb", tile=(256, 256), metadata=None,
            )  # fmt: skip
    with Slide(tmp_path / "pages.tif") as slide:
        assert not slide.fast
        np.testing.assert_array_equal(slide.block(1, 0, 0, 300, 200), image[:400:2, :600:2])


def test_libvips_is_not_used_if_its_pixels_differ(
    up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = readers.OpenSlideReader.fetch
    monkeypatch.setattr(readers.OpenSlideReader, "fetch", lambda *where: fetch(*where) // 2)
    assert not SlideFile(up).metadata.fast


@pytest.mark.parametrize(
    "image",
    [
        texture(600, 400).astype(np.uint16) * 257,
        np.dstack([texture(600, 400), np.full((400, 600), 255, dtype=np.uint8)]),
        texture(600, 400)[..., 0],
    ],
    ids=["16 bit", "alpha", "grey"],
)
def test_libvips_is_used_for_8_bit_rgb_only(tmp_path: Path, image: NDArray[Any]) -> None:
    kind = "rgb" if image.ndim == 3 else "minisblack"
    extra = {"extrasamples": ["unassalpha"]} if image.shape[-1] == 4 else {}
    rounded_up(tmp_path / "odd.tif", image, photometric=kind, levels=2, **extra)
    with Slide(tmp_path / "odd.tif") as slide:
        assert not slide.fast
        red = slide.block(0, 0, 0, 600, 400)[..., 0]
    np.testing.assert_array_equal(red, texture(600, 400)[..., 0])


def aperio(path: Path, compression: str | int) -> Path:
    image = texture(900, 700)
    pages = [(1, True, compression), (4, False, None), (2, True, compression)]
    with tifffile.TiffWriter(path) as file:
        for step, tiled, how in pages:
            small = np.ascontiguousarray(image[::step, ::step])
            layout: dict[str, Any] = {"tile": (256, 256)} if tiled else {"rowsperstrip": 16}
            description = APERIO.format(f"{small.shape[1]}x{small.shape[0]}")
            file.write(
                small, photometric="rgb", compression=how, description=description,
                metadata=None, **layout,
            )  # fmt: skip
    return path


def test_an_aperio_slide_has_scale_and_objective_power(tmp_path: Path) -> None:
    with Slide(aperio(tmp_path / "a.svs", "jpeg")) as slide:
        assert (slide.vendor, slide.objective_power, slide.mpp) == ("aperio", 40, 0.25)
        assert [level.downsample for level in slide.levels] == [
            1,
            2,
        ]  # the thumbnail is not a level
        assert slide.fast


def test_openslide_reads_the_jpeg_2000_that_libvips_cannot(tmp_path: Path) -> None:
    with Slide(aperio(tmp_path / "a.svs", 33005)) as slide:
        assert not slide.fast
        off = slide.block(0, 100, 100, 300, 300) - texture(900, 700)[100:400, 100:400].astype(int)
    assert np.abs(off).mean() < 2


def test_other_vendors_are_read_by_openslide(up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_FAST_VENDORS", ("aperio",))
    assert not SlideFile(up).metadata.fast


@both_readers
def test_four_threads_read_the_same_pixels_as_one(up: Path, fast: bool) -> None:
    rng = np.random.default_rng(0)
    squares = [
        (int(x), int(y), side) for x, y in rng.integers(-50, 900, (40, 2)) for side in (64, 200)
    ]
    with Slide(up, fast=fast) as slide, ThreadPoolExecutor(4) as pool:
        alone = [slide.read(x, y, side, 64) for x, y, side in squares]
        together = list(pool.map(lambda at: slide.read(*at, 64), squares))
    np.testing.assert_array_equal(together, alone)


# Plain images


@pytest.mark.parametrize("ending", ["png", "jpg", "tif", "bmp"])
def test_plain_images_are_slides_of_one_level(tmp_path: Path, ending: str) -> None:
    image = texture(300, 200)
    path = tmp_path / f"image.{ending}"
    Image.fromarray(image).save(path, **({"quality": 95} if ending == "jpg" else {}))
    with Slide(path) as slide:
        assert (slide.vendor, slide.size, len(slide.levels)) == ("image", (300, 200), 1)
        pixels = slide.read(50, 60, 128, 128)
        assert slide.read(-10, 0, 64, 64)[:, :10].min() == 255
    np.testing.assert_array_equal(pixels, np.asarray(Image.open(path))[60:188, 50:178])


@pytest.mark.parametrize("ending", ["png", "jpg", "tif"])
@pytest.mark.parametrize("kind", ["gif", "webp", "ppm", "svg"])
def test_a_format_that_is_not_on_the_list_is_not_read_under_another_name(
    tmp_path: Path, kind: str, ending: str
) -> None:
    path = tmp_path / f"image.{ending}"
    if kind == "svg":
        path.write_text('<svg xmlns="http://www.w3.org/2000/svg" width="99" height="99"></svg>')
    else:
        Image.fromarray(texture(99, 99)).save(path, kind)
    with pytest.raises(SlideError, match=r"nor an image \(it is not PNG, JPEG, TIFF or BMP\)"):
        Slide(path)


def test_a_striped_tiff_is_read(tmp_path: Path) -> None:
    image = texture(300, 200)
    tifffile.imwrite(tmp_path / "s.tif", image, photometric="rgb", rowsperstrip=7)
    with Slide(tmp_path / "s.tif") as slide:
        np.testing.assert_array_equal(slide.read(50, 60, 128, 128), image[60:188, 50:178])


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    image = np.zeros((64, 64, 4), dtype=np.uint8)
    image[:32, :, 3] = 255
    Image.fromarray(image).save(tmp_path / "a.png")
    with Slide(tmp_path / "a.png") as slide:
        pixels = slide.read(0, 0, 64, 64)
    assert pixels[:32].max() == 0
    assert pixels[32:].min() == 255


@pytest.mark.parametrize("bits", [8, 16])
def test_a_grey_image_has_three_equal_channels(tmp_path: Path, bits: int) -> None:
    grey = texture(64, 64)[..., 0]
    Image.fromarray(grey if bits == 8 else grey.astype(np.uint16) * 257).save(tmp_path / "g.png")
    with Slide(tmp_path / "g.png") as slide:
        pixels = slide.read(0, 0, 64, 64)
    np.testing.assert_array_equal(pixels, np.dstack([grey] * 3))


def test_a_photograph_is_rotated_by_its_exif_tag(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # the top is on the right
    Image.fromarray(texture(64, 32)).save(tmp_path / "r.png", exif=exif)
    assert Slide(tmp_path / "r.png").size == (32, 64)


# The scale


@both_roundings
def test_the_scale_is_read_from_the_file(tmp_path: Path, write: Write) -> None:
    assert Slide(write(tmp_path / "s.tif", texture(300, 200))).mpp == pytest.approx(0.25)


def test_the_scale_of_a_plain_image_is_read(tmp_path: Path) -> None:
    Image.fromarray(texture(64, 64)).save(tmp_path / "a.png", dpi=(50800, 50800))
    assert Slide(tmp_path / "a.png").mpp == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"resolution": None, "resolutionunit": None},
            "has no scale. Pass --slide-mpp",
        ),
        ({"resolution": (72, 72), "resolutionunit": "INCH"}, "352.778 um/px, which is implausible"),
        ({"resolution": (11.16, 11.16)}, "896.057 um/px, which is implausible; 0.05 to 20"),
        ({"resolution": (40000, 20000)}, "pixels of 0.25 x 0.5 um. Only square pixels"),
    ],
    ids=["missing", "72 dpi", "896 um", "not square"],
)
def test_an_implausible_scale_is_refused_with_a_remedy(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = rounded_up(tmp_path / "odd.tif", texture(300, 200), **options)
    with Slide(path) as slide, pytest.raises(SlideError) as caught:
        _ = slide.mpp
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "Pass --slide-mpp." in str(caught.value)
    assert Slide(path, mpp=0.5).mpp == 0.5  # a given scale overrides it


def test_72_dpi_is_not_a_scale_of_a_plain_image(tmp_path: Path) -> None:
    Image.fromarray(texture(64, 64)).save(tmp_path / "a.jpg", dpi=(72, 72))
    with pytest.raises(SlideError, match="has no scale"):
        _ = Slide(tmp_path / "a.jpg").mpp


@pytest.mark.parametrize("mpp", [0, -1, 896, float("nan"), float("inf")])
def test_an_implausible_given_scale_is_refused(lossless: Path, mpp: float) -> None:
    with pytest.raises(SlideError, match=r"scale given for .*lossless\.tif is .* um/px"):
        Slide(lossless, mpp=mpp)


def test_a_given_scale_overrides_the_file(lossless: Path) -> None:
    assert Slide(lossless, mpp=0.5).mpp == 0.5


# Damaged files


def tile_of(path: Path, number: int) -> tuple[int, int]:
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        return page.dataoffsets[number], page.databytecounts[number]


def damaged(path: Path, to: Path, *, tile: int = 2, part: str = "all") -> Path:
    """Copy a slide, with a tile or its end replaced by noise."""
    start, length = tile_of(path, tile)
    begin = start if part == "all" else start + length - 200
    data = bytearray(path.read_bytes())
    noise = np.random.default_rng(1).integers(0, 256, start + length - begin, dtype=np.uint8)
    data[begin : start + length] = noise.tobytes()
    to.write_bytes(data)
    return to


@both_readers
@pytest.mark.parametrize("part", ["all", "end"])
def test_a_broken_jpeg_tile_is_an_error(up: Path, tmp_path: Path, fast: bool, part: str) -> None:
    with Slide(damaged(up, tmp_path / "d.tif", part=part), fast=fast) as slide:
        assert slide.fast == fast
        slide.block(0, 0, 0, 256, 256)
        for _ in range(3):
            with pytest.raises(SlideError, match=r"d\.tif cannot be read .* Copy it again"):
                slide.block(0, 600, 50, 60, 60)


@both_readers
@pytest.mark.parametrize("compression", ["deflate", "lzw"])
def test_a_broken_lossless_tile_is_an_error(tmp_path: Path, fast: bool, compression: str) -> None:
    path = rounded_down(tmp_path / "s.tif", texture(601, 401), compression=compression)
    slide = Slide(damaged(path, tmp_path / "d.tif"), fast=fast)
    assert slide.fast == fast
    with pytest.raises(SlideError, match=r"d\.tif cannot be read at level 0, \(260, 50\)"):
        slide.block(0, 260, 50, 60, 60)


def read_whole(slide: Slide) -> None:
    for level, (width, height) in enumerate(each.size for each in slide.levels):
        slide.block(level, 0, 0, width, height)


@pytest.mark.parametrize("name", ["up", "down", "lossless"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_truncated_slide_is_an_error(
    name: str, share: float, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    data = request.getfixturevalue(name).read_bytes()
    path = tmp_path / "cut.tif"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(SlideError, match=r"cut\.tif .* [Cc]opy it again"):
        read_whole(Slide(path))


@pytest.mark.parametrize("options", [{}, {"compression": "deflate"}, {"compression": "jpeg"}])
def test_a_truncated_striped_tiff_is_an_error(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "cut.tif"
    tifffile.imwrite(path, texture(300, 200), photometric="rgb", rowsperstrip=16, **options)
    path.write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(SlideError, match=r"cut\.tif .* [Cc]opy it again"):
        read_whole(Slide(path))


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp"])
def test_a_truncated_image_is_an_error(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"cut.{ending}"
    Image.fromarray(texture(300, 200)).save(path)
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(SlideError, match=r"cut\..* [Cc]opy it again"):
        read_whole(Slide(path))


def test_an_intact_slide_is_readable_while_a_broken_one_is_read(up: Path, tmp_path: Path) -> None:
    """libvips reports broken JPEG tiles in one error buffer for all threads."""
    broken = damaged(up, tmp_path / "d.tif", part="end")
    expected = Slide(up).block(0, 512, 0, 256, 256)

    def read_intact(_: int) -> bool:
        with Slide(up) as slide:
            return bool((slide.block(0, 512, 0, 256, 256) == expected).all())

    def detect_broken(_: int) -> bool:
        with Slide(broken) as slide:
            try:
                slide.block(0, 512, 0, 256, 256)
            except SlideError:
                return True
            return False

    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(check, n) for n in range(20) for check in (read_intact, detect_broken)]
        assert all(run.result() for run in runs)


@pytest.mark.parametrize("content", [b"", b"II", b"hello, I am a slide", b"II*\0\xff\xff\xff\x7f"])
@pytest.mark.parametrize("ending", ["svs", "tif", "png", "jpg", "dcm", "mrxs"])
def test_a_file_that_is_not_a_slide_is_refused(tmp_path: Path, content: bytes, ending: str) -> None:
    path = tmp_path / f"no.{ending}"
    path.write_bytes(content)
    with pytest.raises(SlideError, match=rf"no\.{ending} .*(OpenSlide can read|cannot be opened)"):
        Slide(path)


def test_a_missing_slide_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match=r"There is no slide .*gone\.svs\. Check its name"):
        Slide(tmp_path / "gone.svs")


def test_a_folder_is_a_slide_only_if_it_has_dicom_files(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match="a folder without DICOM files"):
        Slide(tmp_path)


# Thumbnails


def naive_thumbnail(image: Pixels, scale: float) -> NDArray[np.float64]:
    """Return the mean over each square of `scale` pixels, with white outside, in loops."""
    means = image.astype(float)
    for _ in range(2):  # rows, then columns
        length = len(means)
        cells = int(np.ceil(length / scale))
        weights = np.zeros((cells, length))
        for cell, pixel in np.ndindex(cells, length):
            covered = min((cell + 1) * scale, pixel + 1) - max(cell * scale, pixel)
            weights[cell, pixel] = max(covered, 0) / scale
        outside = 255 * (1 - weights.sum(axis=1))
        means = np.einsum("cp,pqb->cqb", weights, means) + outside[:, None, None]
        means = means.swapaxes(0, 1)
    return means


@pytest.fixture(scope="module")
def flat(folder: Path) -> Path:
    return rounded_up(folder / "flat.tif", texture(301, 203), levels=1)


@pytest.mark.parametrize("scale", [1, 2, 8, 3.5, 7.3])
def test_a_thumbnail_is_the_mean_of_squares(flat: Path, scale: float) -> None:
    with Slide(flat) as slide:
        thumbnail = slide.thumbnail(0.25 * scale)
    assert (thumbnail.scale, thumbnail.mpp) == (scale, 0.25 * scale)
    naive = naive_thumbnail(texture(301, 203), scale)
    assert thumbnail.image.shape == naive.shape
    assert np.abs(thumbnail.image - naive).max() <= 0.51


@pytest.mark.parametrize("scale", [2, 7.3])
def test_a_thumbnail_does_not_depend_on_the_block_size(
    flat: Path, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = []
    for block in (30, 100, 4096):
        monkeypatch.setattr(slides, "_BLOCK", block)
        images.append(Slide(flat).thumbnail(0.25 * scale).image)
    for one, other in pairwise(images):
        np.testing.assert_array_equal(one, other)


@both_roundings
def test_a_thumbnail_of_a_pyramid_is_that_of_its_first_level(tmp_path: Path, write: Write) -> None:
    y, x = np.mgrid[:301, :401]
    smooth = np.stack([x * 255 / 400, y * 255 / 300, 0 * x], axis=-1).astype(np.uint8)
    with Slide(write(tmp_path / "s.tif", smooth)) as slide:
        image = slide.thumbnail(1.5).image  # from level 2
    off = np.abs(image - naive_thumbnail(smooth, 6))
    assert off[:-1, :-1].max() < 3  # every second pixel is close to the mean


def test_a_thumbnail_is_never_finer_than_the_slide(flat: Path) -> None:
    with Slide(flat) as slide:
        thumbnail = slide.thumbnail(0.1)
    assert (thumbnail.scale, thumbnail.mpp) == (1, 0.25)
    np.testing.assert_array_equal(thumbnail.image, texture(301, 203))


# Finding slides


def touched(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_slides_are_found_in_folders_and_subfolders(tmp_path: Path) -> None:
    touched(tmp_path, "a.svs", "b/c.TIFF", "b/d/e.1.ndpi", "notes.txt", ".hidden.svs", ".bin/f.svs")
    assert find_slides([tmp_path]) == {
        "a": tmp_path / "a.svs",
        "c": tmp_path / "b/c.TIFF",
        "e.1": tmp_path / "b/d/e.1.ndpi",
    }


def test_a_hidden_folder_can_be_passed(tmp_path: Path) -> None:
    assert set(find_slides([touched(tmp_path / ".bin", "f.svs")])) == {"f"}


def test_files_and_folders_may_be_mixed(tmp_path: Path) -> None:
    touched(tmp_path, "a.svs", "more/b.svs")
    assert set(find_slides([tmp_path / "a.svs", tmp_path / "more", tmp_path / "a.svs"])) == {
        "a",
        "b",
    }


def test_a_folder_of_dicom_files_is_one_slide_with_its_name(tmp_path: Path) -> None:
    touched(tmp_path, "case 1/1.2.dcm", "case 1/1.3.dcm", "case 2/1.dcm")
    assert find_slides([tmp_path]) == {name: tmp_path / name for name in ("case 1", "case 2")}


def test_two_slides_with_one_name_are_refused(tmp_path: Path) -> None:
    touched(tmp_path, "a.svs", "b/a.tif")
    with pytest.raises(SlideError, match=r"are both called 'a'\. Rename one of them"):
        find_slides([tmp_path])


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match=r"There are no slides in .*\. Known suffixes: \.svs, "):
        find_slides([touched(tmp_path, "notes.txt")])


# Real files


@needs_data
@pytest.mark.parametrize(
    ("name", "vendor", "size", "levels", "fast"),
    [
        ("CMU-1-Small-Region.svs", "aperio", (2220, 2967), [1], True),
        ("CMU-1-Small-Region-dicom", "dicom", (2220, 2967), [1], False),
        ("tcga-cr-7395-01a-01-ts1.svs", "aperio", (4443, 3567), [1, 2], False),
        ("six-levels-wrong-mpp.tiff", "generic-tiff", (2500, 2500), [1, 2, 4, 8, 16, 32], True),
        ("thumbnail-green-pen.png", "image", (754, 631), [1], True),
        ("thumbnail-with-ink.jpeg", "image", (5600, 1000), [1], True),
    ],
)
def test_real_slides_have_the_known_properties(
    name: str, vendor: str, size: tuple[int, int], levels: list[int], fast: bool
) -> None:
    with Slide(DATA / name) as slide:
        assert (slide.vendor, slide.size, slide.fast) == (vendor, size, fast)
        assert [level.downsample for level in slide.levels] == levels
        assert slide.name == name.removesuffix(".svs").removesuffix(".tiff").split(".")[0]
        assert 60 < slide.read(size[0] // 2, size[1] // 2, 448, 224).mean() < 250


@needs_data
def test_real_slides_have_a_plausible_scale_or_are_refused() -> None:
    assert Slide(DATA / "CMU-1-Small-Region.svs").mpp == pytest.approx(0.499)
    assert Slide(DATA / "CMU-1-Small-Region.svs").objective_power == 20
    assert Slide(DATA / "CMU-1-Small-Region-dicom").mpp == pytest.approx(0.499)
    with pytest.raises(SlideError, match="has no scale"):
        _ = Slide(DATA / "tcga-cr-7395-01a-01-ts1.svs").mpp
    with pytest.raises(SlideError, match=r"896\.056 um/px, which is implausible"):
        _ = Slide(DATA / "six-levels-wrong-mpp.tiff").mpp


@needs_data
def test_a_slide_and_its_dicom_copy_look_the_same() -> None:
    with (
        Slide(DATA / "CMU-1-Small-Region.svs") as one,
        Slide(DATA / "CMU-1-Small-Region-dicom") as other,
    ):
        off = one.thumbnail(4).image.astype(int) - other.thumbnail(4).image
    assert np.abs(off).mean() < 1


@needs_data
def test_both_readers_agree_on_a_real_slide() -> None:
    path = DATA / "CMU-1-Small-Region.svs"
    with Slide(path) as fast, Slide(path, fast=False) as reference:
        for x in range(-100, 2200, 500):
            np.testing.assert_array_equal(
                fast.read(x, 1000, 224, 224), reference.read(x, 1000, 224, 224)
            )


@needs_data
def test_a_folder_of_two_dicom_series_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Series(nullcontext[Any]):
        def __init__(self, path: Path) -> None:
            super().__init__(self)
            self.properties = {"dicom.SeriesInstanceUID": path.stem[-1]}

    for number, file in enumerate(sorted((DATA / "CMU-1-Small-Region-dicom").iterdir())[:2]):
        shutil.copy(file, tmp_path / f"{number}.dcm")
    monkeypatch.setattr(readers, "_open_openslide", Series)
    with pytest.raises(SlideError, match=r"holds 2 DICOM series\. Put each slide into"):
        SlideFile(tmp_path)


def test_images_in_the_excluded_folder_are_not_slides(tmp_path: Path) -> None:
    for name in ("a.png", "out/qc/a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    assert find_slides([tmp_path], exclude=tmp_path / "out") == {"a": tmp_path / "a.png"}


def test_images_from_an_earlier_encode_are_not_slides(tmp_path: Path) -> None:
    for name in ("a.png", "out/qc/a.png", "out/.locks/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name, format="png")
    (tmp_path / "folder.tif").mkdir()
    assert find_slides([tmp_path]) == {"a": tmp_path / "a.png"}


@needs_data
def test_a_dicom_folder_as_working_directory_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = DATA / "CMU-1-Small-Region-dicom"
    monkeypatch.chdir(folder)
    assert list(find_slides([Path()])) == [folder.name]
    assert list(find_slides(sorted(Path().glob("*.dcm")))) == [folder.name]
    assert Slide(Path()).name == folder.name


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match="There is no slide or folder"):
        find_slides([tmp_path / "nowhere.svs"])


@pytest.mark.parametrize("resolution", [(0.0, 1.0), (-1.0, -1.0), (float("nan"), 1.0)])
def test_an_image_without_a_usable_resolution_has_no_scale(
    resolution: tuple[float, float],
) -> None:
    image = SimpleNamespace(xres=resolution[0], yres=resolution[1])
    assert readers._scale_properties(image) == {}
