"""Readers of slide pixels: OpenSlide, and libvips where it gives the same pixels faster."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openslide
import pyvips
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from caprmil.errors import SlideError
from caprmil.slides.scale import COARSEST_MPP, FINEST_MPP

pyvips.cache_set_max(0)  # its cache would keep pixels of closed slides
logging.getLogger("pyvips").setLevel(logging.ERROR)  # its warnings are handled below

Pixels = NDArray[np.uint8]  # (height, width, 3), red first

_TILE_BYTES = 325  # TIFF tag: TileByteCounts
_FAST_VENDORS = ("generic-tiff", "aperio")
_MAX_PAGES = 64  # of a TIFF whose pages are all opened by libvips
_LOADERS = {
    b"\x89PNG\r\n\x1a\n": "pngload",
    b"\xff\xd8\xff": "jpegload",
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "tiffload"),
}
"""The loaders of libvips for plain images, by the first bytes of a file."""


class ReadError(Exception):
    """Pixels that cannot be read. The message is the cause, for the middle of a sentence."""


@dataclass(frozen=True, kw_only=True)
class SlideMetadata:
    """What is known of a slide file once it is open. `fast`: libvips reads its pixels."""

    sizes: Sequence[tuple[int, int]]  # width and height of each level
    vendor: str
    properties: dict[str, str]
    fast: bool


class Reader(Protocol):
    """Reads blocks that lie inside a level."""

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels: ...

    def close(self) -> None: ...


class SlideFile:
    """A slide file, or a folder of DICOM files, that is open in this process.

    It may be read from several threads.
    """

    def __init__(self, path: Path, *, fast: bool = True) -> None:
        if path.is_dir():
            path = _in_dicom_folder(path)
        if openslide.OpenSlide.detect_format(path) is None:
            image = plain_image(path)
            sizes = [(image.width, image.height)]
            self._reader: Reader = VipsReader([image], reopen=lambda: [plain_image(path)])
            vendor, properties = "image", _scale_properties(image)
        else:
            slide = _open_openslide(path)
            sizes = list(slide.level_dimensions)
            properties = dict(slide.properties)
            vendor = properties.get("openslide.vendor", "unknown")
            self._reader = (fast_reader(slide, path) if fast else None) or OpenSlideReader(slide)
        self.metadata = SlideMetadata(
            sizes=sizes,
            vendor=vendor,
            properties=properties,
            fast=isinstance(self._reader, VipsReader),
        )

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """Return a block that lies inside a level; raise ReadError if it cannot be read."""
        try:
            return self._reader.fetch(level, x, y, width, height)
        except (openslide.OpenSlideError, pyvips.Error) as problem:
            raise ReadError(first_line(problem)) from problem

    def close(self) -> None:
        self._reader.close()


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
    """Reads with libvips. When it reports a problem, the block is checked.

    `fallback` reads it again; else `reopen` returns new images to read it from.
    """

    def __init__(
        self,
        images: Sequence[Any],
        *,
        fallback: Reader | None = None,
        reopen: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self.images = images
        self.fallback, self.reopen = fallback, reopen
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

    def _check(self, level: int, *area: int) -> None:
        """Raise if a block is damaged. The message that was found may be of another image."""
        if self.fallback is not None:
            self.fallback.fetch(level, *area)
            return
        region = pyvips.Region.new(self.reopen()[level]) if self.reopen else None
        before = _error_buffer.count_messages()
        if region is None or not region.fetch(*area) or _error_buffer.count_messages() != before:
            raise pyvips.Error("a part of it does not decode")


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
        count = pyvips.Image.tiffload(str(path), fail_on="warning").get("n-pages")
        pages = [
            pyvips.Image.tiffload(str(path), page=n, fail_on="warning")
            for n in range(min(count, _MAX_PAGES))
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
    """Return a PNG, JPEG, TIFF or BMP image as 8-bit RGB on white.

    libvips can read many other formats, whose headers are not checked, and some with libraries that
    are not made for files of strangers.
    """
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(b"BM"):
        return _bmp_image(path)
    loader = next((name for magic, name in _LOADERS.items() if start.startswith(magic)), None)
    if loader is None:
        raise _no_image(path, "it is not PNG, JPEG, TIFF or BMP")
    try:
        return as_rgb(getattr(pyvips.Image, loader)(str(path), fail_on="warning"))
    except pyvips.Error as problem:
        raise _no_image(path, first_line(problem)) from problem


def _bmp_image(path: Path) -> Any:
    """Return a BMP image, which libvips cannot read. It is decoded into memory as a whole."""
    try:
        with Image.open(path, formats=["BMP"]) as image:
            found = pyvips.Image.new_from_array(np.asarray(image.convert("RGB")))
            dpi = image.info.get("dpi")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
        raise _no_image(path, first_line(problem)) from problem
    if dpi and max(dpi) < 1e6:  # more is damage
        found = found.copy(xres=dpi[0] / 25.4, yres=dpi[1] / 25.4)
    return found.copy(interpretation="srgb")


def _no_image(path: Path, reason: str) -> SlideError:
    return SlideError(
        f"{path} is neither a slide that OpenSlide can read nor an image ({reason}). It may be "
        "damaged: copy it again, or convert it to a tiled TIFF."
    )


def as_rgb(image: Any) -> Any:
    """Return an image of libvips as 8-bit RGB on white, turned as its metadata says."""
    image = image.autorot()
    if image.hasalpha():
        image = image.flatten(background=255 if image.format == "uchar" else 65535)
    return image.colourspace("srgb")[:3].cast("uchar")


def _open_openslide(path: Path) -> openslide.OpenSlide:
    try:
        return openslide.OpenSlide(path)
    except openslide.OpenSlideError as problem:
        raise SlideError(
            f"{path} cannot be opened ({first_line(problem)}). It is damaged, truncated, or one "
            "of its files is missing. Copy it again."
        ) from problem


def _in_dicom_folder(folder: Path) -> Path:
    """Return one file of a folder of DICOM files, which must all belong to one slide."""
    files = sorted(folder.glob("*.dcm"))
    uids = set()
    for file in files:
        with _open_openslide(file) as slide:
            uids.add(slide.properties.get("dicom.SeriesInstanceUID"))
    if len(uids) > 1:
        raise SlideError(
            f"{folder} holds {len(uids)} DICOM series. Put each slide into a separate folder."
        )
    return files[0]


def _scale_properties(image: Any) -> dict[str, str]:
    """Return the scale of a plain image, if its resolution is plausible for a slide."""
    if not (image.xres > 0 and image.yres > 0):
        return {}
    scales = {"x": 1000 / image.xres, "y": 1000 / image.yres}  # libvips: pixels per mm
    if not all(FINEST_MPP <= scale <= COARSEST_MPP for scale in scales.values()):
        return {}  # e.g. 72 dpi, a print resolution
    return {f"openslide.mpp-{axis}": str(scale) for axis, scale in scales.items()}


def first_line(problem: Exception) -> str:
    """Return one line of an error message, without its full stop."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines[-1] if lines else type(problem).__name__).rstrip(".")
