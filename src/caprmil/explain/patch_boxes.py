"""Patch boxes: where the patches of a bag are on the slide, and their pixels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import SlideError
from caprmil.features.bags import BagInfo
from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Slide


@dataclass(frozen=True, eq=False, kw_only=True)
class PatchBoxes:
    """The squares of patches on a slide, in level-0 pixels."""

    corners: NDArray[np.float64]  # (N, 2), top left, x and y
    side: float


def patch_boxes(info: BagInfo, coords: NDArray[Any] | None, mpp: float | None) -> PatchBoxes | None:
    """Return the boxes of patches in level-0 pixels; None if coordinates, size or scale miss."""
    if coords is None:
        return None
    scale = 1.0
    if info.unit == "um":
        mpp = mpp or info.slide_mpp
        if mpp is None:
            return None
        scale = 1 / mpp
    side = info.patch_level0 or (info.step * scale if info.step else None)
    if side is None:
        return None
    return PatchBoxes(corners=coords.astype(np.float64) * scale, side=float(side))


def why_no_boxes(info: BagInfo, coords: NDArray[Any] | None) -> str:
    """Return why a bag has no `patch_boxes`, as the end of a sentence about it."""
    if coords is None:
        return "has no coordinates"
    if info.unit == "um":
        return "has coordinates in micrometres, and the scale of the slide is not known"
    return "does not give the size of patches"


def read_patch(slide: Slide, boxes: PatchBoxes, row: int, px: int = 224) -> Pixels:
    """Return the pixels of one patch, resized to `px` on a side."""
    x, y = boxes.corners[row]
    return slide.read(float(x), float(y), boxes.side, px)


def open_slide(path: Path, info: BagInfo) -> Slide:
    """Open the slide that a bag was encoded from. Its scale may be unknown.

    A slide of another size raises SlideError.
    """
    slide = Slide(path, mpp=info.slide_mpp)
    if info.slide_size is not None and slide.size != info.slide_size:
        slide.close()
        raise SlideError(
            f"{path} is {slide.size[0]} x {slide.size[1]} pixels, but its bag was encoded from "
            f"{info.slide_size[0]} x {info.slide_size[1]}. Pass the right one: --slide."
        )
    if info.slide_mpp is None and slide.reported_mpp is None:  # pixels can be read at any scale
        slide.close()
        slide = Slide(path, mpp=1.0)
    return slide
