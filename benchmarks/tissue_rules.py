"""Compare our tissue detection with the rules of other tools on synthetic thumbnails.

    python benchmarks/tissue_rules.py --out docs/tissue.md --picture docs/tissue.png

The other tools are reimplemented from their documented parameters with numpy and scipy at 8 um/px,
so only the direction of a difference is meaningful. Seeds from 100 on were not used for tuning.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from scipy import ndimage

from caprmil.io import progress
from caprmil.io.atomic import atomic_write, write_text
from caprmil.slides.tissue import find
from caprmil.synthetic.thumbnails import CASES, MPP, SyntheticThumbnail, thumbnail

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]


def ours(image: Pixels) -> Mask:
    """Optical density relative to glass, flat field, ink excluded."""
    return find(image, MPP).mask


def clam(image: Pixels) -> Mask:
    """CLAM: saturation over 8, median 7, closing 4; areas of the biopsy preset, its best."""
    mask = median(saturation(image), 7) > 8
    mask = ndimage.binary_closing(mask, np.ones((4, 4)))
    return without_small(fill(mask, 4096), 256)


def trident(image: Pixels) -> Mask:
    """TRIDENT's otsu: Otsu twice per tile of 512 px, holes under 5000 px filled."""
    mask = np.zeros(image.shape[:2], dtype=bool)
    for top in range(0, image.shape[0], 512):
        for left in range(0, image.shape[1], 512):
            tile = np.s_[top : top + 512, left : left + 512]
            mask[tile] = trident_tile(image[tile])
    return without_small(mask, 1000 * (len(mask) / 2000) ** 2)


def trident_tile(tile: Pixels) -> Mask:
    """One tile: grey and very dark pixels become white first."""
    value = tile.max(axis=2)
    shade = grey(tile)
    shade[(saturation(tile) < 10) & (value > 70) | (value < 85)] = 255
    shade[~without_small(shade <= otsu(shade), 60)] = 255
    return fill(shade <= otsu(shade), 5000) if (shade < 255).any() else np.zeros_like(shade, bool)


def slideflow(image: Pixels) -> Mask:
    """Slideflow: saturation, median 7, Otsu."""
    smooth = median(saturation(image), 7)
    return smooth > otsu(smooth)


def tiatoolbox(image: Pixels) -> Mask:
    """TIAToolbox: Otsu of the grey image."""
    return grey(image) <= otsu(grey(image))


def lazyslide(image: Pixels) -> Mask:
    """LazySlide: Otsu of (R-G)(B-G), without the overflow of its bytes; kernels halved for 8 um."""
    red, green, blue = (median(image[..., c], 9).astype(int) for c in range(3))
    product = (red - green).clip(0) * (blue - green).clip(0)
    scaled = (product * (255 / max(product.max(), 1))).astype(np.uint8)
    mask = ndimage.binary_closing(scaled > otsu(scaled), np.ones((3, 3)), iterations=3)
    return without_small(fill(mask, 1e-5 * mask.size), 1e-3 * mask.size)


def stamp(image: Pixels) -> Mask:
    """STAMP: cells of mean grey under 240 with 2% edges (Sobel here, Canny there)."""
    shade = grey(image).astype(float)
    edges = np.hypot(ndimage.sobel(shade, 0), ndimage.sobel(shade, 1)) > 100
    cell = 24
    mask = np.zeros(shade.shape, dtype=bool)
    for top in range(0, shade.shape[0], cell):
        for left in range(0, shade.shape[1], cell):
            window = np.s_[top : top + cell, left : left + cell]
            mask[window] = shade[window].mean() < 240 and edges[window].mean() >= 0.02
    return mask


METHODS: dict[str, Callable[[Pixels], Mask]] = {
    "ours": ours,
    "CLAM": clam,
    "TRIDENT otsu": trident,
    "slideflow": slideflow,
    "tiatoolbox": tiatoolbox,
    "LazySlide": lazyslide,
    "STAMP": stamp,
}


def grey(image: Pixels) -> Pixels:
    """Return the luma of an image."""
    return (image @ np.array([0.299, 0.587, 0.114])).round().astype(np.uint8)


def saturation(image: Pixels) -> Pixels:
    """Return the S of HSV, 0 to 255."""
    most, least = image.max(axis=2).astype(float), image.min(axis=2)
    return (255 * (most - least) / np.maximum(most, 1)).round().astype(np.uint8)


def median(values: Pixels, side: int) -> Pixels:
    """Return the median around each pixel."""
    return np.asarray(Image.fromarray(values).filter(ImageFilter.MedianFilter(side)))


def otsu(values: Pixels) -> int:
    """Return Otsu's threshold; the lower class includes it."""
    counts = np.bincount(values.ravel(), minlength=256).astype(float)
    below = counts.cumsum()
    first = (counts * np.arange(256)).cumsum()
    above = below[-1] - below
    with np.errstate(invalid="ignore", divide="ignore"):
        between = below * above * (first / below - (first[-1] - first) / above) ** 2
    return int(np.nan_to_num(between).argmax())


def without_small(mask: Mask, pixels: float) -> Mask:
    """Return a mask without components of fewer pixels."""
    labels, _ = ndimage.label(mask)
    kept = np.bincount(labels.ravel()) >= pixels
    kept[0] = False
    return kept[labels]


def fill(mask: Mask, pixels: float) -> Mask:
    """Return a mask with holes of fewer pixels filled."""
    holes = ndimage.binary_fill_holes(mask) & ~mask
    return mask | (holes & ~without_small(holes, pixels))


def score(found: Mask, truth: Mask) -> float:
    """Return the intersection over union; without tissue, 1 - the share of false positives."""
    if not truth.any():
        return 1 - float(found.mean())
    return float((found & truth).sum() / (found | truth).sum())


def table(scores: dict[str, NDArray[np.float64]], command: str) -> str:
    """Return case by method in Markdown; `scores[case]` is method by seed."""
    lines = ["| case | " + " | ".join(METHODS) + " |", "| --- |" + " --: |" * len(METHODS)]
    for case, values in scores.items():
        lines.append(f"| {case} | " + " | ".join(f"{value:.2f}" for value in values.mean(1)) + " |")
    every = np.concatenate(list(scores.values()), axis=1)
    for name, row in (("mean", every.mean(1)), ("worst image", every.min(1))):
        lines.append(f"| **{name}** | " + " | ".join(f"**{value:.2f}**" for value in row) + " |")
    seeds = every.shape[1] // len(scores)
    note = (
        f"Mean over {seeds} seeds of intersection over union; for blank glass, 1 - false positives."
    )
    return "\n".join([*lines, "", note, f"Made by `{command}`.", ""])


def panel(case: str, made: SyntheticThumbnail) -> Image.Image:
    """Return an image with the truth in black, detected tissue in green, and ink in orange."""
    found = find(made.image, made.mpp)
    image = made.image.copy()
    for mask, colour in ((found.pen, (255, 140, 0)), (found.mask, (0, 210, 0))):
        image[ndimage.binary_dilation(mask, iterations=5) & ~mask] = colour
    image[made.truth & ~ndimage.binary_erosion(made.truth, iterations=2)] = 0
    small = Image.fromarray(image).reduce(3)
    cell = Image.new("RGB", (small.width + 4, small.height + 18), "white")
    cell.paste(small, (2, 16))
    caption = f"{case}: {score(found.mask, made.truth):.2f} {', '.join(found.flags)}"
    ImageDraw.Draw(cell).text((3, 2), caption, fill="black")
    return cell


def contact_sheet(seed: int, path: Path, columns: int = 6) -> None:
    """Write an image of all cases."""
    cells = [panel(case, thumbnail(case, seed)) for case in CASES]
    width, height = cells[0].size
    sheet = Image.new("RGB", (columns * width, -(-len(cells) // columns) * height), "white")
    for number, cell in enumerate(cells):
        sheet.paste(cell, (number % columns * width, number // columns * height))
    with atomic_write(path, replace=True) as temporary:
        sheet.quantize(256, Image.Quantize.FASTOCTREE).save(temporary, optimize=True)


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write it and the contact sheet on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="default: all")
    parser.add_argument("--first", type=int, default=100, help="first seed")
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--picture", type=Path, help="PNG file for the contact sheet")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    scores = {}
    with progress.bar("cases") as step:
        for number, case in enumerate(options.cases, start=1):
            made = [thumbnail(case, seed) for seed in seeds]
            scores[case] = np.array(
                [[score(rule(one.image), one.truth) for one in made] for rule in METHODS.values()]
            )
            step(number, len(options.cases), case)
    text = table(
        scores, f"python benchmarks/tissue_rules.py --first {seeds.start} --seeds {len(seeds)}"
    )
    print(text)
    if options.out:
        write_text(options.out, text, replace=True)
    if options.picture:
        contact_sheet(seeds.start, options.picture)


if __name__ == "__main__":
    main()
