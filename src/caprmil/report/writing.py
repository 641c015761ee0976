"""Where reports are written: in the run's own folder, or where somebody wants them.

RUN/report/index.html         the run
RUN/report/slides/NAME.html   a slide
RUN/report/features/          bags of slides that were encoded for a report

These are ours and made anew each time; a place that a user names is never overwritten.
"""

import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from caprmil.errors import BagError, CaprmilError, RunError
from caprmil.explain import Case, Subject, examine, find
from caprmil.io.atomic import check_new, write_text
from caprmil.io.paths import as_path
from caprmil.io.progress import Bar, Step
from caprmil.report import mistakes
from caprmil.report.run import run_report
from caprmil.report.slide import slide_report
from caprmil.runs.predict import bags_of
from caprmil.runs.run import Run
from caprmil.slides.qc import Record

INDEX, SLIDES, FEATURES = "index.html", "slides", "features"
LONGEST = 100  # letters of a file's name


def home(run: Run) -> Path:
    """Return the folder of a run's reports."""
    return run.folder / "report"


def safe_name(slide: str) -> str:
    """Return a file's name for a slide. Two slides never share one, whatever they are called."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", slide).strip("._-")[:LONGEST]
    same = plain == slide != ""
    digest = sha256(slide.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain if same else '-'.join(filter(None, [plain, digest]))}.html"


def subjects(
    run: Run,
    inputs: Iterable[str],
    *,
    pixels: Path | None = None,
    progress: Bar | None = None,
    **encoding: Any,
) -> tuple[dict[str, Subject], list[Record]]:
    """Return slides of the run by name, bags, and slide files, which are encoded first.

    Beside them, the slides that could not be encoded. `encoding` is passed to `bags_of`.
    """
    inputs = list(inputs)
    found = {name: find(run, name, pixels=pixels) for name in inputs if name in run.paths}
    others = [as_path(word) for word in inputs if word not in run.paths]
    for path in others:
        if not path.exists():
            find(run, path)  # which says what there is
    if not others:
        return found, []
    bags, failed = bags_of(run, others, home(run) / FEATURES, **encoding, progress=progress)
    return found | {name: find(run, bag, pixels=pixels) for name, bag in bags.items()}, failed


def places(run: Run, names: Iterable[str], out: Path | None) -> dict[str, Path]:
    """Return where the report of each slide goes; refuse a user's place that is taken."""
    names = list(names)
    if out is None:
        return {name: home(run) / SLIDES / safe_name(name) for name in names}
    one = len(names) == 1 and out.suffix.lower() in (".html", ".htm")
    found = {name: out if one else out / safe_name(name) for name in names}
    if not one and out.is_file():
        raise CaprmilError(f"{out} is a file. Several reports need a folder.")
    for path in found.values():
        check_new(path)
    return found


def write_slide(
    run: Run, case: Case, path: Path, *, replace: bool, progress: Step | None = None
) -> Path:
    """Write the report of a case."""
    return write_text(path, slide_report(run, case, progress=progress), replace=replace)


def telling(run: Run, most: int) -> list[str]:
    """Return the slides worth a report: the worst mistakes, and of each class the surest right."""
    answers = run.predictions
    rows = [*mistakes.worst(answers, most), *(mistakes.surest(answers) if most else [])]
    return list(dict.fromkeys(answers.slides[row] for row in rows))


def write_run(
    run: Run,
    *,
    out: Path | None = None,
    slides: int = 4,
    pixels: Path | None = None,
    force: bool = False,
    device: str = "auto",
    progress: Step | None = None,
) -> tuple[Path, list[Path], list[str]]:
    """Write the report of a run and those of its telling slides.

    Returns the report, the slides' reports, and why some were not made. A user's own file (not a
    folder) stands alone: slides are then not reported.
    """
    if pixels is not None and not pixels.is_dir():
        raise RunError(f"{pixels} is no folder. For a whole run, name the folder of its slides.")
    alone = out is not None and out.suffix.lower() in (".html", ".htm")
    folder = home(run) if out is None else out.parent if alone else out
    path = out if out is not None and alone else folder / INDEX
    replace = out is None
    names = [] if alone else telling(run, slides)
    targets = {name: folder / SLIDES / safe_name(name) for name in names}
    if not replace:
        for target in (path, *targets.values()):
            check_new(target)
    written, missing = [], []
    for done, (name, target) in enumerate(targets.items(), 1):
        try:
            subject = find(run, name, pixels=pixels)
            case = examine(run, subject, force=force, device=device)
            written.append(write_slide(run, case, target, replace=replace))
        except (BagError, RunError) as problem:  # the run's report does without
            missing.append(f"{name}: {problem}")
        if progress:
            progress(done, len(targets) + 1)
    text = run_report(run, links={} if alone else links(run, folder), pixels=pixels)
    return write_text(path, text, replace=replace), written, missing


def links(run: Run, folder: Path) -> dict[str, str]:
    """Return the addresses of the slide reports that are there, seen from the run's report."""
    names = dict.fromkeys(run.predictions.slides)
    return {
        name: f"{SLIDES}/{quote(safe_name(name))}"
        for name in names
        if (folder / SLIDES / safe_name(name)).exists()
    }
