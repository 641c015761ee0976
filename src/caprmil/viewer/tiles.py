"""Tiles: a slide as a pyramid of squares for deep zoom. Each zoom doubles the resolution.

OpenSlide's own tile generator reads one level too fine if the sizes of levels were rounded down:
four times the pixels for each tile (openslide #203, #274). `Slide.read` selects the right level.
"""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from math import ceil, log2

import numpy as np
from PIL import Image

from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Slide

TILE = 512  # pixels on a side
QUALITY = 80  # of JPEG
MAX_SHRINK = 4.1  # a tile is read from a region up to this factor larger; else joined from four

ReadTile = Callable[[int, int, int], Pixels]  # of zoom, x and y


@dataclass(frozen=True)
class Pyramid:
    """The addresses of tiles. Zoom 0 is the whole slide in one tile, `top` its full resolution."""

    width: int
    height: int

    @property
    def top(self) -> int:
        return max(0, ceil(log2(max(self.width, self.height) / TILE)))

    def scale(self, zoom: int) -> int:
        """Return how many level-0 pixels wide a pixel of a zoom is."""
        return 2 ** (self.top - zoom)

    def counts(self, zoom: int) -> tuple[int, int]:
        """Return the number of tiles in a row and in a column."""
        side = TILE * self.scale(zoom)
        return ceil(self.width / side), ceil(self.height / side)

    def has(self, zoom: int, x: int, y: int) -> bool:
        if not 0 <= zoom <= self.top:
            return False
        across, down = self.counts(zoom)
        return 0 <= x < across and 0 <= y < down

    def size(self, zoom: int, x: int, y: int) -> tuple[int, int]:
        """Return width and height of a tile. Tiles at the edges end with the slide."""
        scale = self.scale(zoom)
        wide, high = ceil(self.width / scale) - x * TILE, ceil(self.height / scale) - y * TILE
        return min(TILE, wide), min(TILE, high)


def tile(slide: Slide, zoom: int, x: int, y: int, *, child: ReadTile | None = None) -> Pixels:
    """Return an existing tile.

    If the slide has no level of about that scale, as in a plain image, the tile is made from the
    four tiles of the next zoom. So no request reads a region more than MAX_SHRINK tiles wide.
    `child` returns a tile of the next zoom, perhaps from a cache.
    """
    pyramid = Pyramid(*slide.size)
    wide, high = pyramid.size(zoom, x, y)
    scale = pyramid.scale(zoom)
    if not is_joined(slide, scale):
        side = TILE * scale
        return slide.read(x * side, y * side, side, TILE)[:high, :wide]

    def read_child(*address: int) -> Pixels:
        return tile(slide, *address, child=child)

    joined = np.full((2 * TILE, 2 * TILE, 3), 255, dtype=np.uint8)
    for down in (0, 1):
        for across in (0, 1):
            address = (zoom + 1, 2 * x + across, 2 * y + down)
            if pyramid.has(*address):
                part = (child or read_child)(*address)
                top, left = down * TILE, across * TILE
                joined[top : top + part.shape[0], left : left + part.shape[1]] = part
    means = joined.reshape(TILE, 2, TILE, 2, 3).mean(axis=(1, 3))
    return np.rint(means).astype(np.uint8)[:high, :wide]


def is_joined(slide: Slide, scale: float) -> bool:
    """Return whether a tile of a scale has to be joined, since no level is near that scale."""
    fine = [level.downsample for level in slide.levels if level.downsample <= 1.02 * scale]
    return scale > MAX_SHRINK * max(fine, default=1.0)


def jpeg(pixels: Pixels, quality: int = QUALITY) -> bytes:
    """Return pixels as a JPEG file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()
