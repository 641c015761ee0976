"""The sizes that the header of an image file declares, checked before a library reads the file.

A few bytes can declare an image or a tile of any size, for which a library then allocates memory,
or which it decodes for hours. Only impossible sizes are errors here. Everything else that is wrong
with a file is left to the library that reads it.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import BinaryIO, NamedTuple

from caprmil.errors import SlideError

MAX_TILE_BYTES = 2**28
"""Of one decoded tile. Scanners write tiles of 0.2 to 3 MB."""

# Pixels per byte of a file, from a number of pixels on that takes seconds to decode. Tissue has
# less than 20 as JPEG, and blank areas about 100. A tiled file may leave out its blank tiles.
MAX_DENSITY, FREE_PIXELS = 100, 2**27
MAX_TILED_DENSITY, FREE_TILED_PIXELS = 1000, 2**28

MAX_PAGES = 1000  # of a TIFF that are checked
MAX_SEGMENTS = 10_000  # of a JPEG that are searched for its size

_WIDTH, _HEIGHT, _BITS, _SAMPLES = 256, 257, 258, 277  # tags of TIFF
_TILE_WIDTH, _TILE_HEIGHT = 322, 323
_HAMAMATSU = 65420  # NDPI: its offsets are not those of a TIFF
_VALUES = {3: "H", 4: "I", 16: "Q"}  # types of the tags above


class _Layout(NamedTuple):
    """How a TIFF writes its directories."""

    order: str
    offset: str
    entries: str  # their number
    entry: int  # bytes


def check_header(path: Path) -> None:
    """Raise SlideError if the header of a TIFF, PNG, JPEG or BMP file declares impossible sizes."""
    with suppress(struct.error, OSError), path.open("rb") as file:  # truncated, or not readable
        start, size = file.read(32), os.fstat(file.fileno()).st_size
        if start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
            for page in _tiff_pages(file, start, size):
                _check_page(path, page, size)
        elif found := _plain_size(file, start):
            _check_pixels(path, *found, size, MAX_DENSITY, FREE_PIXELS)


def _check_page(path: Path, page: Mapping[int, int], size: int) -> None:
    """Check one image of a TIFF."""
    width, height = page.get(_WIDTH, 0), page.get(_HEIGHT, 0)
    if _TILE_WIDTH not in page:
        _check_pixels(path, width, height, size, MAX_DENSITY, FREE_PIXELS)
        return
    wide, high = page[_TILE_WIDTH], page.get(_TILE_HEIGHT, 0)
    tile_bytes = wide * high * page.get(_SAMPLES, 1) * max(page.get(_BITS, 8), 8) // 8
    if not 0 < tile_bytes <= MAX_TILE_BYTES:
        raise SlideError(
            f"{path} declares tiles of {wide:,} x {high:,} pixels, which cannot be read. "
            "It is damaged. Copy it again, or convert it to a TIFF with tiles of 256 pixels."
        )
    tiles = ceil(width / wide) * ceil(height / high)
    if 4 * tiles > size + 64:  # each has an offset
        raise _impossible(path, width, height, size)
    _check_pixels(path, width, height, size, MAX_TILED_DENSITY, FREE_TILED_PIXELS)


def _check_pixels(path: Path, width: int, height: int, size: int, density: int, free: int) -> None:
    if width * height > max(free, density * size):
        raise _impossible(path, width, height, size)


def _impossible(path: Path, width: int, height: int, size: int) -> SlideError:
    return SlideError(
        f"{path} declares {width:,} x {height:,} pixels, but has {size:,} bytes. "
        "It is damaged or blank. Copy it again."
    )


def _tiff_pages(file: BinaryIO, start: bytes, size: int) -> Iterator[dict[int, int]]:
    """Yield the integer tags of each directory of a TIFF or BigTIFF."""
    order = "<" if start[:2] == b"II" else ">"
    big = b"+" in start[2:4]
    layout = _Layout(order, "Q", "Q", 20) if big else _Layout(order, "I", "H", 12)
    (position,) = _unpack(order + layout.offset, start[8 if big else 4 :])
    visited = {0}
    while position < size and position not in visited and len(visited) <= MAX_PAGES:
        visited.add(position)
        file.seek(position)
        (count,) = _read(file, order + layout.entries)
        entries = file.read(min(count, 2**16) * layout.entry)
        tags = dict(_integers(entries, layout))
        if _HAMAMATSU in tags:
            return
        yield tags
        (position,) = _read(file, order + layout.offset)


def _integers(entries: bytes, layout: _Layout) -> Iterator[tuple[int, int]]:
    """Yield number and first value of each tag of integers that are stored in the directory."""
    for at in range(0, len(entries) - layout.entry + 1, layout.entry):
        tag, kind, count = _unpack(layout.order + "HH" + layout.offset, entries[at:])
        value = entries[at + 4 + struct.calcsize("=" + layout.offset) : at + layout.entry]
        if kind in _VALUES and 0 < count * struct.calcsize("=" + _VALUES[kind]) <= len(value):
            yield tag, _unpack(layout.order + _VALUES[kind], value)[0]


def _plain_size(file: BinaryIO, start: bytes) -> tuple[int, int] | None:
    """Return width and height of a PNG, JPEG or BMP file, or None for other files."""
    if start[:8] == b"\x89PNG\r\n\x1a\n":
        width, height = _unpack(">II", start[16:])
        return width, height
    if start[:2] == b"BM":
        width, height = _unpack("<ii", start[18:])
        return abs(width), abs(height)
    return _jpeg_size(file) if start[:3] == b"\xff\xd8\xff" else None


def _jpeg_size(file: BinaryIO) -> tuple[int, int]:
    """Return the size in the frame header of a JPEG file, which follows other segments."""
    file.seek(2)
    for _ in range(MAX_SEGMENTS):
        marker, code = _read(file, ">BB")
        while code == 0xFF:  # padding
            (code,) = _read(file, ">B")
        if marker != 0xFF or code == 0xDA:  # no segment, or pixels without a frame header
            break
        (length,) = _read(file, ">H")
        if 0xC0 <= code <= 0xCF and code not in (0xC4, 0xC8, 0xCC):
            _, height, width = _read(file, ">BHH")
            return width, height
        file.seek(max(length, 2) - 2, os.SEEK_CUR)
    return 0, 0


def _read(file: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _unpack(form: str, data: bytes) -> tuple[int, ...]:
    return struct.unpack_from(form, data)
