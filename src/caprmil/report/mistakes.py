"""The worst mistakes of a run, with a picture of each slide."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from caprmil.errors import CaprmilError
from caprmil.evaluation.predictions import Predictions
from caprmil.explain import find
from caprmil.io.paths import as_path
from caprmil.report.page import EMPTY, Html, tag
from caprmil.report.pictures import picture, thumbnail
from caprmil.report.words import percent
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide

SHOWN = 8
LONGEST = 420  # pixels of a picture


def worst(answers: Predictions, most: int = SHOWN) -> list[int]:
    """Return the rows that are answered wrongly, the surest of them first."""
    if answers.labels is None:
        return []
    labels = np.asarray(answers.labels)
    best = answers.probabilities.argmax(axis=1)
    wrong = np.flatnonzero((labels >= 0) & (labels != best))
    own = answers.probabilities[wrong, labels[wrong]]
    return [int(row) for row in wrong[np.argsort(own, kind="stable")][:most]]


def surest(answers: Predictions) -> list[int]:
    """Return, of each class, the row that is answered rightly and most surely."""
    if answers.labels is None:
        return []
    best = answers.probabilities.argmax(axis=1)
    found = []
    for code in range(len(answers.classes)):
        right = np.flatnonzero((np.asarray(answers.labels) == code) & (best == code))
        if len(right):
            found.append(int(right[answers.probabilities[right, code].argmax()]))
    return found


def section(run: Run, links: Mapping[str, str], pixels: Path | None = None) -> Html:
    """Return a card for each of the worst mistakes."""
    rows = worst(run.predictions)
    if not rows:
        return tag("p", "There are none: every slide with a label was answered rightly.")
    return tag("div", *(_card(run, row, links, pixels) for row in rows), class_="mistakes")


def _card(run: Run, row: int, links: Mapping[str, str], pixels: Path | None) -> Html:
    answers = run.predictions
    slide, own = answers.slides[row], answers.probabilities[row]
    label = run.classes[int(np.asarray(answers.labels)[row])]
    best = int(own.argmax())
    link = tag("a", "Why: its report", href=links[slide]) if slide in links else EMPTY
    fold = f", {answers.folds[row]}" if answers.folds else ""
    return tag(
        "article",
        portrait(run, slide, pixels),
        tag(
            "div",
            tag("h3", slide),
            tag(
                "p", f"Labelled {label}, predicted {run.classes[best]} ({percent(own[best])}){fold}"
            ),
            tag("p", link) if link else EMPTY,
            class_="about",
        ),
        class_="mistake",
    )


def portrait(run: Run, slide: str, pixels: Path | None = None) -> Html:
    """Return a picture of a slide: its thumbnail, or the one from quality control, or words."""
    alt = f"The slide {slide}, small"
    with suppress(CaprmilError):  # a slide that is gone or damaged may have a picture from before
        subject = find(run, slide, pixels=pixels)
        if subject.pixels is not None:
            with Slide(subject.pixels, mpp=1.0) as opened:  # any scale serves to make it small
                return picture(thumbnail(opened, LONGEST), alt)
    noted = as_path(run.paths.get(slide, "")).parent / "qc" / f"{slide}.png"
    if noted.exists():
        with noted.open("rb") as file, Image.open(file) as image:
            image.thumbnail((LONGEST, LONGEST))
            return picture(np.asarray(image.convert("RGB")), f"{alt}, with tissue and grid")
    return tag("div", "No picture: the slide's own file is not at hand.", class_="none")
