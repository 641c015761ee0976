"""Patches: the grid of squares on the tissue of a slide, and their pixels, read ahead."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import RecipeError, SlideError
from caprmil.slides.readers import Pixels
from caprmil.slides.scale import ScaleRule
from caprmil.slides.slide import Slide

MAGNIFICATIONS = ((0.16, 80), (0.2, 60), (0.3, 40), (0.6, 20), (1.2, 10), (2.4, 5))
"""The nominal rule's buckets: a slide below so many um/px counts as so many times magnified."""


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """How the grid is laid."""

    px: int = 224
    """Side of a patch as the encoder sees it."""
    mpp: float = 1.0
    """Microns per pixel of the patches; with the nominal rule, 10 / magnification."""
    scale_rule: ScaleRule = "exact"
    """exact: a patch has px * mpp microns. nominal: as TRIDENT has it, px * the magnification of
    the slide's bucket / the wanted one, in level-0 pixels. On a slide of 0.243 um/px, 10x patches
    then have 0.972 um/px, on one of 0.263, 1.052."""
    overlap: int = 0
    """Of neighbours, in pixels of a patch."""
    min_tissue: float = 0.25
    """Share of a patch that must be tissue."""

    def __post_init__(self) -> None:
        if self.px < 1 or not 0 <= self.overlap < self.px:
            raise RecipeError(
                f"Patches of {self.px} px that overlap by {self.overlap} make no grid. "
                "The overlap is less than the side."
            )
        if not 0.05 <= self.mpp <= 40:
            raise RecipeError(f"Patches of {self.mpp:g} um/px are none; 0.05 to 40 can be.")
        if not 0 <= self.min_tissue <= 1:
            raise RecipeError(f"The share of tissue is 0 to 1, not {self.min_tissue:g}.")
        if self.scale_rule not in get_args(ScaleRule):
            raise RecipeError(f"The scale rule is exact or nominal, not '{self.scale_rule}'.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Patches:
    """Squares of a slide, row by row. Lengths are level-0 pixels."""

    coords: NDArray[np.int64]  # (N, 2), top left, x and y
    tissue: NDArray[np.float64]  # (N,) share of each that is tissue
    px: int
    side: float
    step: float

    def __len__(self) -> int:
        return len(self.coords)


def side_level0(config: PatchConfig, slide: Slide) -> float:
    """Return how many level-0 pixels wide a patch is on a slide."""
    if config.scale_rule == "nominal":
        side = float(config.px * nominal_magnification(slide) // round(10 / config.mpp, 6))
    else:
        side = config.px * config.mpp / slide.mpp
    if side < config.px / 1.2:
        raise SlideError(
            f"{slide.path} has {slide.mpp:g} um/px and cannot show {config.mpp:g} um/px: the "
            "patches would be blown up. Ask for a coarser scale."
        )
    return side


def nominal_magnification(slide: Slide) -> int:
    """Return the magnification of the bucket that a slide's um/px falls into."""
    for below, magnification in MAGNIFICATIONS:
        if slide.mpp < below:
            return magnification
    raise SlideError(
        f"{slide.path} has {slide.mpp:g} um/px, which is beyond the nominal magnifications (up "
        f"to {MAGNIFICATIONS[-1][0]:g}). Use the exact scale rule."
    )


def lay_grid(slide: Slide, mask: NDArray[np.bool_], scale: float, config: PatchConfig) -> Patches:
    """Lay the grid on a slide and keep the squares with enough tissue.

    A pixel of the mask is `scale` level-0 pixels wide. The grid begins in the slide's corner and
    reaches over its far edges, where there is no tissue.
    """
    side = side_level0(config, slide)
    step = side * (1 - config.overlap / config.px)
    x, y = (step * np.arange(ceil(length / step), dtype=np.float64) for length in slide.size)
    share = _means(mask, x / scale, y / scale, side / scale)
    enough = share >= config.min_tissue if config.min_tissue else share > 0
    rows, columns = np.nonzero(enough)
    corners = np.rint(np.stack([x[columns], y[rows]], axis=1)).astype(np.int64)
    return Patches(coords=corners, tissue=share[enough], px=config.px, side=side, step=step)


def _means(
    mask: NDArray[np.bool_], x: NDArray[np.float64], y: NDArray[np.float64], side: float
) -> NDArray[np.float64]:
    """Return the mean of the mask over each square of a grid, (rows, columns).

    Along an axis, the running sum between two pixels is linear: exact for fractions of pixels.
    """
    sums = _between(mask.astype(np.float64), y, y + side)
    return _between(sums.T, x, x + side).T / side**2


def _between(
    values: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the sums of rows from `start` to `end`, fractions of rows counted as such."""
    running = np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])

    def upto(place: NDArray[np.float64]) -> NDArray[np.float64]:
        place = place.clip(0, len(values))
        whole = np.minimum(place.astype(np.int64), len(values) - 1)
        part = (place - whole)[:, None]
        return running[whole] * (1 - part) + running[whole + 1] * part

    return upto(end) - upto(start)


def read(slide: Slide, patches: Patches, *, batch: int = 32, workers: int = 2) -> Iterator[Pixels]:
    """Yield the pixels of the patches in order, (B, px, px, 3), read ahead by threads.

    No more than a few batches are in memory, however many patches there are.
    """

    def fetch(start: int) -> Pixels:
        corners = patches.coords[start : start + batch]
        return np.stack([slide.read(x, y, patches.side, patches.px) for x, y in corners.tolist()])

    waiting: deque[Future[Pixels]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="reader")
    try:
        for start in range(0, len(patches), batch):
            waiting.append(pool.submit(fetch, start))
            if len(waiting) > workers + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
