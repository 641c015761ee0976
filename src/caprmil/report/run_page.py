"""The report of a run: its scores, its mistakes and its settings, in one HTML file.

To add a section, write a function of `RunInputs` that returns HTML, and add it to `SECTIONS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from caprmil.errors import BagError
from caprmil.explain import Flips
from caprmil.features import bag_files
from caprmil.io.progress import Step
from caprmil.report.curve_section import curve_section
from caprmil.report.details_section import run_details
from caprmil.report.flip_section import flip_section
from caprmil.report.guarantee_section import guarantee_section
from caprmil.report.html_page import asset, page, render
from caprmil.report.mistake_section import mistake_section
from caprmil.report.parts_registry import parts_of
from caprmil.report.prediction_parts import Cell
from caprmil.report.report_inputs import RunInputs, RunSection
from caprmil.report.score_section import (
    comparison_section,
    fold_section,
    headline_section,
    modality_section,
    score_section,
)
from caprmil.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Row:
    """A test slide in the table of all slides."""

    slide: str
    patient: str
    names: Sequence[str]  # of the slides of a patient
    cells: Sequence[Cell]
    is_marked: bool
    fold: str
    patches: int | None
    link: str | None


def slide_table_section(inputs: RunInputs) -> Markup:
    """Return a table of all test slides, to be sorted and searched."""
    predictions, parts = inputs.run.predictions, inputs.parts
    marked = parts.marked(predictions)
    sizes: dict[str, int | None] = {}
    rows = []
    for n, slide in enumerate(predictions.slides):
        if slide not in sizes:
            sizes[slide] = _patches(inputs.run, slide)
        rows.append(
            Row(
                slide=slide,
                patient=predictions.patients[n] if predictions.patients else "",
                names=inputs.run.slides.get(slide, ()) if predictions.unit == "patient" else (),
                cells=parts.cells(predictions, n),
                is_marked=n in marked,
                fold=predictions.folds[n] if predictions.folds else "",
                patches=sizes[slide],
                link=inputs.links.get(slide),
            )
        )
        if inputs.progress:
            inputs.progress(n + 1, len(predictions))
    return render(
        "slide_table.html",
        unit=predictions.unit,
        columns=parts.columns,
        rows=rows,
        has_patients=any(row.patient not in ("", row.slide) for row in rows),
        marked_filter=parts.marked_filter,
        marked_note=f"{len(marked):,} {parts.marked_note}",
    )


def _patches(run: Run, slide: str) -> int | None:
    """Return the number of patches of a slide or patient, if the run knows it or finds its bag."""
    own = [run.patches.get(name) for name in run.slides.get(slide, ())]
    known = [count for count in own if count is not None]
    if known and len(known) == len(own):  # opening the bags of many slides takes long
        return sum(known)
    try:
        return bag_files.inspect(run.bags[slide]).n_patches
    except (BagError, KeyError, OSError):
        return None


SECTIONS: tuple[RunSection, ...] = (
    headline_section,
    score_section,
    fold_section,
    curve_section,
    comparison_section,
    guarantee_section,
    modality_section,
    flip_section,
    mistake_section,
    slide_table_section,
    run_details,
)


def run_report(
    run: Run,
    *,
    links: Mapping[str, str] | None = None,
    pixels: Path | None = None,
    flips: Flips | None = None,
    progress: Step | None = None,
) -> str:
    """Return the report of a finished run as one HTML page.

    `links` are the addresses of slide reports, by slide, relative to the page. `pixels` is a folder
    with the slides, if they were moved since they were encoded. `flips` are those of `flips_of`.
    """
    predictions, parts, name = run.predictions, parts_of(run), run.folder.resolve().name
    inputs = RunInputs(
        run=run, parts=parts, links=links or {}, pixels=pixels, flips=flips, progress=progress
    )
    return page(
        "run_report.html",
        title=f"{name}, run report",
        name=name,
        model=run.facts.model,
        task=parts.task,
        unit=predictions.unit,
        slides=len(set(predictions.slides)),
        patients=len(set(predictions.patients)) if predictions.patients else 0,
        folds=len(run.splits),
        sections=[section(inputs) for section in SECTIONS],
        scripts=[asset("sort_table.js"), asset("run_report.js")],
    )
