"""The last section of reports: quality of the slide or recipe of the run, and provenance."""

import platform
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version

from markupsafe import Markup

from caprmil.errors import count, plural
from caprmil.report.html_page import render
from caprmil.report.report_inputs import RunInputs, SlideInputs
from caprmil.report.text_format import share, timestamp
from caprmil.runs.facts import RECIPE, SourceFacts
from caprmil.runs.run import Run
from caprmil.slides.qc import Record

Fact = tuple[str, str]  # a title and a value

FLAGS = {
    "faint": "The stain is faint. Tissue may be missing, and colours differ from other slides.",
    "pen": "There are pen marks on the slide. Patches under them were left out.",
    "no glass": "No empty glass was found, so the whole image was taken as tissue.",
    "no tissue": "No tissue was found.",
}


def slide_details(inputs: SlideInputs) -> Markup:
    """Return the quality of the slide, and how to make this report again."""
    return render(
        "slide_details.html",
        quality=list(quality(inputs.explained.reference.record)),
        provenance=list(slide_provenance(inputs)),
    )


def run_details(inputs: RunInputs) -> Markup:
    """Return the recipe of the run, and how to make this report again."""
    return render(
        "run_details.html",
        recipe=recipe_of(inputs.run),
        provenance=list(run_provenance(inputs)),
        notes=inputs.run.facts.notes,
    )


def recipe_of(run: Run) -> str:
    """Return the recipe of a run, or nothing if its file is missing."""
    return run.recipe.text if (run.folder / RECIPE).exists() else ""


def quality(record: Record | None) -> Iterator[str]:
    """Yield sentences on the quality of a slide, as recorded when it was encoded."""
    if record is None:
        yield "The quality is not known: there is no quality record next to the bag."
        return
    flags = [flag for flag in record.flags.split("; ") if flag]
    for flag in flags:
        yield FLAGS.get(flag, f"{flag[:1].upper()}{flag[1:]}.")
    if not flags:
        yield "No problem was found: no pen marks, no faint stain, no doubt about the scale."
    if record.tissue_mm2:
        yield (
            f"Tissue: {record.tissue_mm2:.3g} mm², {share(record.tissue_share)} of the slide, in "
            f"{count(record.patches, 'patch')}."
        )
    if record.width and record.mpp:
        yield f"The slide has {record.width:,} x {record.height:,} pixels of {record.mpp:g} µm."
    if record.reader:
        yield f"It was read as {record.reader}."


def slide_provenance(inputs: SlideInputs) -> Iterator[Fact]:
    """Yield what it takes to make the report of a slide again."""
    run, explained = inputs.run, inputs.explained
    explanation = explained.explanation
    info = explanation.info
    yield (
        "Model",
        f"{explanation.model}, {explanation.fold}, weights of the {run.facts.weights} epoch",
    )
    outputs = plural(explanation.target.output_name)
    yield (
        "Evidence",
        f"{explanation.method}; the sum differs from the {outputs} by {explanation.gap:.1e}",
    )
    yield from run_origin(run)
    yield "This bag", f"{count(info.n_patches, 'patch')} of {info.width} features, {info.kind}"
    size = f"{info.patch_px} px" if info.patch_px else ""
    scale = f"{info.mpp:g} µm/px" if info.mpp else ""
    yield "Its patches", " at ".join(filter(None, (size, scale))) or "size not stored in the bag"
    files = [r.pixels.name for r in explained.reference.all_slides if r.pixels is not None]
    if files:
        yield ("Slide file" if len(files) == 1 else "Slide files"), ", ".join(files)
    name = explained.name if explained.name in run.names else str(explained.reference.bag)
    yield from report_origin(["caprmil", "report", str(run.folder), name])


def run_provenance(inputs: RunInputs) -> Iterator[Fact]:
    """Yield what it takes to make the report of a run again."""
    run = inputs.run
    yield "Model", f"{run.facts.model}, weights of the {run.facts.weights} epoch of each fold"
    yield from run_origin(run)
    yield from report_origin(["caprmil", "report", str(run.folder)])


def run_origin(run: Run) -> Iterator[Fact]:
    """Yield what a run was made from: recipe, encoder, scale, versions."""
    facts = run.facts
    yield "Run", f"{run.folder.resolve().name}, seed {facts.seed}, recipe {facts.digest}"
    for source in facts.sources or (facts,):
        of = f" of {source.name}" if isinstance(source, SourceFacts) else ""
        fingerprint = f", fingerprint {source.fingerprint[:16]}" if source.fingerprint else ""
        yield (
            f"Encoder{of}",
            f"{source.encoder or 'not known'}{fingerprint}; {source.in_dim} features",
        )
        scale = f"{source.mpp:g} µm/px" if source.mpp else "unknown scale"
        rule = f", {source.scale_rule}" if source.scale_rule else ""
        yield f"Patches{of}", f"{source.patch_px or '?'} px at {scale}{rule}"
    if facts.join:
        one = "the features of each patch are concatenated"
        yield "Sources", one if facts.join == "concatenation" else "their patches are one bag"
    if facts.start is not None:
        yield "Training starts from", facts.start.describe()
    versions = ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    yield "Trained with", f"caprmil {facts.version}; {versions}"


def report_origin(command: list[str]) -> Iterator[Fact]:
    """Yield when, with what and how a report was made."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "pillow"))
    yield (
        "Reported with",
        f"caprmil {version('caprmil')}; python {platform.python_version()}, {libraries}",
    )
    yield "Created", timestamp(datetime.now(UTC))
    yield "Command", shlex.join(command)
