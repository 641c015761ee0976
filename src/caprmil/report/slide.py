"""The report of a slide: what a run answered and why, in one file that needs nothing else."""

import platform
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from caprmil.errors import SlideError
from caprmil.explain import Case
from caprmil.explain import browser as pages
from caprmil.explain.browser import Numbers, pack
from caprmil.io.progress import Step
from caprmil.report import answer, evidence, tokens
from caprmil.report.page import EMPTY, Html, asset, fill, join, page, tag
from caprmil.report.pictures import Album
from caprmil.report.words import count, moment, quality
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide

MOST_BYTES = 2_000_000  # of numbers: single heads beyond that are left out
DISCLAIMER = "For research, not a diagnosis."


def slide_report(run: Run, case: Case, *, progress: Step | None = None) -> str:
    """Return the report of a case as one HTML page.

    Whatever is large is bounded: a bag of 100,000 patches gives a file of a few megabytes. A slide
    that is not there or cannot be read costs the pictures, and the page says so.
    """
    missing = "There are no pictures: the slide's own file was not at hand, only its bag."
    try:
        slide = case.slide()
        if slide is not None:
            with slide:
                return _build(run, case, slide, "", progress)
    except SlideError as problem:
        missing = f"There are no pictures: {problem}"
    return _build(run, case, None, missing, progress)


def _build(run: Run, case: Case, slide: Slide | None, missing: str, progress: Step | None) -> str:
    album = Album(case, slide)
    evidence.choose(case, album)
    sizes = tokens.choose(case, album)
    numbers, heads_stored = light(pack(case, slide))
    body = fill(
        "slide.html",
        name=case.name,
        subtitle=_subtitle(run, case),
        disclaimer=DISCLAIMER,
        answer=answer.section(run, case),
        map=_map(album, numbers.facts, missing),
        evidence=evidence.section(case, album),
        tokens=tokens.section(case, album, sizes, heads_stored=heads_stored),
        quality=tag("ul", *(tag("li", line) for line in quality(case.subject.record))),
        provenance=table(provenance(run, case)),
        sprite=album.sprite(progress),
    )
    more = {"pictures": album.rows, "shown": answer.predicted(case), "galleries": sizes}
    return page(
        f"{case.name}, a slide report",
        body,
        scripts=(pages.asset("paint.js"), asset("slide.js")),
        facts={**numbers.facts, **more},
        data=numbers.data,
    )


def light(numbers: Numbers) -> tuple[Numbers, bool]:
    """Return the numbers without single heads if they are too many, and whether heads are in."""
    if len(numbers.data) <= MOST_BYTES:
        return numbers, True
    n = numbers.facts["patches"]
    data, layers = bytearray(numbers.data[: 8 * n]), []
    for layer in numbers.facts["layers"]:
        if "head-" in layer["key"]:
            continue
        size = n if layer["bytes"] else 4 * n
        layers.append({**layer, "start": len(data)})
        data += numbers.data[layer["start"] : layer["start"] + size + -size % 4]
    return Numbers(facts={**numbers.facts, "layers": layers}, data=bytes(data)), False


def _subtitle(run: Run, case: Case) -> str:
    patches = count(len(case.explanation), "patch")
    return f"{case.explanation.model}, run {run.folder.resolve().name}, {patches}"


def _map(album: Album, facts: dict[str, Any], missing: str) -> Html:
    remarks = [missing]
    if not facts["placed"]:
        remarks.append(facts["unplaced"])
    elif not facts["pixels"]:
        remarks.append("Each square is a patch, at its place on the slide.")
    remarks.append("Colours of evidence and attention end where 99 of 100 patches do.")
    return fill(
        "map.html",
        kind="with-pixels" if facts["pixels"] else "bare",
        thumbnail=album.thumbnail() if facts["pixels"] else EMPTY,
        opacity=60 if facts["pixels"] else 100,
        remark=" ".join(filter(None, remarks)),
    )


def provenance(run: Run, case: Case) -> Iterator[tuple[str, str]]:
    """Return what it takes to make this report again."""
    told, facts = case.explanation, run.facts
    info = told.info
    yield "Model", f"{told.model}, {told.fold}, weights of the {facts.weights} epoch"
    yield "Evidence", f"{told.method}; the sum misses the logits by {told.gap:.1e}"
    yield from origin(run)
    yield "This bag", f"{count(info.n_patches, 'patch')} of {info.width} features, {info.kind}"
    patch = [f"{info.patch_px} px" if info.patch_px else ""]
    patch += [f"{info.mpp:g} µm/px" if info.mpp else ""]
    yield "Its patches", " at ".join(filter(None, patch)) or "The bag does not say."
    if case.subject.pixels is not None:
        yield "Slide file", case.subject.pixels.name
    what = case.name if case.name in run.paths else str(case.subject.bag)
    yield from made(["caprmil", "report", str(run.folder), what])


def origin(run: Run) -> Iterator[tuple[str, str]]:
    """Return where a run comes from: recipe, encoder, scale, versions."""
    facts = run.facts
    yield "Run", f"{run.folder.resolve().name}, seed {facts.seed}, recipe {facts.digest}"
    print_ = f", fingerprint {facts.fingerprint[:16]}" if facts.fingerprint else ""
    yield "Encoder", f"{facts.encoder or 'not known'}{print_}; {facts.in_dim} features"
    scale = f"{facts.mpp:g} µm/px" if facts.mpp else "scale not known"
    rule = f", {facts.scale_rule}" if facts.scale_rule else ""
    yield "Patches", f"{facts.patch_px or '?'} px at {scale}{rule}"
    versions = ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    yield "Trained with", f"caprmil {facts.version}; {versions}"


def made(command: list[str]) -> Iterator[tuple[str, str]]:
    """Return when, with what and how a report was made."""
    own = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "pillow"))
    yield (
        "Reported with",
        f"caprmil {version('caprmil')}; python {platform.python_version()}, {own}",
    )
    yield "Made", moment(datetime.now(UTC))
    yield "Command", shlex.join(command)


def table(rows: Iterator[tuple[str, str]]) -> Html:
    lines = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in rows]
    return tag("table", tag("tbody", join(lines)), class_="facts")
