"""Readers of slide pixels: OpenSlide, and libvips where it gives the same pixels faster."""

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

pyvips.cache_set_max(0)  # its cache would keep pixels of closed slides
logging.getLogger("pyvips").setLevel(logging.ERROR)  # its warnings are handled below

Pixels = NDArray[np.uint8]  # (height, width, 3), red first

_TILE_BYTES = 325  # TIFF tag: TileByteCounts
_FAST_VENDORS = ("generic-tiff", "aperio")


class Reader(Protocol):
    """Reads blocks that lie inside a level."""

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels: ...

    def close(self) -> None: ...


class OpenSlideReader:
    """Reads with OpenSlide."""

    def __init__(self, slide: openslide.OpenSlide) -> None:
        self.slide = slide

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        # OpenSlide's coordinates follow the downsample that it reports, not the exact one.
        reported = self.slide.level_downsamples[level]
        corner = (round(x * reported), round(y * reported))
        region = self.slide.read_region(corner, level, (width, height))
        if region.getchannel("A").getextrema() != (255, 255):  # unscanned tiles are transparent
            region = Image.alpha_composite(Image.new("RGBA", region.size, "white"), region)
        return np.array(region.convert("RGB"))

    def close(self) -> None:
        self.slide.close()


class VipsReader:
    """Reads with libvips. `fallback` checks a block again when libvips reports a problem."""

    def __init__(self, images: Sequence[Any], fallback: Reader | None = None) -> None:
        self.images = images
        self.fallback = fallback
        self.error: Exception | None = None  # kept: later reads would return black pixels
        self.thread = threading.local()  # a libvips region belongs to one thread

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        if self.error is not None:
            raise self.error
        regions = self.thread.__dict__.setdefault("regions", {})
        if level not in regions:
            regions[level] = pyvips.Region.new(self.images[level])
        before = _error_buffer.count_messages()
        try:
            data = regions[level].fetch(x, y, width, height)
            if _error_buffer.count_messages() != before:
                self._check(level, x, y, width, height)
        except (openslide.OpenSlideError, pyvips.Error) as problem:
            # pyvips.Error clears the buffer: other threads must check their blocks as well.
            _error_buffer.count += 1
            self.error = problem
            raise
        return np.frombuffer(data, dtype=np.uint8).reshape(height, width, 3)

    def close(self) -> None:
        self.images, self.thread = (), threading.local()  # libvips closes unreferenced images
        if self.fallback is not None:
            self.fallback.close()

    def _check(self, *area: int) -> None:
        if self.fallback is None:
            raise pyvips.Error("a part of it does not decode")
        self.fallback.fetch(*area)


class _ErrorBuffer:
    """Counts the messages in libvips' error buffer. A broken JPEG tile raises no exception.

    The buffer is shared by all threads and images, so a new message only means: check again.
    """

    count = 0

    def count_messages(self) -> int:
        """Return the number of times that the buffer was found filled, and clear it."""
        if pyvips.vips_lib.vips_error_buffer()[0] != b"\0":
            pyvips.vips_lib.vips_error_clear()
            self.count += 1
        return self.count


_error_buffer = _ErrorBuffer()


def fast_reader(slide: openslide.OpenSlide, path: Path) -> VipsReader | None:
    """Return a libvips reader, or None if a level is not tiled or differs from OpenSlide's."""
    if slide.properties.get("openslide.vendor") not in _FAST_VENDORS or not _has_all_tiles(path):
        return None
    try:
        # A less strict fail_on gives black pixels without an error.
        first = pyvips.Image.tiffload(str(path), fail_on="warning")
        pages = [
            pyvips.Image.tiffload(str(path), page=n, fail_on="warning")
            for n in range(first.get("n-pages"))
        ]
        tiled = {(p.width, p.height): p for p in reversed(pages) if "tile-width" in p.get_fields()}
        reader = VipsReader([tiled[size] for size in slide.level_dimensions])
        same = all(
            image.bands == 3 and image.format == "uchar" and _same_pixels(reader, slide, level)
            for level, image in enumerate(reader.images)
        )
    except (pyvips.Error, openslide.OpenSlideError, KeyError):
        return None
    return VipsReader(reader.images, fallback=OpenSlideReader(slide)) if same else None


def _has_all_tiles(path: Path) -> bool:
    """Return whether a TIFF holds all its tiles. libvips reads missing tiles as black."""
    with path.open("rb") as file:
        header = file.read(8)
        try:
            directory = ImageFileDirectory_v2(header + file.read(8 if header[2] == 43 else 0))
        except SyntaxError:  # big-endian BigTIFF, which Pillow cannot parse
            return False
        visited = {0}
        while directory.next not in visited:
            visited.add(file.seek(directory.next))
            directory.load(file)
            if 0 in directory.get(_TILE_BYTES, ()):
                return False
    return True


def _same_pixels(reader: VipsReader, slide: openslide.OpenSlide, level: int) -> bool:
    """Compare the mean colour in the centre of a level. OpenSlide may be off by half a pixel."""
    width, height = slide.level_dimensions[level]
    wide, high = min(width, 64), min(height, 64)
    area = (level, (width - wide) // 2, (height - high) // 2, wide, high)
    fast, reference = reader.fetch(*area), OpenSlideReader(slide).fetch(*area)
    difference = fast.astype(float).mean((0, 1)) - reference.mean((0, 1))
    return float(np.abs(difference).max()) < 2


def plain_image(path: Path) -> Any:
    """Return a plain image as 8-bit RGB on white."""
    try:
        image = pyvips.Image.new_from_file(str(path), fail_on="warning").autorot()
        if image.hasalpha():
            image = image.flatten(background=255 if image.format == "uchar" else 65535)
        return image.colourspace("srgb")[:3].cast("uchar")
    except pyvips.Error as problem:
        raise SlideError(
            f"{path} is neither a slide that OpenSlide can read nor an image "
            f"({first_line(problem)}). It may be damaged: copy it again, or convert it to a tiled "
            "TIFF."
        ) from problem


def first_line(problem: Exception) -> str:
    """Return one line of an error message, without its full stop."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines[-1] if lines else type(problem).__name__).rstrip(".")
