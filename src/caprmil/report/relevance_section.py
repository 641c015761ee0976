"""The section of relevance in a slide report: what the prediction depends on, as measured."""

from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from caprmil.explain import KINDS, TOP, top_patches
from caprmil.explain.map_kinds import EVIDENCE
from caprmil.report.html_page import render
from caprmil.report.patch_pictures import GalleryPatch
from caprmil.report.report_inputs import SlideInputs
from caprmil.report.text_format import signed


class MarkedSide(NamedTuple):
    """The patches that a map marks most for a contrast, or against it."""

    kind: str
    title: str
    gallery: list[GalleryPatch]


class RankedMap(NamedTuple):
    """A row of the table of maps."""

    name: str
    area: str
    interval: str
    is_first: bool


def relevance_section(inputs: SlideInputs) -> Markup:
    """Return the patches that the first map marks most, and all maps of the run compared."""
    explanation, ranking = inputs.explained.explanation, inputs.explained.ranking
    kind, of = KINDS[explanation.first], explanation.predicted
    contrast = explanation.target.contrasts[of]
    sides = []
    if kind.signed and kind is not EVIDENCE:  # the evidence has a section of its own
        values = explanation.values(kind.name, of).astype(np.float64)
        for sign in (1, -1):
            rows = [int(row) for row in top_patches(sign * values, TOP) if sign * values[row] > 0]
            inputs.pictures.include([rows], TOP)
            captions = [(signed(float(values[row])), f"rank {n}") for n, row in enumerate(rows, 1)]
            title = contrast.positive if sign > 0 else contrast.negative
            gallery = inputs.pictures.gallery(rows, captions)
            sides.append(MarkedSide("for" if sign > 0 else "against", title, gallery))
    return render(
        "relevance.html",
        title=kind.title_of(contrast),
        maps=_ranked(inputs),
        slides=0 if ranking is None else ranking.slides,
        sides=sides,
    )


def _ranked(inputs: SlideInputs) -> list[RankedMap]:
    ranking, first = inputs.explained.ranking, inputs.explained.explanation.first
    if ranking is None:
        return []
    return [
        RankedMap(
            name=name,
            area=f"{mean:.2f}",
            interval="" if np.isnan(low) else f"{low:.2f} to {high:.2f}",
            is_first=name == first,
        )
        for name, (mean, low, high) in ranking.areas.items()
    ]
