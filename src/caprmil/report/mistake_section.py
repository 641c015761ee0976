"""The section of the worst predictions in a run report, with a picture of each slide."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from PIL import Image

from caprmil.errors import CaprmilError
from caprmil.explain import locate_slide, open_pixels
from caprmil.features import bag_files
from caprmil.io.paths import as_path
from caprmil.report.html_page import render
from caprmil.report.patch_pictures import Picture, as_picture, thumbnail
from caprmil.report.report_inputs import RunInputs
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide

MAX_MISTAKES = 8
PICTURE_PX = 420  # of the longer side


class Mistake(NamedTuple):
    """A slide that was predicted badly."""

    slide: str
    text: str
    picture: Picture | None
    link: str | None


def mistake_section(inputs: RunInputs) -> Markup:
    """Return a card for each of the worst predictions."""
    predictions = inputs.run.predictions
    mistakes = []
    for row in inputs.parts.worst(predictions, MAX_MISTAKES):
        slide = predictions.slides[row]
        mistakes.append(
            Mistake(
                slide=slide,
                text=inputs.parts.mistake(predictions, row),
                picture=slide_picture(inputs.run, slide, inputs.pixels),
                link=inputs.links.get(slide),
            )
        )
    return render(
        "mistakes.html",
        title=inputs.parts.worst_title,
        mistakes=mistakes,
        unit=inputs.run.unit,
        none=inputs.parts.no_worst,
    )


def slide_picture(run: Run, slide: str, pixels: Path | None = None) -> Picture | None:
    """Return a thumbnail of a slide, or its picture from quality control."""
    alt = f"Thumbnail of the slide {slide}"
    with suppress(CaprmilError):  # a missing or damaged slide may have a picture from before
        found = locate_slide(run, slide, pixels=pixels)
        if found.slides:
            opened = open_pixels(found, bag_files.inspect_placed(found.bag))
            if opened is not None:
                with opened as row:
                    return as_picture(thumbnail(row, PICTURE_PX), f"The slides of {slide}")
        if found.pixels is not None:
            with Slide(found.pixels, mpp=1.0) as opened:  # a thumbnail needs no scale
                return as_picture(thumbnail(opened, PICTURE_PX), alt)
    saved = as_path(run.paths.get(slide, "")).parent / "qc" / f"{slide}.png"
    if saved.exists():
        with saved.open("rb") as file, Image.open(file) as image:
            image.thumbnail((PICTURE_PX, PICTURE_PX))
            pixels_rgb = np.asarray(image.convert("RGB"))
        return as_picture(pixels_rgb, f"{alt}, with tissue and grid")
    return None
