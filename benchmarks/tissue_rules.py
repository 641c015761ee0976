"""Compare our tissue detection with LazySlide's on synthetic thumbnails.

    python benchmarks/tissue_rules.py --out docs/tissue.md --picture docs/tissue.png

LazySlide is measured if it is installed: pip install caprmil lazyslide, in an environment of its
own. Each thumbnail is then a slide of 8 um/px. Seeds from 100 on were not used for tuning.
"""

import argparse
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyvips
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage

from caprmil.io import progress
from caprmil.io.atomic import atomic_write, write_text
from caprmil.slides.regions import read_regions
from caprmil.slides.tissue import find
from caprmil.synthetic.thumbnails import CASES, MPP, SyntheticThumbnail, thumbnail

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]


def ours(image: Pixels) -> Mask:
    """Optical density relative to glass, flat field, ink excluded."""
    return find(image, MPP).mask


def lazyslide(image: Pixels) -> Mask:
    """Return the tissue that LazySlide finds by its defaults on a slide with these pixels."""
    open_wsi = import_module("wsidata").open_wsi
    find_tissues = import_module("lazyslide").pp.find_tissues
    with TemporaryDirectory() as folder:
        path, outline = Path(folder) / "slide.tiff", Path(folder) / "slide.geojson"
        pixels = pyvips.Image.new_from_array(image).copy(xres=1000 / MPP, yres=1000 / MPP)
        pixels.tiffsave(str(path), tile=True, compression="deflate", resunit="cm")
        slide = open_wsi(str(path), store=None)
        find_tissues(slide)
        if "tissues" not in slide.shapes:  # it found none
            return np.zeros(image.shape[:2], dtype=bool)
        slide.shapes["tissues"].to_file(outline, driver="GeoJSON")
        return read_regions(outline).to_mask((image.shape[0], image.shape[1]), (1, 1))


METHODS: dict[str, Callable[[Pixels], Mask]] = {"ours": ours}
if find_spec("lazyslide"):
    METHODS[f"LazySlide {version('lazyslide')}"] = lazyslide


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
