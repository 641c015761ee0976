"""Placed slides: the slides of a patient side by side, in one picture and on one grid.

The patches of several sources of one slide are placed as those of several slides.
The picture has the pixels of its first slide. Others are scaled so that patches have the same size.
Of each slide the part with patches is shown, with a margin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from caprmil.features.bags import BagInfo

GAP = 2  # empty columns of the grid between slides: patches of two slides are never neighbours
MARGIN = 0.04  # around a slide and between slides, as a share of the largest side


@dataclass(frozen=True, kw_only=True)
class PlacedSlide:
    """A slide of a patient or a source of a slide, and its place beside the others."""

    name: str
    info: "BagInfo"
    """Of its own bag."""
    slide: str = ""
    """The slide of a patient's source."""
    source: int | None = None
    """The number of the source, if there are several."""
    column: int = 0
    """Of the grid, where the slide begins."""
    step: float | None = None
    """Distance of neighbouring patches; if it is not known, that of the other slides."""
    scale: float = 1.0
    """Pixels of the picture per unit of the slide's coordinates."""
    origin: tuple[float, float] = (0.0, 0.0)
    """Where the slide's (0, 0) is in the picture."""
    box: tuple[float, float, float, float] | None = None
    """Left, top, width and height in the picture. None if the slides have no coordinates."""

    def placed(self, coords: NDArray[Any]) -> NDArray[np.float64]:
        """Return coordinates of the slide in the picture."""
        return coords * self.scale + np.array(self.origin)

    def own(self, coords: NDArray[Any]) -> NDArray[Any]:
        """Return coordinates of the picture on the slide. Pixels are whole numbers again."""
        found = (coords - np.array(self.origin)) / self.scale
        whole = np.rint(found)
        return whole.astype(np.int64) if np.allclose(found, whole, rtol=0, atol=1e-3) else found


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """Slides side by side, the coordinates of all patches, and the facts of the picture."""

    slides: tuple[PlacedSlide, ...]
    coords: NDArray[np.float64] | None
    facts: dict[str, Any]
    """Fields of a `BagInfo`."""


def place_slides(
    names: Sequence[str], infos: Sequence["BagInfo"], coords: Sequence[NDArray[Any] | None]
) -> Placement:
    """Place slides side by side, in this order. Slides without coordinates have no picture."""
    slides = tuple(PlacedSlide(name=n, info=info) for n, info in zip(names, infos, strict=True))
    known = [own for own in coords if own is not None]
    first = infos[0]
    in_pixels = all(info.unit == "px" or info.slide_mpp for info in infos)
    if len(known) < len(slides) or not (in_pixels or all(info.unit == "um" for info in infos)):
        facts = dict.fromkeys(("unit", "step", "patch_level0", "slide_size", "slide_mpp"))
        return Placement(slides=slides, coords=None, facts=facts)
    scales = [_scale(first, info) if in_pixels else 1.0 for info in infos]
    steps = [info.step * s for info, s in zip(infos, scales, strict=True) if info.step is not None]
    step = steps[0] if steps else None
    side = (first.patch_level0 if in_pixels else None) or step or 0.0
    extents = [np.ptp(own, axis=0) * scale + side for own, scale in zip(known, scales, strict=True)]
    margin = max(side, MARGIN * float(np.max(extents)))
    placed, left, column = [], 0.0, 0
    for slide, own, scale, extent in zip(slides, known, scales, extents, strict=True):
        start = own.min(axis=0) * scale
        width, height = (extent + 2 * margin).tolist()
        own_step = slide.info.step or (step / scale if step else None)
        placed.append(
            PlacedSlide(
                name=slide.name,
                info=slide.info,
                column=column,
                step=own_step,
                scale=scale,
                origin=(float(left + margin - start[0]), float(margin - start[1])),
                box=(left, 0.0, width, height),
            )
        )
        left += width + margin
        column += int(own_cells(own, own_step or 1.0).max(axis=0)[0]) + 1 + GAP
    high = max(slide.box[3] for slide in placed if slide.box)
    size = (int(np.ceil(left - margin)), int(np.ceil(high)))
    return Placement(
        slides=tuple(placed),
        coords=np.concatenate([p.placed(own) for p, own in zip(placed, known, strict=True)]),
        facts={
            "unit": "px" if in_pixels else "um",
            "step": step,
            "patch_level0": first.patch_level0,
            "slide_size": size if in_pixels else None,
            "slide_mpp": first.slide_mpp,
        },
    )


def own_cells(coords: NDArray[Any], step: float) -> NDArray[np.int64]:
    """Return column and row of each patch on the grid of its slide, from 0."""
    return np.rint((coords - coords.min(axis=0)) / step).astype(np.int64)


def cells_side_by_side(
    coords: NDArray[Any], slide_of: NDArray[np.int64], slides: Sequence[PlacedSlide]
) -> NDArray[np.int64] | None:
    """Return column and row of each patch, with the grids of slides beside each other."""
    cells = np.zeros((len(coords), 2), dtype=np.int64)
    for number, slide in enumerate(slides):
        rows = np.flatnonzero(slide_of == number)
        if slide.step is None:
            return None
        if len(rows):
            cells[rows] = own_cells(slide.own(coords[rows]), slide.step)
            cells[rows, 0] += slide.column
    return cells


def _scale(first: "BagInfo", info: "BagInfo") -> float:
    """Return level-0 pixels of the first slide per unit of another one's coordinates."""
    if info.unit == "um":
        return 1 / (first.slide_mpp or info.slide_mpp or 1.0)
    if first.unit == "px":
        for name in ("patch_level0", "step"):
            one, other = getattr(first, name), getattr(info, name)
            if one and other:
                return float(one / other)
    return (info.slide_mpp or 1.0) / (first.slide_mpp or info.slide_mpp or 1.0)
