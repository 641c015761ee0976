"""Status of a folder: which tasks are done, running, failed or to do, read from its files.

It works on every machine that sees the folder, whether or not a process runs in it. It loads no
torch, so that it is quick.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from caprmil import config
from caprmil.errors import RunError
from caprmil.executors.job_status import JobStatus, read_statuses
from caprmil.experiments.sweep import FIGURE, PLAN, POINTS, PRUNED
from caprmil.experiments.sweep.axes import SearchSpace
from caprmil.io.json_files import read_json
from caprmil.io.paths import RemotePath, as_path
from caprmil.runs.remote import BESIDE, FOLDS, LAST, START, finished_folds
from caprmil.runs.splits import read_splits
from caprmil.slides.qc import Record

RECIPE, SPLITS, SCORES = START[0], START[1], LAST
STATES = ("done", "no tissue", "pruned", "running", "waiting", "stopped", "failed", "to do")
"""waiting: for a retry after a failure. stopped: started, but its process is gone."""
RESUMES = "resumes from its last epoch"


@dataclass(frozen=True)
class TaskStatus:
    """The state of a slide, fold or point, with a detail such as the reason of a failure."""

    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Status:
    """The kind of a folder, and the state of each task in it."""

    kind: str
    tasks: tuple[TaskStatus, ...]

    def count(self) -> dict[str, int]:
        """Return the number of tasks in each state that occurs."""
        counts = {state: sum(task.state == state for task in self.tasks) for state in STATES}
        return {state: count for state, count in counts.items() if count}

    def unfinished(self) -> list[TaskStatus]:
        """Return the tasks that are not done."""
        return [task for task in self.tasks if task.state not in ("done", "no tissue")]


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
        tasks = [task for model in models for task in _folds(model, f"{model.name}/")]
        return Status("a reproduction", tuple(tasks))
    if (tasks := list(_slides(folder))) or (folder / "qc.csv").exists():
        return Status("bags", tuple(tasks))
    raise RunError(
        f"{folder} holds no bags, run, sweep or reproduction. Name the folder that was --out."
    )


def _slides(folder: Path) -> Iterator[TaskStatus]:
    """Yield the slides that were started. The folder does not say which others there are."""
    statuses = read_statuses(folder)
    records = {
        path.stem: Record.read(folder / "qc", path.stem) for path in folder.glob("qc/*.json")
    }
    bags = {path.stem for path in folder.glob("*.h5") if not path.name.startswith(".")}
    for name in sorted({*statuses, *records, *bags}):
        record, unfinished = records.get(name), _unfinished(name, statuses)
        if unfinished and unfinished.state == "running":
            yield unfinished
        elif record and record.state == "failed":
            yield TaskStatus(name, "failed", record.reason)
        elif record or name in bags:
            yield TaskStatus(name, record.state if record else "done")
        elif unfinished:
            yield unfinished
        else:
            yield TaskStatus(name, "failed", f"{folder / 'qc' / name}.json is damaged. Remove it.")


def _folds(folder: Path, prefix: str = "", *, scored: bool = True) -> Iterator[TaskStatus]:
    if not (folder / SPLITS).exists():  # it was stopped before this file was written
        yield TaskStatus(f"{prefix}folds", "to do", "the run was only just created")
        return
    folds = [fold.name for fold in read_splits(folder).folds]
    statuses, done = read_statuses(folder), set(_finished_folds(folder, folds))
    for fold in folds:
        name = prefix + fold
        if fold in done:
            yield TaskStatus(name, "done")
        elif unfinished := _unfinished(fold, statuses):
            yield TaskStatus(name, unfinished.state, unfinished.detail)
        elif (folder / FOLDS / f".{fold}.part").is_dir():
            yield TaskStatus(name, "stopped", RESUMES)
        else:
            yield TaskStatus(name, "to do")
    if not scored:
        return
    for beside in [path for name in BESIDE for path in sorted(folder.glob(name))]:
        if (beside / RECIPE).exists():  # only its predictions are needed
            yield from _folds(beside, f"{prefix}{beside.name}/", scored=False)
    yield TaskStatus(f"{prefix}scores", "done" if (folder / SCORES).exists() else "to do")


def _finished_folds(folder: Path, folds: Iterable[str]) -> list[str]:
    if isinstance(folder, RemotePath):
        return finished_folds(folder)
    return [fold for fold in folds if (folder / FOLDS / fold).is_dir()]


def _points(folder: Path) -> Iterator[TaskStatus]:
    statuses = read_statuses(folder)
    names = {path.name: None for path in sorted((folder / POINTS).glob("*")) if path.is_dir()}
    names |= dict.fromkeys([*statuses, *_grid(folder)])
    for name in names:
        point, unfinished = folder / POINTS / name, _unfinished(name, statuses)
        if (point / SCORES).exists():
            yield TaskStatus(name, "done")
        elif (point / PRUNED).exists():
            pruned = read_json(point / PRUNED)
            detail = f"{pruned.get('fold')}, after epoch {pruned.get('epoch')}"
            yield TaskStatus(name, "pruned", detail)
        elif unfinished:
            yield unfinished
        elif point.is_dir():
            yield TaskStatus(name, "stopped", RESUMES)
        else:
            yield TaskStatus(name, "to do")


def _grid(folder: Path) -> list[str]:
    """Return the points of a grid, in order; nothing for a search, whose points are not known.

    A sweep with --trials trains a part of its grid. So when it has its figure, nothing is to do.
    """
    try:
        plan = config.read_toml((folder / PLAN).read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(
            f"{folder / PLAN} is damaged ({problem}). Restore it from a copy."
        ) from problem
    # E.g. more points than a grid may have.
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        if plan["search"] == "grid" and not (folder / FIGURE).exists():
            return [point.name for point in SearchSpace(plan["axes"]).grid()]
    return []


def _unfinished(name: str, statuses: Mapping[str, JobStatus]) -> TaskStatus | None:
    """Return the state in a status file; "stopped" if its process is gone."""
    if name not in statuses:
        return None
    status = statuses[name]
    if status.lost:
        silence = _duration(status.silent_seconds)
        return TaskStatus(name, "stopped", f"no heartbeat for {silence} from {status.process}")
    attempt = f"attempt {status.attempt}" if status.attempt > 1 or status.state != "running" else ""
    if status.state == "running":
        done = f"{status.done:g} of {status.total:g} {status.message}" if status.total else ""
        since = f"since {_duration(time.time() - status.started)}"
        parts = [done, since, f"on {status.process}", attempt]
    else:
        parts = [status.reason, attempt]
    return TaskStatus(name, status.state, "; ".join(part for part in parts if part))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
