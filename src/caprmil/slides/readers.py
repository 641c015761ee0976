"""Readers: what fetches the pixels of a slide, OpenSlide or libvips, and when which."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openslide
import pyvips
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from caprmil.errors import SlideError

pyvips.cache_set_max(0)  # it would keep the pixels of slides that are closed
logging.getLogger("pyvips").setLevel(logging.ERROR)  # what it warns of, we raise or read anew

Pixels = NDArray[np.uint8]  # (height, width, 3), red first

_TILE_BYTES = 325  # the tag of TIFF that says how long each tile is
_FAST_VENDORS = ("generic-tiff", "aperio")


class Reader(Protocol):
    """What reads blocks that lie inside a level."""

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels: ...

    def close(self) -> None: ...


class OpenSlideReader:
    def __init__(self, slide: openslide.OpenSlide) -> None:
        self.slide = slide

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        reported = self.slide.level_downsamples[level]  # its coordinates go by its own ratio
        corner = (round(x * reported), round(y * reported))
        region = self.slide.read_region(corner, level, (width, height))
        if region.getchannel("A").getextrema() != (255, 255):  # tiles that were never scanned
            region = Image.alpha_composite(Image.new("RGBA", region.size, "white"), region)
        return np.array(region.convert("RGB"))

    def close(self) -> None:
        self.slide.close()


class VipsReader:
    """Reads by libvips. `judge` reads again what it may have got wrong."""

    def __init__(self, images: Sequence[Any], judge: Reader | None = None) -> None:
        self.images = images
        self.judge = judge
        self.damage: Exception | None = None  # it stays: the next read would find black pixels
        self.own = threading.local()  # a region belongs to one thread

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        if self.damage is not None:
            raise self.damage
        regions = self.own.__dict__.setdefault("regions", {})
        if level not in regions:
            regions[level] = pyvips.Region.new(self.images[level])
        before = _grumbles.heard()
        try:
            data = regions[level].fetch(x, y, width, height)
            if _grumbles.heard() != before:
                self._check(level, x, y, width, height)
        except (openslide.OpenSlideError, pyvips.Error) as problem:
            _grumbles.count += 1  # the error took along what another thread may have to hear
            self.damage = problem
            raise
        return np.frombuffer(data, dtype=np.uint8).reshape(height, width, 3)

    def close(self) -> None:
        self.images, self.own = (), threading.local()  # libvips closes what nobody holds
        if self.judge is not None:
            self.judge.close()

    def _check(self, *area: int) -> None:
        if self.judge is None:
            raise pyvips.Error("a part of it does not decode")
        self.judge.fetch(*area)


class _Grumbles:
    """Counts what libvips remarks while it reads on, as it does over a broken JPEG tile.

    It keeps one list for all threads and images, so more of it says no more than: look again.
    """

    count = 0

    def heard(self) -> int:
        if pyvips.vips_lib.vips_error_buffer()[0] != b"\0":
            pyvips.vips_lib.vips_error_clear()
            self.count += 1
        return self.count


_grumbles = _Grumbles()


def fast_reader(slide: openslide.OpenSlide, path: Path) -> VipsReader | None:
    """Return libvips' reader if it has each level, tiled, with the pixels that OpenSlide gives."""
    if slide.properties.get("openslide.vendor") not in _FAST_VENDORS or not _whole(path):
        return None
    try:
        first = pyvips.Image.tiffload(str(path), fail_on="warning")  # less is black without a word
        pages = [
            pyvips.Image.tiffload(str(path), page=n, fail_on="warning")
            for n in range(first.get("n-pages"))
        ]
        tiled = {(p.width, p.height): p for p in reversed(pages) if "tile-width" in p.get_fields()}
        reader = VipsReader([tiled[size] for size in slide.level_dimensions])
        same = all(
            image.bands == 3 and image.format == "uchar" and _agree(reader, slide, level)
            for level, image in enumerate(reader.images)
        )
    except (pyvips.Error, openslide.OpenSlideError, KeyError):
        return None
    return VipsReader(reader.images, judge=OpenSlideReader(slide)) if same else None


def _whole(path: Path) -> bool:
    """Tell whether a TIFF holds all its tiles. What was not scanned, libvips makes black."""
    with path.open("rb") as file:
        header = file.read(8)
        try:
            directory = ImageFileDirectory_v2(header + file.read(8 if header[2] == 43 else 0))
        except SyntaxError:  # big and big-endian, which Pillow does not know
            return False
        seen = {0}
        while directory.next not in seen:
            seen.add(file.seek(directory.next))
            directory.load(file)
            if 0 in directory.get(_TILE_BYTES, ()):
                return False
    return True


def _agree(reader: VipsReader, slide: openslide.OpenSlide, level: int) -> bool:
    """Compare the middle of a level. OpenSlide may be half a pixel off, so not to the bit."""
    width, height = slide.level_dimensions[level]
    wide, high = min(width, 64), min(height, 64)
    area = (level, (width - wide) // 2, (height - high) // 2, wide, high)
    ours, theirs = reader.fetch(*area), OpenSlideReader(slide).fetch(*area)
    return float(np.abs(ours.astype(float).mean((0, 1)) - theirs.mean((0, 1))).max()) < 2


def plain_image(path: Path) -> Any:
    """Open an image that no scanner wrote, as three bytes a pixel on white."""
    try:
        image = pyvips.Image.new_from_file(str(path), fail_on="warning").autorot()
        if image.hasalpha():
            image = image.flatten(background=255 if image.format == "uchar" else 65535)
        return image.colourspace("srgb")[:3].cast("uchar")
    except pyvips.Error as problem:
        raise SlideError(
            f"{path} is neither a slide that OpenSlide knows nor an image ({first_line(problem)})."
            " It may be damaged: copy it again, or convert it to a tiled TIFF."
        ) from problem


def first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines[-1] if lines else type(problem).__name__).rstrip(".")
