"""Tiles: a slide as a pyramid of squares, each twice as coarse as the next, for deep zoom.

OpenSlide's own generator reads one level too fine where a pyramid was rounded down, four times the
pixels of each tile (openslide #203, #274). `Slide.read` knows which level is fine enough.
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
SHRINK = 4.1  # a tile is read from up to so many times its side; coarser ones are joined from four

Join = Callable[[int, int, int], Pixels]


@dataclass(frozen=True)
class Pyramid:
    """The addresses of tiles. Zoom 0 is the whole slide in one tile, `top` its full resolution."""

    width: int
    height: int

    @property
    def top(self) -> int:
        return max(0, ceil(log2(max(self.width, self.height) / TILE)))

    def scale(self, zoom: int) -> int:
        """Return how many level-0 pixels a pixel of that zoom is wide."""
        return 2 ** (self.top - zoom)

    def counts(self, zoom: int) -> tuple[int, int]:
        """Return how many tiles there are across and down."""
        side = TILE * self.scale(zoom)
        return ceil(self.width / side), ceil(self.height / side)

    def has(self, zoom: int, x: int, y: int) -> bool:
        if not 0 <= zoom <= self.top:
            return False
        across, down = self.counts(zoom)
        return 0 <= x < across and 0 <= y < down

    def size(self, zoom: int, x: int, y: int) -> tuple[int, int]:
        """Return width and height of a tile: those at the edges end with the slide."""
        scale = self.scale(zoom)
        wide, high = ceil(self.width / scale) - x * TILE, ceil(self.height / scale) - y * TILE
        return min(TILE, wide), min(TILE, high)


def tile(slide: Slide, zoom: int, x: int, y: int, *, child: Join | None = None) -> Pixels:
    """Return a tile that is there.

    Where a slide has no level near, as a plain image has none, a tile is the mean of the four
    below it (`child` gives these, perhaps kept): no request ever reads more than SHRINK tiles wide.
    """
    pyramid = Pyramid(*slide.size)
    wide, high = pyramid.size(zoom, x, y)
    scale = pyramid.scale(zoom)
    if not is_joined(slide, scale):
        side = TILE * scale
        return slide.read(x * side, y * side, side, TILE)[:high, :wide]

    def directly(*place: int) -> Pixels:
        return tile(slide, *place, child=child)

    whole = np.full((2 * TILE, 2 * TILE, 3), 255, dtype=np.uint8)
    for down in (0, 1):
        for across in (0, 1):
            place = (zoom + 1, 2 * x + across, 2 * y + down)
            if pyramid.has(*place):
                part = (child or directly)(*place)
                top, left = down * TILE, across * TILE
                whole[top : top + part.shape[0], left : left + part.shape[1]] = part
    quarters = whole.reshape(TILE, 2, TILE, 2, 3).mean(axis=(1, 3))
    return np.rint(quarters).astype(np.uint8)[:high, :wide]


def is_joined(slide: Slide, scale: float) -> bool:
    """Tell whether no level of a slide is near enough to a scale to be read at once."""
    fine = [level.downsample for level in slide.levels if level.downsample <= 1.02 * scale]
    return scale > SHRINK * max(fine, default=1.0)


def jpeg(pixels: Pixels, quality: int = QUALITY) -> bytes:
    """Return pixels as a JPEG file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()
