"""Where tissue is on a slide, found on a thumbnail by how much light it takes from the glass.

The steps: what was not scanned is set aside; glass is what is quiet, bright and not dyed; its
colour is fitted as a surface that changes slowly over the slide (the flat field); what absorbs
more than that surface, is coloured, and is not ink, is tissue. Statistics are those of the whole
slide, sizes are in micrometres, and nothing is random.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from caprmil.errors import RecipeError, SlideError

Mask: TypeAlias = NDArray[np.bool_]
Density: TypeAlias = NDArray[np.float32]  # optical density; red, green, blue come first, for speed


@dataclass(frozen=True, kw_only=True)
class TissueConfig:
    """How tissue is looked for. The defaults are meant to hold from biopsy to resection."""

    mpp: float = 8.0
    """Micrometres per pixel of the thumbnail that tissue is looked for on."""
    min_density: float = 0.025
    """Least optical density over the glass that counts as tissue; noise may ask for more."""
    min_area_um2: float = 10_000.0
    """Tissue smaller than this is dropped. The default is about the area of one patch."""
    max_hole_um2: float = 40_000.0
    """Holes smaller than this are tissue, as fat cells and small lumina are."""
    closing_um: float = 40.0
    """Gaps narrower than this are tissue."""
    reject_ink: bool = True
    """Take ink out. Turn it off for stains that are blue or green themselves, such as trichrome."""
    ink_width_um: float = 100.0
    """Ink is never narrower than this; pigment and dyed margins of tissue mostly are."""

    def __post_init__(self) -> None:
        for name in ("mpp", "min_density"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"{name} must be more than 0, not {getattr(self, name)}.")
        for name in ("min_area_um2", "max_hole_um2", "closing_um", "ink_width_um"):
            if not getattr(self, name) >= 0:
                raise RecipeError(f"{name} must be 0 or more, not {getattr(self, name)}.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Tissue:
    """Where tissue is, and what one should know about the answer."""

    mask: Mask
    mpp: float
    pen: Mask  # what was taken for ink
    flags: tuple[str, ...]  # of "no tissue", "no glass", "pen", "faint"

    @property
    def area_mm2(self) -> float:
        """Return the area of the tissue in square millimetres."""
        return float(self.mask.sum()) * (self.mpp / 1000) ** 2


DEFAULT = TissueConfig()


def find(thumbnail: NDArray[np.uint8], mpp: float, config: TissueConfig = DEFAULT) -> Tissue:
    """Find the tissue on a thumbnail of `mpp` micrometres per pixel; the mask has its shape."""
    if thumbnail.ndim != 3 or thumbnail.shape[2] != 3 or thumbnail.dtype != np.uint8:
        raise ValueError(f"{thumbnail.shape=} {thumbnail.dtype=}, not (h, w, 3) of uint8")
    if not mpp > 0 or not thumbnail.size:
        raise SlideError(f"Tissue cannot be found at {mpp=} on {thumbnail.shape=}.")

    image = np.ascontiguousarray(thumbnail.transpose(2, 0, 1))
    density = _density(image)
    black, white = _unscanned(image, mpp)
    outside = black | white
    glass = _glass(density, outside)
    if glass.any():
        surface, glass = _flat_field(density, glass)
        density -= surface
    elif white.any():  # glass as some scanners give it, or all there is of it: pure white
        glass = white
    # Half a pixel of blur or so: less noise, and the blocks of a JPEG run into each other.
    density = np.stack([ndimage.gaussian_filter(channel, 0.8) for channel in density])
    pen = coloured = np.zeros_like(outside)
    if config.reject_ink:
        pen, coloured = _ink(density, outside, mpp, config)
    if not glass.any():
        return _answer(~pen & ~outside, pen, mpp, density, "no glass")
    mask = _stained(density, glass, config) & ~outside & ~pen
    mask = _tidy(mask, pen | outside, mpp, config)
    mask = _partly(_sized(mask, config.min_area_um2 / mpp**2), ~coloured, 0.5)
    return _answer(mask, pen, mpp, density)


def _answer(mask: Mask, pen: Mask, mpp: float, density: Density, *flags: str) -> Tissue:
    if not mask.any():
        flags += ("no tissue",)
    elif np.median(density.max(axis=0)[mask]) < 0.08:
        flags += ("faint",)
    if pen.any():
        flags += ("pen",)
    return Tissue(mask=mask, mpp=mpp, pen=pen, flags=flags)


def _density(image: NDArray[np.uint8]) -> Density:
    """Return the optical density against pure white."""
    table = -np.log10((np.arange(256) + 1) / 256)
    return table.astype(np.float32)[image]


def _unscanned(image: NDArray[np.uint8], mpp: float) -> tuple[Mask, Mask]:
    """Return what is pure black and what is pure white, with the fringe that resampling made."""
    side = _odd(60 / mpp)
    most, least = image.max(axis=0), image.min(axis=0)
    black, white = (
        _spread(_opened(part, side), _odd(side + 2)) for part in (most <= 10, least >= 253)
    )
    return black & (most < 200), white & (least >= 250)


def _glass(density: Density, outside: Mask) -> Mask:
    """Return what may be glass: it is quiet, bright and not dyed. It may be nowhere.

    Tissue is never as quiet as glass: its optical density varies by a tenth or more from one
    cell to the next, while that of glass varies by the noise alone, whatever its tint.
    """
    inside = ~_spread(outside, 9)  # a JPEG rings beside a frame
    lightness = density.mean(axis=0)
    _, spread = _local(lightness)
    floor = np.percentile(spread[inside][::7], 10) if inside.any() else 0.0
    limit = np.clip(2.5 * floor, 0.005, 0.008)
    red, green, blue = density
    undyed = (density.max(axis=0) < 0.35) & (green - (red + blue) / 2 < 0.07)
    glass = _opened((spread < limit) & inside, 5) & undyed
    # Even spots in tissue are no glass: they are few, or the quiet end of something that is not
    # quiet, or there are brighter things about.
    few = 0.002 * inside.sum()
    if glass.sum() < max(64, few) or np.median(spread[glass]) > 0.6 * limit:
        return np.zeros_like(glass)
    brighter = (lightness < np.quantile(lightness[glass], 0.02) - 0.02) & inside
    # A JPEG rings beside ink: where there is much glass, a few bright pixels say nothing.
    return glass & (brighter.sum() <= max(few, 0.02 * glass.sum()))


def _local(values: Density) -> tuple[Density, Density]:
    """Return mean and standard deviation around each pixel."""
    mean = ndimage.uniform_filter(values, 5)
    return mean, np.sqrt(np.maximum(ndimage.uniform_filter(values**2, 5) - mean**2, 0))


POWERS = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))  # of a place down and across
Numbers: TypeAlias = NDArray[np.float64]


def _flat_field(density: Density, glass: Mask) -> tuple[Density, Mask]:
    """Fit the density of glass over the slide; return it, and the glass that agrees with it.

    Glass is the lower bound of density, so the fit forgives what is brighter and drops what is
    darker, more strictly in each round: pale tissue that looked like glass falls out.
    """
    places, weights, samples = _blocks(density, glass)
    terms = np.stack([places[0] ** i * places[1] ** j for i, j in POWERS], axis=1)
    lightness = samples.mean(axis=1)
    kept = lightness < np.quantile(lightness, 0.05) + 0.2
    for tolerance in (0.10, 0.06, 0.04, 0.03, 0.02, 0.015, 0.015, 0.015):
        coefficients = _ridge(terms[kept], samples[kept], weights[kept])
        kept = lightness - (terms @ coefficients).mean(axis=1) < tolerance

    surface = np.zeros_like(density)
    down, across = (_places(side, np.arange(side) + 0.5) for side in glass.shape)
    for channel, fitted in enumerate(surface):
        for (i, j), coefficient in zip(POWERS, coefficients[:, channel], strict=True):
            fitted += np.outer(coefficient * down**i, across**j).astype(np.float32)
        seen = samples[kept, channel]  # the surface must not stray from it where glass is rare
        np.clip(fitted, seen.min() - 0.01, seen.max() + 0.01, out=fitted)
    return surface, glass & ((density - surface).mean(axis=0) < 0.02)


def _places(side: int, pixels: NDArray[Any]) -> Numbers:
    """Return pixels along a side as places from -1 to 1."""
    return 2 * pixels / side - 1


def _blocks(density: Density, glass: Mask) -> tuple[Numbers, Numbers, Numbers]:
    """Return place, amount and mean density of glass in blocks, some 160 along the longer side."""
    step = -(-max(glass.shape) // 160)
    starts = [np.arange(0, side, step) for side in glass.shape]

    def total(values: NDArray[np.float32]) -> Numbers:
        by_row = np.add.reduceat(values, starts[0], axis=0, dtype=np.float64)
        return np.add.reduceat(by_row, starts[1], axis=1)

    amounts = total(glass.astype(np.float32))
    some = amounts > 0
    means = np.stack([total(channel * glass)[some] / amounts[some] for channel in density], axis=1)
    middles = [
        _places(side, np.float64(step / 2) + start)
        for side, start in zip(glass.shape, starts, strict=True)
    ]
    places = np.stack([grid[some] for grid in np.meshgrid(*middles, indexing="ij")])
    return places, amounts[some], means


def _ridge(terms: Numbers, values: Numbers, weights: Numbers) -> Numbers:
    """Fit by least squares, with slopes held back where too little glass speaks for them."""
    weights = weights[:, None] / weights.sum()
    middle = (weights * values).sum(axis=0)
    penalty = np.diag([1e-9] + [1e-3] * (terms.shape[1] - 1))
    fitted: Numbers = np.linalg.solve(
        terms.T @ (weights * terms) + penalty, terms.T @ (weights * (values - middle))
    )
    fitted[0] += middle
    return fitted


def _ink(density: Density, outside: Mask, mpp: float, config: TissueConfig) -> tuple[Mask, Mask]:
    """Return strokes of pen, and all that has the colour of ink, however small.

    H&E takes green most and DAB blue most, while blue and green ink take red most. Black ink takes
    all alike, and red ink takes no red; so may dense tissue and blood, but never as evenly as ink.
    Red must lie beside glass as well.
    """
    red, green, blue = density
    most, least = density.max(axis=0), density.min(axis=0)
    mean, spread = _local(density.mean(axis=0))
    inked = {
        "cool": ((red > 1.3 * green) & (red > 0.15)) | ((red > 1.08 * green) & (red > 0.6)),
        "black": (least > 0.6 * most) & (most > 0.45),
        "warm": (blue > 0.72 * green) & (red < 0.35 * green) & (green > 0.25),
    }
    # Ink fades towards its edge, and mixes with the dyes of tissue below it.
    faded = {
        "cool": ((red > 1.15 * green) & (red > 0.05)) | ((red > 0.85 * green) & (red > 0.6)),
        "black": (least > 0.6 * most) & (most > 0.08),
        "warm": (blue > 0.6 * green) & (red < 0.45 * green) & (green > 0.06),
    }
    width, reach = _odd(config.ink_width_um / mpp), _odd(600 / mpp)
    pen, coloured = np.zeros_like(outside), np.zeros_like(outside)
    for name in inked:
        ink = inked[name] & ~outside
        core = _opened(ink, width)
        if name != "cool":
            core = ink = _partly(core, spread < 0.05 * mean, 0.3)
        if name == "warm":
            core = ink = _beside(core, most < config.min_density, _odd(200 / mpp))
        pen |= core | (_spread(core, reach) & (ink | faded[name]))
        coloured |= ink
    if pen.any():
        pen = _spread(_closed(_opened(pen, 3), width), _odd(48 / mpp)) & ~outside
    return pen, coloured | pen


def _beside(mask: Mask, other: Mask, reach: int) -> Mask:
    """Return the parts of a mask with enough of the other around them."""
    labels, count = ndimage.label(mask)
    if not count:
        return mask
    rim = _spread(mask, reach) & ~mask
    nearest = ndimage.grey_dilation(labels, size=(reach, reach))
    around = np.bincount(nearest[rim], minlength=count + 1)
    free = np.bincount(nearest[rim], other[rim], minlength=count + 1)
    return (free > 0.2 * around)[labels] & mask


def _stained(density: Density, glass: Mask, config: TissueConfig) -> Mask:
    """Return what absorbs more than glass and noise do, and is no mere shade of grey."""
    most, least = density.max(axis=0), density.min(axis=0)
    noise = most[glass]
    noise = 1.4826 * np.median(np.abs(noise - np.median(noise)))
    threshold = np.clip(6 * noise, config.min_density, 3 * config.min_density)
    # An edge lies where density has fallen to a part of its value nearby, as lenses blur it.
    edge = 0.25 * ndimage.maximum_filter(most, 5)
    # Edges of coverslips, air and dust take all colours alike. No dye does.
    weak = (most > np.maximum(threshold, edge)) & (most - least > 0.15 * most)
    labels, count = ndimage.label(weak, structure=np.ones((3, 3)))
    strong = np.bincount(labels[most > 2 * threshold], minlength=count + 1) > 0
    strong[0] = False
    return strong[labels]


def _tidy(mask: Mask, barred: Mask, mpp: float, config: TissueConfig) -> Mask:
    """Close gaps and fill small holes, but not with what is barred; drop hairs."""
    mask = _closed(mask, _odd(config.closing_um / mpp))
    holes = ~mask & ~_sized(~mask, config.max_hole_um2 / mpp**2)
    return _opened((mask | holes) & ~barred, 3)


def _sized(mask: Mask, pixels: float) -> Mask:
    """Return the parts of a mask that have that many pixels."""
    labels, _ = ndimage.label(mask)
    kept = np.bincount(labels.ravel()) >= max(pixels, 1)
    kept[0] = False
    return kept[labels]


def _partly(mask: Mask, other: Mask, share: float) -> Mask:
    """Return the parts of a mask of which the other has a share or more."""
    labels, count = ndimage.label(mask)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    kept = np.bincount(labels[other], minlength=count + 1) >= share * sizes
    kept[0] = False
    return kept[labels]


def _odd(pixels: float) -> int:
    return 2 * round(pixels / 2) + 1


# Squares, not discs: their filters run along rows and columns, in a time that no size changes.
def _spread(mask: Mask, side: int) -> Mask:
    return ndimage.maximum_filter(mask, side, mode="constant", cval=0) if mask.any() else mask


def _shrunk(mask: Mask, side: int) -> Mask:
    return ndimage.minimum_filter(mask, side, mode="constant", cval=1) if mask.any() else mask


def _opened(mask: Mask, side: int) -> Mask:
    return _spread(_shrunk(mask, side), side)


def _closed(mask: Mask, side: int) -> Mask:
    return _shrunk(_spread(mask, side), side)
