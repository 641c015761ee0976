"""Status: what of a long work is done, running, failed and still to do, by its files alone.

It can be asked from any machine that sees the folder, whether or not anybody is at work in it.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from caprmil import config
from caprmil.errors import RecipeError, RunError
from caprmil.executors.job_status import JobStatus, read_statuses
from caprmil.experiments.sweep.plan import Plan
from caprmil.experiments.sweep.pruning import PRUNED
from caprmil.experiments.sweep.running import PICTURE, PLAN
from caprmil.io.json_files import read_json
from caprmil.io.paths import as_path
from caprmil.runs.run import RECIPE, SCORES, Run
from caprmil.slides.qc import Record

STATES = ("done", "no tissue", "pruned", "running", "waiting", "stopped", "failed", "to do")
"""waiting: for another try, after one that failed. stopped: begun, but nobody is at it any more."""


@dataclass(frozen=True)
class Standing:
    """How a unit of work stands."""

    name: str
    state: str
    remark: str = ""


@dataclass(frozen=True)
class Status:
    """What a folder holds, and how each unit of it stands."""

    kind: str
    units: tuple[Standing, ...]

    def count(self) -> dict[str, int]:
        """Return how many units are in each state in which there are any."""
        counts = {state: sum(unit.state == state for unit in self.units) for state in STATES}
        return {state: count for state, count in counts.items() if count}

    def open(self) -> list[Standing]:
        """Return the units that are not done."""
        return [unit for unit in self.units if unit.state not in ("done", "no tissue")]


def read_status(folder: str | Path) -> Status:
    """Return the status of a folder of bags, a run, a sweep or a reproduction."""
    folder = as_path(folder)
    if not folder.is_dir():
        raise RunError(f"There is no folder {folder}.")
    if (folder / PLAN).exists():
        return Status("a sweep", tuple(_points(folder)))
    if (folder / RECIPE).exists():
        return Status("a run", tuple(_folds(folder)))
    if models := sorted(path.parent for path in folder.glob(f"*/{RECIPE}")):
        units = [unit for model in models for unit in _folds(model, f"{model.name}/")]
        return Status("a reproduction", tuple(units))
    if (units := list(_slides(folder))) or (folder / "qc.csv").exists():
        return Status("bags", tuple(units))
    raise RunError(
        f"{folder} holds no bags, run, sweep or reproduction. Name the folder that was --out."
    )


def _slides(folder: Path) -> Iterator[Standing]:
    """Tell of slides that were begun; what has not been is known to the command alone."""
    statuses = read_statuses(folder)
    records = {
        path.stem: Record.read(folder / "qc", path.stem) for path in folder.glob("qc/*.json")
    }
    bags = {path.stem for path in folder.glob("*.h5") if not path.name.startswith(".")}
    for name in sorted({*statuses, *records, *bags}):
        record, at_work = records.get(name), _told(name, statuses)
        if at_work and at_work.state == "running":
            yield at_work
        elif record and record.state == "failed":
            yield Standing(name, "failed", record.reason)
        elif record or name in bags:
            yield Standing(name, record.state if record else "done")
        elif at_work:
            yield at_work


def _folds(folder: Path, prefix: str = "") -> Iterator[Standing]:
    try:
        run = Run(folder)
    except RunError:  # stopped before all of it was written
        yield Standing(f"{prefix}folds", "to do", "the run has only just been opened")
        return
    statuses, done = read_statuses(folder), {fold.name for fold in run.done}
    for fold in run.splits:
        name = prefix + fold.name
        if fold.name in done:
            yield Standing(name, "done")
        elif told := _told(fold.name, statuses):
            yield Standing(name, told.state, told.remark)
        elif (folder / "folds" / f".{fold.name}.part").is_dir():
            yield Standing(name, "stopped", "goes on from its last epoch")
        else:
            yield Standing(name, "to do")
    yield Standing(f"{prefix}scores", "done" if run.finished else "to do")


def _points(folder: Path) -> Iterator[Standing]:
    statuses = read_statuses(folder)
    names = {path.name: None for path in sorted((folder / "points").glob("*")) if path.is_dir()}
    names |= dict.fromkeys(statuses)
    # With --trials not all of a grid is asked for: once a sweep has its picture, none is to do.
    # A grid too large to be trained whole is an error here; of a search nobody knows.
    with suppress(RecipeError):
        plan = config.load(folder / PLAN, into=Plan)
        asked = plan.search == "grid" and not (folder / PICTURE).exists()
        names |= {p.name: None for p in plan.listed()} if asked else {}
    for name in names:
        point, told = folder / "points" / name, _told(name, statuses)
        if (point / SCORES).exists():
            yield Standing(name, "done")
        elif (point / PRUNED).exists():
            facts = read_json(point / PRUNED)
            yield Standing(name, "pruned", f"{facts['fold']}, after epoch {facts['epoch']}")
        elif told:
            yield told
        elif point.is_dir():
            yield Standing(name, "stopped", "goes on from its last epoch")
        else:
            yield Standing(name, "to do")


def _told(name: str, statuses: Mapping[str, JobStatus]) -> Standing | None:
    """Return the state in a status file; "stopped" if its process is gone."""
    if name not in statuses:
        return None
    status = statuses[name]
    if status.lost:
        silence = _span(status.silent_seconds)
        return Standing(name, "stopped", f"no heartbeat for {silence} from {status.process}")
    tries = f"attempt {status.attempt}" if status.attempt > 1 or status.state != "running" else ""
    if status.state == "running":
        far = f"{status.done:g} of {status.total:g} {status.message}" if status.total else ""
        since = f"since {_span(time.time() - status.started)}"
        parts = [far, since, f"on {status.process}", tries]
    else:
        parts = [status.reason, tries]
    return Standing(name, status.state, "; ".join(part for part in parts if part))


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
