"""The folder of an implant: the answers as JSON, and a figure."""

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from caprmil import figures
from caprmil.explain.implant import Implant
from caprmil.figures import AnswerRow, answer_rows
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NAME = 24  # characters of a slide's name in the figure


def write_implant(folder: Path, found: Implant, run: Run, *, region: str) -> None:
    """Write implant.json and implant.png. `region` is the text that the user gave."""
    record = {
        **found.as_dict(),
        "region": region,
        "provenance": {
            "caprmil": version("caprmil"),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": str(run.folder),
            "recipe": run.facts.digest,
        },
    }
    write_text(folder / "implant.json", as_json(record))
    figures.save(draw_implant(found), folder / "implant.png", dpi=200)


def draw_implant(found: Implant) -> "Figure":
    """Draw the answer for each bag: the slide and the source, with and without the region."""
    target = found.target
    source, slide = (_short(name) for name in (found.source, found.slide))
    rows = [
        AnswerRow(
            title=row.title.replace(found.slide, slide).replace(found.source, source),
            models=[float(target.followed(own)[found.followed]) for own in row.by_fold.values()],
            mean=float(target.followed(row.answer)[found.followed]),
            is_whole=row.title in (found.slide, found.source),
        )
        for row in found.rows()
    ]
    return answer_rows(
        rows,
        title=f"{source} into {slide}",
        xlabel=target.answer_axis.format(target.names[found.followed]),
        limits=target.answer_bounds,
    )


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
