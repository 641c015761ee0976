"""Patches: the grid of squares on the tissue of a slide, and their pixels."""

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
"""Buckets of the nominal rule: upper bound in um/px (exclusive), magnification."""

LEFT_OUT = 0.1  # of a patch: a narrower rest of a picture is not covered


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """Settings of the patch grid."""

    px: int = 224
    """Side of a patch in pixels of the encoder's input."""
    mpp: float = 1.0
    """Microns per pixel of the patches; with the nominal rule, 10 / magnification."""
    scale_rule: ScaleRule = "exact"
    """exact: a patch is px * mpp microns wide. nominal: TRIDENT's rule, px * slide magnification
    / target magnification in level-0 pixels, with the magnification of the slide's bucket. 10x
    patches then have 0.972 um/px on a slide of 0.243 um/px, and 1.052 on a slide of 0.263."""
    overlap: int = 0
    """Overlap of neighbouring patches, in pixels of a patch."""
    min_tissue: float = 0.25
    """Minimum share of a patch that is tissue."""

    def __post_init__(self) -> None:
        if self.px < 1 or not 0 <= self.overlap < self.px:
            raise RecipeError(
                f"Patches of {self.px} px cannot overlap by {self.overlap} px. "
                "The side is at least 1, and the overlap is less than the side."
            )
        if not 0.05 <= self.mpp <= 40:
            raise RecipeError(f"mpp is {self.mpp:g} um/px; it must be between 0.05 and 40.")
        if not 0 <= self.min_tissue <= 1:
            raise RecipeError(f"min_tissue must be between 0 and 1, not {self.min_tissue:g}.")
        if self.scale_rule not in get_args(ScaleRule):
            raise RecipeError(f"scale_rule must be exact or nominal, not '{self.scale_rule}'.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Patches:
    """Squares of a slide in row-major order. Lengths are in level-0 pixels."""

    coords: NDArray[np.int64]  # (N, 2), top left, x and y
    tissue: NDArray[np.float64]  # (N,) share of tissue in each patch
    px: int
    side: float
    step: float

    def __len__(self) -> int:
        return len(self.coords)


def side_level0(config: PatchConfig, slide: Slide) -> float:
    """Return the side of a patch in level-0 pixels of a slide."""
    if config.scale_rule == "nominal":
        side = float(config.px * nominal_magnification(slide) // round(10 / config.mpp, 6))
    else:
        side = config.px * config.mpp / slide.mpp
    if side < config.px / 1.2:
        raise SlideError(
            f"{slide.path} has {slide.mpp:g} um/px, which is too coarse for patches of "
            f"{config.mpp:g} um/px. Choose a coarser scale with --mpp."
        )
    return side


def nominal_magnification(slide: Slide) -> int:
    """Return the magnification of the bucket of a slide's um/px."""
    for below, magnification in MAGNIFICATIONS:
        if slide.mpp < below:
            return magnification
    raise SlideError(
        f"{slide.path} has {slide.mpp:g} um/px; the nominal scale rule is defined below "
        f"{MAGNIFICATIONS[-1][0]:g} um/px. Use the exact scale rule."
    )


def lay_grid(slide: Slide, mask: NDArray[np.bool_], scale: float, config: PatchConfig) -> Patches:
    """Return the patches of a slide that have enough tissue.

    A pixel of the mask is `scale` level-0 pixels wide. The grid starts at the top left corner of
    the slide. The last row and column may extend beyond the slide, where there is no tissue.
    """
    side = side_level0(config, slide)
    step = side * (1 - config.overlap / config.px)
    x, y = (step * np.arange(ceil(length / step), dtype=np.float64) for length in slide.size)
    share = _grid_means(mask, x / scale, y / scale, side / scale)
    return _chosen(share, x, y, config, side=side, step=step)


def cover(slide: Slide, mask: NDArray[np.bool_], scale: float, config: PatchConfig) -> Patches:
    """Return patches that cover all of a picture, from edge to edge, where the mask is.

    They overlap more than the settings say, by as much as it takes for the last ones to end at the
    edge. Where less than a tenth of a patch would remain, it is left out on both sides instead. A
    patch of a picture that is smaller is white on the right and below.
    """
    side = side_level0(config, slide)
    step = side * (1 - config.overlap / config.px)
    spread = [_spread(length, side, step) for length in slide.size]
    x, y = (start + gap * np.arange(n, dtype=np.float64) for start, gap, n in spread)
    inside = _grid_means(np.ones_like(mask), x / scale, y / scale, side / scale)
    share = _grid_means(mask, x / scale, y / scale, side / scale) / inside
    gaps = [gap for _, gap, n in spread if n > 1]
    return _chosen(share, x, y, config, side=side, step=min(gaps, default=step))


def _spread(length: float, side: float, step: float) -> tuple[float, float, int]:
    """Return the first position, the distance and the number of patches along a side."""
    more = max(0, ceil((length - side - LEFT_OUT * side) / step))
    gap = min(step, (length - side) / more) if more else step
    return max(0.0, (length - side - more * gap) / 2), gap, more + 1


def _chosen(
    share: NDArray[np.float64],
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    config: PatchConfig,
    *,
    side: float,
    step: float,
) -> Patches:
    """Return the squares of a grid that have enough tissue."""
    enough = share >= config.min_tissue if config.min_tissue else share > 0
    rows, columns = np.nonzero(enough)
    corners = np.rint(np.stack([x[columns], y[rows]], axis=1)).astype(np.int64)
    return Patches(coords=corners, tissue=share[enough], px=config.px, side=side, step=step)


def _grid_means(
    mask: NDArray[np.bool_], x: NDArray[np.float64], y: NDArray[np.float64], side: float
) -> NDArray[np.float64]:
    """Return the mean of the mask over each square of a grid, (rows, columns).

    Squares may cut through pixels. The cumulative sum is linear within a pixel, so the mean is
    exact.
    """
    sums = _row_sums(mask.astype(np.float64), y, y + side)
    return _row_sums(sums.T, x, x + side).T / side**2


def _row_sums(
    values: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the sums of rows from `start` to `end`, with fractions of rows."""
    cumulative = np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])

    def sum_to(position: NDArray[np.float64]) -> NDArray[np.float64]:
        position = position.clip(0, len(values))
        row = np.minimum(position.astype(np.int64), len(values) - 1)
        fraction = (position - row)[:, None]
        return cumulative[row] * (1 - fraction) + cumulative[row + 1] * fraction

    return sum_to(end) - sum_to(start)


def read(slide: Slide, patches: Patches, *, batch: int = 32, workers: int = 2) -> Iterator[Pixels]:
    """Yield the pixels of the patches in order, (B, px, px, 3), prefetched by threads.

    At most `workers` + 2 batches are in memory.
    """

    def fetch(start: int) -> Pixels:
        corners = patches.coords[start : start + batch]
        return np.stack([slide.read(x, y, patches.side, patches.px) for x, y in corners.tolist()])

    pending: deque[Future[Pixels]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="reader")
    try:
        for start in range(0, len(patches), batch):
            pending.append(pool.submit(fetch, start))
            if len(pending) > workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
