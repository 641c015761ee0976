"""Tissue detection on a thumbnail, by optical density relative to the glass.

Steps: exclude areas that were not scanned; detect glass, which is smooth, bright and unstained;
fit its density as a smooth surface (flat field); mark as tissue what is denser than this surface,
is coloured and is not ink. Statistics are taken over the whole slide, sizes are in micrometres,
and the result is deterministic.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from caprmil.errors import RecipeError, SlideError

Mask: TypeAlias = NDArray[np.bool_]
Density: TypeAlias = NDArray[np.float32]  # optical density, (3, height, width)


@dataclass(frozen=True, kw_only=True)
class TissueConfig:
    """Settings of tissue detection. The defaults work for biopsies and resections."""

    mpp: float = 8.0
    """Micrometres per pixel of the thumbnail."""
    min_density: float = 0.025
    """Minimum optical density of tissue above glass. It is raised on noisy slides."""
    min_area_um2: float = 10_000.0
    """Minimum area of a tissue component. The default is about the area of one patch."""
    max_hole_um2: float = 40_000.0
    """Smaller holes are filled, e.g. fat cells and small lumina."""
    closing_um: float = 40.0
    """Narrower gaps are closed."""
    reject_ink: bool = True
    """Exclude ink. Switch it off for blue or green stains such as trichrome."""
    ink_width_um: float = 100.0
    """Minimum width of a pen stroke. Pigment and inked tissue margins are mostly narrower."""

    def __post_init__(self) -> None:
        for name in ("mpp", "min_density"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"{name} must be more than 0, not {getattr(self, name)}.")
        for name in ("min_area_um2", "max_hole_um2", "closing_um", "ink_width_um"):
            if not getattr(self, name) >= 0:
                raise RecipeError(f"{name} must be 0 or more, not {getattr(self, name)}.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Tissue:
    """A tissue mask, with the detected pen marks and flags for review."""

    mask: Mask
    mpp: float
    pen: Mask  # detected ink
    flags: tuple[str, ...]  # any of "no tissue", "no glass", "pen", "faint"

    @property
    def area_mm2(self) -> float:
        """Return the area of the tissue in square millimetres."""
        return float(self.mask.sum()) * (self.mpp / 1000) ** 2


DEFAULT = TissueConfig()
MOST_INK = 1 / 3  # share of an image; a colour that covers more is that of the tissue


def find(thumbnail: NDArray[np.uint8], mpp: float, config: TissueConfig = DEFAULT) -> Tissue:
    """Return the tissue on a thumbnail of `mpp` micrometres per pixel."""
    if thumbnail.ndim != 3 or thumbnail.shape[2] != 3 or thumbnail.dtype != np.uint8:
        raise ValueError(f"{thumbnail.shape=} {thumbnail.dtype=}, not (h, w, 3) of uint8")
    if not mpp > 0 or not thumbnail.size:
        raise SlideError(f"Tissue cannot be detected with {mpp=} and {thumbnail.shape=}.")

    image = np.ascontiguousarray(thumbnail.transpose(2, 0, 1))
    density = _density(image)
    black, white = _unscanned(image, mpp)
    outside = black | white
    glass = _glass(density, outside)
    if glass.any():
        surface, glass = _flat_field(density, glass)
        density -= surface
    elif white.any():  # some scanners render glass as pure white
        glass = white
    else:
        density -= _exposure(density, outside)
    # A slight blur reduces noise and JPEG blocks.
    density = np.stack([ndimage.gaussian_filter(channel, 0.8) for channel in density])
    pen = coloured = np.zeros_like(outside)
    if config.reject_ink:
        pen, coloured = _ink(density, outside, glass, mpp, config)
    if not glass.any():
        return _result(~pen & ~outside, pen, mpp, density, "no glass")
    mask = _stained(density, glass, config) & ~outside & ~pen
    mask = _clean(mask, pen | outside, mpp, config)
    mask = _overlapping(_at_least(mask, config.min_area_um2 / mpp**2), ~coloured, 0.5)
    return _result(mask, pen, mpp, density)


def everywhere(thumbnail: NDArray[np.uint8], mpp: float) -> Tissue:
    """Return all of a thumbnail as tissue."""
    shape = thumbnail.shape[:2]
    return Tissue(mask=np.ones(shape, bool), mpp=mpp, pen=np.zeros(shape, bool), flags=())


def _result(mask: Mask, pen: Mask, mpp: float, density: Density, *flags: str) -> Tissue:
    if not mask.any():
        flags += ("no tissue",)
    elif np.median(density.max(axis=0)[mask]) < 0.08:
        flags += ("faint",)
    if pen.any():
        flags += ("pen",)
    return Tissue(mask=mask, mpp=mpp, pen=pen, flags=flags)


def _density(image: NDArray[np.uint8]) -> Density:
    """Return the optical density relative to pure white."""
    table = -np.log10((np.arange(256) + 1) / 256)
    return table.astype(np.float32)[image]


def _unscanned(image: NDArray[np.uint8], mpp: float) -> tuple[Mask, Mask]:
    """Return masks of pure black and pure white areas, including resampled borders."""
    side = _odd(60 / mpp)
    most, least = image.max(axis=0), image.min(axis=0)
    black, white = (
        _dilate(_open(part, side), _odd(side + 2)) for part in (most <= 10, least >= 253)
    )
    return black & (most < 200), white & (least >= 250)


def _glass(density: Density, outside: Mask) -> Mask:
    """Return a mask of glass candidates: smooth, bright and unstained. It may be empty.

    Glass is smoother than tissue: the density of tissue varies by 0.1 or more between cells, that
    of glass only by noise, whatever its tint.
    """
    inside = ~_dilate(outside, 9)  # JPEG ringing at a frame
    lightness = density.mean(axis=0)
    _, spread = _local_stats(lightness)
    floor = np.percentile(spread[inside][::7], 10) if inside.any() else 0.0
    limit = np.clip(2.5 * floor, 0.005, 0.008)
    red, green, blue = density
    unstained = (density.max(axis=0) < 0.35) & (green - (red + blue) / 2 < 0.07)
    glass = _open((spread < limit) & inside, 5) & unstained
    # Smooth spots in tissue are not glass: they are few, or less smooth than glass, or there are
    # brighter areas on the slide.
    few = 0.002 * inside.sum()
    if glass.sum() < max(64, few) or np.median(spread[glass]) > 0.6 * limit:
        return np.zeros_like(glass)
    brighter = (lightness < np.quantile(lightness[glass], 0.02) - 0.02) & inside
    # JPEG ringing at ink also gives a few bright pixels, so allow a share of the glass.
    return glass & (brighter.sum() <= max(few, 0.02 * glass.sum()))


def _local_stats(values: Density) -> tuple[Density, Density]:
    """Return local mean and standard deviation (5 x 5)."""
    mean = ndimage.uniform_filter(values, 5)
    return mean, np.sqrt(np.maximum(ndimage.uniform_filter(values**2, 5) - mean**2, 0))


EXPONENTS = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))  # of the row and column coordinate
Numbers: TypeAlias = NDArray[np.float64]


def _flat_field(density: Density, glass: Mask) -> tuple[Density, Mask]:
    """Return the fitted density of glass over the slide, and the glass pixels that agree with it.

    Glass is the lower bound of density. Each iteration drops blocks that are denser than the fit,
    with a decreasing tolerance, so that pale tissue among the candidates is removed.
    """
    positions, weights, samples = _block_means(density, glass)
    terms = np.stack([positions[0] ** i * positions[1] ** j for i, j in EXPONENTS], axis=1)
    lightness = samples.mean(axis=1)
    kept = lightness < np.quantile(lightness, 0.05) + 0.2
    for tolerance in (0.10, 0.06, 0.04, 0.03, 0.02, 0.015, 0.015, 0.015):
        coefficients = _ridge(terms[kept], samples[kept], weights[kept])
        kept = lightness - (terms @ coefficients).mean(axis=1) < tolerance

    surface = np.zeros_like(density)
    down, across = (_normalise_axis(side, np.arange(side) + 0.5) for side in glass.shape)
    for channel, fitted in enumerate(surface):
        for (i, j), coefficient in zip(EXPONENTS, coefficients[:, channel], strict=True):
            fitted += np.outer(coefficient * down**i, across**j).astype(np.float32)
        observed = samples[kept, channel]  # limits extrapolation where there is little glass
        np.clip(fitted, observed.min() - 0.01, observed.max() + 0.01, out=fitted)
    return surface, glass & ((density - surface).mean(axis=0) < 0.02)


def _normalise_axis(side: int, pixels: NDArray[Any]) -> Numbers:
    """Return pixel coordinates of a side, scaled to -1 to 1."""
    return 2 * pixels / side - 1


def _block_means(density: Density, glass: Mask) -> tuple[Numbers, Numbers, Numbers]:
    """Return position, pixel count and mean density of glass in blocks, about 160 per side."""
    step = -(-max(glass.shape) // 160)
    starts = [np.arange(0, side, step) for side in glass.shape]

    def total(values: NDArray[np.float32]) -> Numbers:
        by_row = np.add.reduceat(values, starts[0], axis=0, dtype=np.float64)
        return np.add.reduceat(by_row, starts[1], axis=1)

    counts = total(glass.astype(np.float32))
    filled = counts > 0
    means = np.stack(
        [total(channel * glass)[filled] / counts[filled] for channel in density], axis=1
    )
    centres = [
        _normalise_axis(side, np.float64(step / 2) + start)
        for side, start in zip(glass.shape, starts, strict=True)
    ]
    positions = np.stack([grid[filled] for grid in np.meshgrid(*centres, indexing="ij")])
    return positions, counts[filled], means


def _ridge(terms: Numbers, values: Numbers, weights: Numbers) -> Numbers:
    """Return weighted least-squares coefficients; a ridge penalty on all but the constant."""
    weights = weights[:, None] / weights.sum()
    mean = (weights * values).sum(axis=0)
    penalty = np.diag([1e-9] + [1e-3] * (terms.shape[1] - 1))
    fitted: Numbers = np.linalg.solve(
        terms.T @ (weights * terms) + penalty, terms.T @ (weights * (values - mean))
    )
    fitted[0] += mean
    return fitted


def _ink(
    density: Density, outside: Mask, glass: Mask, mpp: float, config: TissueConfig
) -> tuple[Mask, Mask]:
    """Return masks of pen strokes, and of all pixels with the colour of ink.

    H&E absorbs green most and DAB blue most, while blue and green ink absorb red most. Black ink
    absorbs all channels equally, and red ink absorbs no red. Dense tissue and blood may do the
    same, but are less uniform than ink. Red ink must also be next to glass. A red that covers a
    third of the image, and without glass any colour that does, is that of the tissue.
    """
    red, green, blue = density
    most, least = density.max(axis=0), density.min(axis=0)
    mean, spread = _local_stats(density.mean(axis=0))
    inked = {
        "cool": ((red > 1.3 * green) & (red > 0.15)) | ((red > 1.08 * green) & (red > 0.6)),
        "black": (least > 0.6 * most) & (most > 0.45),
        "warm": (blue > 0.72 * green) & (red < 0.35 * green) & (green > 0.25),
    }
    if not glass.any() and not outside.all():  # black ink is darker than tissue in all channels
        inked["black"] &= least > np.median(least[~outside]) + 0.4
    # Weaker rules for the edges of a stroke, and for ink over stained tissue.
    faded = {
        "cool": ((red > 1.15 * green) & (red > 0.05)) | ((red > 0.85 * green) & (red > 0.6)),
        "black": (least > 0.6 * most) & (most > 0.08),
        "warm": (blue > 0.6 * green) & (red < 0.45 * green) & (green > 0.06),
    }
    width, reach = _odd(config.ink_width_um / mpp), _odd(600 / mpp)
    pen, coloured = np.zeros_like(outside), np.zeros_like(outside)
    for name in inked:
        of_tissue = (faded[name] & ~outside).sum() > MOST_INK * (~outside).sum()
        if of_tissue and (name == "warm" or not glass.any()):
            continue
        ink = inked[name] & ~outside
        core = _open(ink, width)
        if name != "cool":
            core = ink = _overlapping(core, spread < 0.05 * mean, 0.3)
        if name == "warm":
            core = ink = _next_to(core, most < config.min_density, _odd(200 / mpp))
        pen |= core | (_dilate(core, reach) & (ink | faded[name]))
        coloured |= ink
    if pen.any():
        pen = _dilate(_close(_open(pen, 3), width), _odd(48 / mpp)) & ~outside
    return pen, coloured | pen


def _exposure(density: Density, outside: Mask) -> np.float32:
    """Return the density that all channels have in common in the palest tissue.

    Without glass it is not known how bright the light was. In a dark image, all colours would look
    like black ink.
    """
    least = density.min(axis=0)[~outside]
    return np.float32(np.percentile(least, 1) if least.size else 0)


def _next_to(mask: Mask, other: Mask, reach: int) -> Mask:
    """Return the components of a mask that have enough of another mask around them."""
    labels, count = ndimage.label(mask)
    if not count:
        return mask
    border = _dilate(mask, reach) & ~mask
    nearest = ndimage.grey_dilation(labels, size=(reach, reach))
    around = np.bincount(nearest[border], minlength=count + 1)
    free = np.bincount(nearest[border], other[border], minlength=count + 1)
    return (free > 0.2 * around)[labels] & mask


def _stained(density: Density, glass: Mask, config: TissueConfig) -> Mask:
    """Return a mask of pixels that are denser than glass and noise, and not grey."""
    most, least = density.max(axis=0), density.min(axis=0)
    noise = most[glass]
    noise = 1.4826 * np.median(np.abs(noise - np.median(noise)))
    threshold = np.clip(6 * noise, config.min_density, 3 * config.min_density)
    # The edge of tissue is where density falls to a quarter of the local maximum.
    edge = 0.25 * ndimage.maximum_filter(most, 5)
    # Coverslip edges, air and dust absorb all channels equally. Stains do not.
    weak = (most > np.maximum(threshold, edge)) & (most - least > 0.15 * most)
    labels, count = ndimage.label(weak, structure=np.ones((3, 3)))
    strong = np.bincount(labels[most > 2 * threshold], minlength=count + 1) > 0
    strong[0] = False
    return strong[labels]


def _clean(mask: Mask, excluded: Mask, mpp: float, config: TissueConfig) -> Mask:
    """Return a mask with gaps and small holes filled, without thin parts and `excluded`."""
    mask = _close(mask, _odd(config.closing_um / mpp))
    holes = ~mask & ~_at_least(~mask, config.max_hole_um2 / mpp**2)
    return _open((mask | holes) & ~excluded, 3)


def _at_least(mask: Mask, pixels: float) -> Mask:
    """Return the components of a mask with at least `pixels` pixels."""
    labels, _ = ndimage.label(mask)
    kept = np.bincount(labels.ravel()) >= max(pixels, 1)
    kept[0] = False
    return kept[labels]


def _overlapping(mask: Mask, other: Mask, share: float) -> Mask:
    """Return the components of a mask of which at least a `share` lies in another mask."""
    labels, count = ndimage.label(mask)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    kept = np.bincount(labels[other], minlength=count + 1) >= share * sizes
    kept[0] = False
    return kept[labels]


def _odd(pixels: float) -> int:
    """Return the nearest odd number of pixels."""
    return 2 * round(pixels / 2) + 1


# Square structuring elements: separable, so the time does not depend on their size.
def _dilate(mask: Mask, side: int) -> Mask:
    return ndimage.maximum_filter(mask, side, mode="constant", cval=0) if mask.any() else mask


def _erode(mask: Mask, side: int) -> Mask:
    return ndimage.minimum_filter(mask, side, mode="constant", cval=1) if mask.any() else mask


def _open(mask: Mask, side: int) -> Mask:
    return _dilate(_erode(mask, side), side)


def _close(mask: Mask, side: int) -> Mask:
    return _erode(_dilate(mask, side), side)
