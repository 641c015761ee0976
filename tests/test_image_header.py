"""Headers of image files: impossible sizes are errors before a library reads the file."""

import os
import struct
from contextlib import suppress
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
import pyvips
import tifffile
from PIL import Image

from caprmil.errors import SlideError
from caprmil.slides import slide as slides
from caprmil.slides.image_header import check_header
from caprmil.slides.slide import Slide
from image_bombs import BOMBS, page, tiff, tiled

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("CAPRMIL_DATA", ROOT.parent / "shared" / "data")) / "slides"


def jpeg(folder: Path, width: int, height: int) -> bytes:
    """Return a small JPEG with another size in its frame header."""
    Image.new("RGB", (64, 64), "pink").save(folder / "small.jpg", exif=Image.Exif())
    data = bytearray((folder / "small.jpg").read_bytes())
    (folder / "small.jpg").unlink()
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_declares_enormous_sizes_is_an_error_at_once(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(BOMBS[name])
    start = monotonic()
    with pytest.raises(SlideError, match=rf"{name} declares .* Copy it again"):
        Slide(path, mpp=0.5)
    assert monotonic() - start < 1


def test_a_small_jpeg_that_declares_enormous_sizes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "image.jpg").write_bytes(jpeg(tmp_path, 65535, 65500))
    with pytest.raises(SlideError, match="declares 65,535 x 65,500 pixels, but has"):
        Slide(tmp_path / "image.jpg")


def test_every_page_of_a_tiff_is_checked(tmp_path: Path) -> None:
    bomb = tiff(tiled(2**30, 2**30, 2**30))
    second = tiff(page(64, 64), offset=1024)[:1024] + bomb[8:]
    (tmp_path / "two.tif").write_bytes(second)
    with pytest.raises(SlideError, match="declares tiles of 1,073,741,824 x"):
        check_header(tmp_path / "two.tif")


def test_directories_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "circle.tif").write_bytes(tiff(page(64, 64), offset=8))
    check_header(tmp_path / "circle.tif")


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_may_end_anywhere(tmp_path: Path, name: str) -> None:
    for length in range(0, 200, 9):
        (tmp_path / name).write_bytes(BOMBS[name][:length])
        with suppress(SlideError):
            check_header(tmp_path / name)


def test_a_directory_and_a_missing_file_are_left_to_the_libraries(tmp_path: Path) -> None:
    check_header(tmp_path)
    check_header(tmp_path / "nowhere.tif")


def test_sound_files_pass(tmp_path: Path) -> None:
    image = np.zeros((300, 400, 3), dtype=np.uint8)  # blank: the highest compression
    for name in ("a.png", "a.jpg", "a.bmp", "a.tif"):
        Image.fromarray(image).save(tmp_path / name)
        check_header(tmp_path / name)
    for number, options in enumerate(({}, {"bigtiff": True}, {"byteorder": ">"})):
        tifffile.imwrite(
            tmp_path / f"{number}.tif", image, photometric="rgb", tile=(256, 256), **options
        )
        check_header(tmp_path / f"{number}.tif")
    large = pyvips.Image.black(5000, 5000, bands=3)
    large.tiffsave(str(tmp_path / "l.tif"), tile=True, compression="deflate")
    check_header(tmp_path / "l.tif")


@pytest.mark.skipif(not DATA.is_dir(), reason="the real slides are not available")
def test_real_slides_pass() -> None:
    for path in DATA.rglob("*"):
        check_header(path)


def test_a_slide_of_several_metres_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slides, "_MAX_THUMBNAIL", 100 * 100)
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    with (
        Slide(tmp_path / "a.png", mpp=20) as slide,
        pytest.raises(SlideError, match=r"a\.png would be 4 x 2 mm large.*Check its scale"),
    ):
        slide.thumbnail(8.0)
