"""Slides in a row: the slides of a patient beside each other, read as one slide."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Level, Slide, Thumbnail


@dataclass(frozen=True, eq=False, kw_only=True)
class SlideInRow:
    """An open slide, and the part of the row in which it is shown."""

    slide: Slide
    scale: float
    """Level-0 pixels of the slide per pixel of the row."""
    origin: tuple[float, float]
    """Where the slide's (0, 0) is in the row."""
    box: tuple[float, float, float, float]
    """Left, top, width and height in the row."""

    def inside(self, start: float, step: float, n: int, axis: int) -> slice:
        """Return which of n pixels of width `step`, from `start` on, are in the box."""
        low, size = self.box[axis], self.box[axis + 2]
        centres = start + (np.arange(n) + 0.5) * step
        first, last = np.searchsorted(centres, [low, low + size]).tolist()
        return slice(first, last)


class SlideRow(Slide):
    """Slides beside each other, as one slide. Between them, and where one is missing, it is white.

    Coordinates are pixels of the row.
    """

    def __init__(
        self, name: str, slides: Sequence[SlideInRow], *, size: tuple[int, int], mpp: float | None
    ) -> None:
        self.name, self.slides, self._given = name, tuple(slides), mpp
        self.path = slides[0].slide.path
        shortest = min(slides, key=lambda each: each.slide.levels[-1].downsample / each.scale)
        shrinks = [max(level.downsample / shortest.scale, 1.0) for level in shortest.slide.levels]
        self.levels = tuple(
            Level(size=(ceil(size[0] / shrink), ceil(size[1] / shrink)), downsample=shrink)
            for shrink in dict.fromkeys([1.0, *shrinks])
        )
        self.vendor, self.properties, self.fast = "row", {}, False

    def __repr__(self) -> str:
        return f"SlideRow({self.name!r}: {len(self.slides)} slides)"

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(each.slide.path for each in self.slides)

    def close(self) -> None:
        """Close all slides."""
        for each in self.slides:
            each.slide.close()

    @cached_property
    def mpp(self) -> float:
        """Microns per pixel of the row: those of the first slide."""
        first = self.slides[0]
        return self._given if self._given is not None else first.slide.mpp * first.scale

    @cached_property
    def reported_mpp(self) -> float | None:
        first = self.slides[0]
        found = first.slide.reported_mpp
        return None if found is None else found * first.scale

    def read(self, x: float, y: float, side: float, px: int) -> Pixels:
        """Return the square of `side` pixels of the row at (x, y) as px x px pixels."""
        found = np.full((px, px, 3), 255, dtype=np.uint8)
        for each in self.slides:
            across, down = (each.inside(at, side / px, px, axis) for axis, at in enumerate((x, y)))
            if found[down, across].size:
                left, top = (at - zero for at, zero in zip((x, y), each.origin, strict=True))
                corner, wide = (left * each.scale, top * each.scale), side * each.scale
                part = each.slide.read(*corner, wide, px)
                found[down, across] = part[down, across]
        return found

    def thumbnail(self, mpp: float) -> Thumbnail:
        """Return the whole row at `mpp`, or at its own scale if that is coarser."""
        scale = max(mpp / self.mpp, 1.0)
        width, height = (ceil(side / scale) for side in self.size)
        image = np.full((height, width, 3), 255, dtype=np.uint8)
        for each in self.slides:
            across, down = each.inside(0, scale, width, 0), each.inside(0, scale, height, 1)
            small = each.slide.thumbnail(scale * each.scale * each.slide.mpp)
            image[down, across] = _cut(small, each, across, down, scale)
        return Thumbnail(image=image, scale=scale, mpp=scale * self.mpp)


def _cut(
    small: Thumbnail, each: SlideInRow, across: slice, down: slice, scale: float
) -> NDArray[np.uint8]:
    """Return the pixels of a row's thumbnail that are in the box of a slide."""
    ends = [
        (at * scale - zero) * each.scale / small.scale
        for span, zero in zip((across, down), each.origin, strict=True)
        for at in (span.start, span.stop)
    ]
    left, right, top, bottom = ends
    size = (across.stop - across.start, down.stop - down.start)
    return np.asarray(
        Image.fromarray(small.image).transform(
            size,
            Image.Transform.EXTENT,
            (left, top, right, bottom),
            Image.Resampling.BILINEAR,
            fillcolor="white",
        )
    )
