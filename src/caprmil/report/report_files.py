"""The files of reports: in the folder of the run, or where the user wants them.

RUN/report/index.html         the run
RUN/report/slides/NAME.html   a slide
RUN/report/features/          bags of slides that were encoded for a report

Files in the run's folder are replaced each time. A file that the user named is never overwritten.
"""

import re
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from caprmil.errors import BagError, CaprmilError, RunError
from caprmil.explain import ExplainedSlide, SlideReference, explain_slide, flips_of, locate_slide
from caprmil.io.atomic import write_text
from caprmil.io.leftovers import clear_leftovers
from caprmil.io.new_files import check_new_files, new_files
from caprmil.io.paths import as_path
from caprmil.io.progress import Bar, Step
from caprmil.models.device import pick_device
from caprmil.report.details_section import recipe_of
from caprmil.report.parts_registry import parts_of
from caprmil.report.run_page import run_report
from caprmil.report.slide_page import slide_report
from caprmil.runs.input_bags import bags_of
from caprmil.runs.run import Run
from caprmil.slides.qc import Record

INDEX, SLIDES, FEATURES = "index.html", "slides", "features"
MAX_NAME = 100  # characters of a file name


def report_folder(run: Run) -> Path:
    """Return the folder of a run's reports."""
    return run.folder / "report"


def safe_name(slide: str) -> str:
    """Return a file name for a slide. Two slides never share one, whatever their names are."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", slide).strip("._-")[:MAX_NAME]
    same = plain == slide != ""
    digest = sha256(slide.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain if same else '-'.join(filter(None, [plain, digest]))}.html"


def find_or_encode(
    run: Run,
    inputs: Iterable[str],
    *,
    pixels: Path | None = None,
    progress: Bar | None = None,
    **encoding: Any,
) -> tuple[dict[str, SlideReference], list[Record]]:
    """Return slides of the run by name, bags, and slide files, which are encoded first.

    The second value lists slides that could not be encoded. `encoding` is passed to `bags_of`.
    """
    inputs = list(inputs)
    found = {name: locate_slide(run, name, pixels=pixels) for name in inputs if name in run.names}
    others = [as_path(text) for text in inputs if text not in run.names]
    for path in others:
        if not path.exists():
            locate_slide(run, path)  # raises, and lists the slides of the run
    if not others:
        return found, []
    folder = report_folder(run) / FEATURES
    bags, failed = bags_of(run, others, folder, **encoding, progress=progress)
    return found | {
        name: locate_slide(run, bag, pixels=pixels) for name, bag in bags.items()
    }, failed


def report_paths(run: Run, names: Iterable[str], out: Path | None) -> dict[str, Path]:
    """Return the path of each slide's report; raise if a file that the user named exists."""
    names = list(names)
    if out is None:
        return {name: report_folder(run) / SLIDES / safe_name(name) for name in names}
    one = len(names) == 1 and out.suffix.lower() in (".html", ".htm")
    found = {name: out if one else out / safe_name(name) for name in names}
    if not one and out.is_file():
        raise CaprmilError(f"{out} is a file. Several reports need a folder.")
    check_new_files(out.parent if one else out, [path.name for path in found.values()])
    return found


def write_slide_report(
    run: Run, explained: ExplainedSlide, path: Path, *, replace: bool, progress: Step | None = None
) -> Path:
    """Write the report of a slide."""
    return write_text(path, slide_report(run, explained, progress=progress), replace=replace)


def chosen_slides(run: Run, most: int) -> list[str]:
    """Return what is worth a report: the worst mistakes, and a few good predictions."""
    predictions, parts = run.predictions, parts_of(run)
    rows = [*parts.worst(predictions, most), *(parts.best(predictions) if most else [])]
    return list(dict.fromkeys(predictions.slides[row] for row in rows))


def write_run_report(
    run: Run,
    *,
    out: Path | None = None,
    slides: int = 4,
    pixels: Path | None = None,
    force: bool = False,
    device: str = "auto",
    progress: Step | None = None,
) -> tuple[Path, list[Path], list[str]]:
    """Write the report of a run, and those of its worst mistakes and a few good predictions.

    Returns the path of the report, the paths of slide reports, and why some were not made. If
    `out` is a file and not a folder, no slides are reported.
    """
    if pixels is not None and not pixels.is_dir():
        raise RunError(f"{pixels} is not a folder. For a whole run, name the folder of its slides.")
    alone = out is not None and out.suffix.lower() in (".html", ".htm")
    folder = report_folder(run) if out is None else out.parent if alone else out
    path = out if out is not None and alone else folder / INDEX
    replace = out is None
    recipe_of(run)  # damage is found before the work
    names = [] if alone else chosen_slides(run, slides)
    paths = {name: folder / SLIDES / safe_name(name) for name in names}
    if replace:  # the run's own folder
        clear_leftovers(folder)
    files = [str(each.relative_to(folder)) for each in (path, *paths.values())]
    written, missing = [], []
    with nullcontext(folder) if replace else new_files(folder, files) as new:
        for done, (name, slide_path) in enumerate(paths.items(), 1):
            target = new / slide_path.relative_to(folder)
            try:
                reference = locate_slide(run, name, pixels=pixels)
                explained = explain_slide(run, reference, force=force, device=device)
                write_slide_report(run, explained, target, replace=replace)
                written.append(slide_path)
            except (BagError, RunError) as problem:  # the report of the run does not need it
                missing.append(f"{name}: {problem}")
            if progress:
                progress(done, len(paths) + 1)
        text = run_report(
            run,
            links={} if alone else slide_links(run, folder) | slide_links(run, new),
            pixels=pixels,
            flips=flips_of(run, device=pick_device(device)),
        )
        write_text(new / path.name, text, replace=replace)
    return path, written, missing


def without_pixels(run: Run, names: Iterable[str], *, pixels: Path | None = None) -> list[str]:
    """Return the slides whose file is not found, so that their reports have no pictures."""
    found = []
    for name in names:
        with suppress(BagError, RunError):  # there is no report of it, which is said elsewhere
            if not locate_slide(run, name, pixels=pixels).has_pixels:
                found.append(name)
    return found


def slide_links(run: Run, folder: Path) -> dict[str, str]:
    """Return the addresses of existing slide reports, relative to the report of the run."""
    names = dict.fromkeys(run.predictions.slides)
    return {
        name: f"{SLIDES}/{quote(safe_name(name))}"
        for name in names
        if (folder / SLIDES / safe_name(name)).exists()
    }
