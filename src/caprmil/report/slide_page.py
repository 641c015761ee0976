"""The report of a slide: what a run predicts and why, in one HTML file.

To add a section, write a function of `SlideInputs` that returns HTML, and add it to `SECTIONS`.
"""

from markupsafe import Markup

from caprmil.errors import SlideError, count
from caprmil.explain import KINDS, ExplainedSlide
from caprmil.explain import browser as pages
from caprmil.explain.browser import BrowserData, pack
from caprmil.io.progress import Step
from caprmil.report.details_section import slide_details
from caprmil.report.evidence_section import evidence_section
from caprmil.report.html_page import asset, page, render
from caprmil.report.parts_registry import parts_of
from caprmil.report.patch_pictures import PatchPictures
from caprmil.report.patient_section import patient_section
from caprmil.report.region_section import region_section
from caprmil.report.relevance_section import relevance_section
from caprmil.report.report_inputs import SlideInputs, SlideSection
from caprmil.report.token_section import token_section
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide

MAX_BYTES = 2_000_000  # of all layers of the map; beyond that, single heads are left out


def prediction_section(inputs: SlideInputs) -> Markup:
    """Return what is predicted, by which models, and how certain it is."""
    return inputs.parts.prediction(inputs.explained)


def map_section(inputs: SlideInputs) -> Markup:
    """Return the map of the slide. The script draws its layers."""
    facts = inputs.numbers.facts
    remarks = [inputs.no_pictures]
    if not facts["placed"]:
        remarks.append(facts["unplaced"])
    elif not facts["pixels"]:
        remarks.append("Each square is a patch, at its position on the slide.")
    remarks.append(
        "The colour scales of influence, evidence and attention end at the 99th percentile."
    )
    explanation, ranking = inputs.explained.explanation, inputs.explained.ranking
    kind, contrast = (
        KINDS[explanation.first],
        explanation.target.contrasts[explanation.predicted],
    )
    return render(
        "map.html",
        first=f"{kind.title_of(contrast)}: {kind.meaning_of(contrast)}.",
        faithfulness=inputs.explained.faithfulness_text(),
        beats_chance=ranking is None or ranking.beats_chance,
        thumbnail=inputs.pictures.thumbnail() if facts["pixels"] else None,
        has_pixels=facts["pixels"],
        remark=" ".join(filter(None, remarks)),
    )


SECTIONS: tuple[SlideSection, ...] = (
    prediction_section,
    map_section,
    patient_section,
    region_section,
    relevance_section,
    evidence_section,
    token_section,
    slide_details,
)


def slide_report(run: Run, explained: ExplainedSlide, *, progress: Step | None = None) -> str:
    """Return the report of a slide as one HTML page.

    Large content is bounded: a bag of 100,000 patches gives a file of a few megabytes. If the
    slide file is missing or damaged, the page has no pictures and says why.
    """
    reason = "There are no pictures: the slide file was not found, only its bag."
    try:
        slide = explained.open_slide()
        if slide is not None:
            with slide:
                return _page(run, explained, slide, "", progress)
    except SlideError as problem:
        reason = f"There are no pictures: {problem}"
    return _page(run, explained, None, reason, progress)


def _page(
    run: Run, explained: ExplainedSlide, slide: Slide | None, reason: str, progress: Step | None
) -> str:
    numbers, has_heads = limit_layers(pack(explained, slide))
    inputs = SlideInputs(
        run=run,
        explained=explained,
        parts=parts_of(run),
        pictures=PatchPictures(explained, slide),
        numbers=numbers,
        has_heads=has_heads,
        no_pictures=reason,
    )
    parts = explained.explanation.info.slides
    sections = [section(inputs) for section in SECTIONS]
    return page(
        "slide_report.html",
        title=f"{explained.name}, {numbers.facts['unit']} report",
        name=explained.name,
        model=explained.explanation.model,
        run=run.folder.resolve().name,
        patches=len(explained.explanation),
        unit=numbers.facts["unit"],
        parts=count(len(parts), explained.explanation.info.part_name) if parts else "",
        sections=sections,
        symbols=inputs.pictures.symbols(progress),
        scripts=(pages.asset("paint.js"), asset("slide_report.js")),
        facts={
            **numbers.facts,
            "pictures": inputs.pictures.rows,
            "repeated_layers": inputs.parts.repeated_layers(explained),
        },
        data=numbers.data,
    )


def limit_layers(numbers: BrowserData) -> tuple[BrowserData, bool]:
    """Return the layers, without single heads if they are too large, and whether heads are in."""
    if len(numbers.data) <= MAX_BYTES:
        return numbers, True
    n = numbers.facts["patches"]
    data, layers = bytearray(numbers.data[: 8 * n]), []
    for layer in numbers.facts["layers"]:
        if "head-" in layer["key"]:
            continue
        size = n if layer["bytes"] else 4 * n
        layers.append({**layer, "start": len(data)})
        data += numbers.data[layer["start"] : layer["start"] + size + -size % 4]
    return BrowserData(facts={**numbers.facts, "layers": layers}, data=bytes(data)), False
