"""Slide shares: what each slide of a patient adds to the answer, and how much attention it has.

Sources of a slide whose patches are one bag have shares like slides: sources.csv.

slides.csv: a row for each slide of a patient.
    slide, patches
    evidence-C      the sum of the evidence of its patches for contrast C
    attention       the sum of their attention: the slides' shares sum to 1
    Where the answers of slides are combined, also
    answer-COLUMN   the answer of the slide alone
    weight-COLUMN   its weight in the answer of the patient
    adds-COLUMN     what it adds to that answer: the slides add up to it
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caprmil.explain.combination import Combination
from caprmil.explain.explanation import Explanation, square_cells
from caprmil.features.bags import grid_cells
from caprmil.io.atomic import atomic_write


@dataclass(frozen=True, eq=False, kw_only=True)
class SlideShare:
    """One slide of a patient in an explanation."""

    name: str
    rows: NDArray[np.int64]
    """Its patches in the patient's bag."""
    terms: NDArray[np.float64]
    """(C,), what its patches add to each output."""
    evidence: tuple[float, ...]
    """What they add to each contrast. With the rest, all slides sum to it if evidence is exact."""
    attention: float
    slide: str = ""
    """The slide, if the patches are of one of its sources."""

    @property
    def patches(self) -> int:
        return len(self.rows)


def slide_shares(explanation: Explanation) -> tuple[SlideShare, ...]:
    """Return the share of each slide of a patient; nothing for a single slide."""
    if explanation.slide_of is None:
        return ()
    found = []
    for number, slide in enumerate(explanation.info.slides):
        rows = np.flatnonzero(explanation.slide_of == number)
        terms = explanation.evidence[rows].astype(np.float64).sum(axis=0)
        contrasts = explanation.target.contrasts
        found.append(
            SlideShare(
                name=slide.name,
                rows=rows,
                terms=terms,
                evidence=tuple(float(contrast.of(terms)) for contrast in contrasts),
                attention=float(explanation.attention[rows].astype(np.float64).sum()),
                slide=slide.slide or slide.name,
            )
        )
    return tuple(found)


def slide_explanations(explanation: Explanation) -> Iterator[Explanation]:
    """Yield the explanation of each slide of a patient, with the slide's own coordinates.

    Numbers of patches are those in the patient's bag: attention sums to the slide's share, and the
    evidence of other slides is part of `rest`, so that the sum is still that of the patient.
    """
    for number, share in enumerate(slide_shares(explanation)):
        rows, place = share.rows, explanation.info.slides[number]
        coords = None if explanation.coords is None else place.own(explanation.coords[rows])
        info = replace(place.info, n_patches=len(rows))
        cells = grid_cells(coords, info)
        others = explanation.evidence.astype(np.float64).sum(axis=0) - share.terms
        yield replace(
            explanation,
            slide=share.name,
            info=info,
            coords=coords,
            cells=square_cells(len(rows)) if cells is None else cells,
            evidence=explanation.evidence[rows],
            rest=(explanation.rest + others).astype(np.float32),
            attention=explanation.attention[rows],
            class_attention=_columns(explanation.class_attention, rows),
            scores=None if explanation.scores is None else explanation.scores[rows],
            spread=None if explanation.spread is None else explanation.spread[rows],
            assignments=None
            if explanation.assignments is None
            else explanation.assignments[:, :, rows],
            before=None,
            after=None,
            slide_of=None,
            maps={name: values[rows] for name, values in explanation.maps.items()},
        )


def _columns(
    values: NDArray[np.float32] | None, rows: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    return None if values is None else values[:, rows]


def write_shares(
    explanation: Explanation, path: Path, combination: Combination | None = None
) -> Path:
    """Write a row for each slide of a patient, or for each source."""
    combined: dict[str, NDArray[np.float64]] = {}
    if combination is not None:
        for name in ("answers", "weights", "adds"):
            values = zip(combination.target.columns, getattr(combination, name).T, strict=True)
            title = {"answers": "answer", "weights": "weight"}.get(name, name)
            combined |= {f"{title}-{column}": own for column, own in values}
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        evidence = [f"evidence-{number}" for number in range(len(explanation.names))]
        header = [explanation.info.part_name, "patches", *evidence, "attention", *combined]
        table.writerow(header)
        for share in slide_shares(explanation):
            numbers = [*share.evidence, share.attention]
            if combination is not None:
                row = combination.slides.index(share.slide)
                numbers += [float(values[row]) for values in combined.values()]
            cells = [f"{value:.9g}" for value in numbers]
            table.writerow([share.name, share.patches, *cells])
    return path
