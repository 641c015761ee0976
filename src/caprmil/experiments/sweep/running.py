"""Running a plan: point after point or several at once, resumed by itself."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from math import isnan, nan
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from filelock import FileLock, Timeout

from caprmil import config, figures
from caprmil.cohort.cohort import load_cohort
from caprmil.errors import CaprmilError, RecipeError, RunError
from caprmil.executors import Executor, Failed, LocalExecutor, Succeeded, Task, Worker
from caprmil.executors.job_status import LOST_SECONDS, status_path
from caprmil.experiments.sweep.plan import TRIALS, Plan, Point
from caprmil.experiments.sweep.pruning import GivenUp, Judge, Pruned
from caprmil.experiments.sweep.results import Result, Sweep
from caprmil.experiments.sweep.search import Scores, import_optuna, led_by_optuna
from caprmil.io.atomic import check_writable, write_text
from caprmil.io.json_files import as_json, read_json
from caprmil.io.paths import require_local
from caprmil.io.progress import Bar, bar
from caprmil.models.device import pick_device
from caprmil.runs.history import Row
from caprmil.training import cross_validation as training

PLAN, SECONDS, TRIALS_LOG = "sweep.toml", "seconds.json", "trials.json"
PICTURE = "sweep.png"

Outcome: TypeAlias = Result | Pruned | CaprmilError
Listener: TypeAlias = Callable[[int, int, Point, Outcome | None], None]
"""Hears of a point before it is trained (None) and after: number, total, point, what came of it."""


def sweep(
    plan: Plan,
    out: str | Path,
    *,
    trials: int | None = None,
    device: str = "auto",
    progress: bool = True,
    listen: Listener | None = None,
    executor: Executor | None = None,
) -> Sweep:
    """Train every point of a plan as a run in `out/points`, and write tables and a picture.

    What is there already is not trained again, so the same call goes on where it was stopped; with
    more trials it goes further. A point that cannot be trained is noted, and the others go on. With
    several workers an executor runs several points at once, and the folds of each in order.
    """
    out, say, executor = (
        require_local(out),
        listen or (lambda *_: None),
        executor or LocalExecutor(),
    )
    if not executor.remote:  # here and below: what is wrong is found before anything is written
        pick_device(device)
    check_writable(out)
    found = Findings(plan, out)
    points, total = _points(plan, trials, found.scores, out / TRIALS_LOG, several=executor.remote)
    _refuse_hopeless(plan, trials)
    _open(out, plan)
    asked = Asked(points, total, out, say)
    make_worker = partial(Points, plan, out, device, progress=progress and not executor.remote)
    with _alone(out), bar("Sweeping", shown=progress and executor.remote) as step:
        far = Far(step, total)
        for each in executor.run(asked, make_worker, far.hear):
            far.tick(each.task)
            number, point = asked.numbers[each.task.name], each.task.payload
            outcome = _outcome(each)
            found.note(point, outcome)
            found.write(asked.numbers)
            say(number, total, point, outcome)
        whole = found.sweep(asked.numbers)
        if whole.results:
            figures.save(whole.figure(), out / PICTURE, replace=True)
    return whole


def _outcome(each: Succeeded | Failed) -> Outcome:
    """Return what came of a point; what is nobody's mistake but ours is raised."""
    if isinstance(each, Succeeded):
        outcome: Outcome = each.result
        return outcome
    if isinstance(each.error, CaprmilError):
        return each.error
    if each.error is not None:
        raise each.error
    return CaprmilError(each.reason)


class Asked:
    """Points as tasks, each once. A point is proposed only when a worker is free for it."""

    def __init__(self, points: Iterable[Point], total: int, out: Path, say: Listener) -> None:
        self.points, self.total, self.out, self.say = points, total, out, say
        self.numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Task]:
        for number, point in enumerate(self.points, 1):
            if point.name in self.numbers:  # a search may come back
                continue
            self.numbers[point.name] = number
            self.say(number, self.total, point, None)
            yield Task(point.name, status_path(self.out, point.name), point)


class Points(Worker):
    """Trains point after point, each as a run."""

    def __init__(self, plan: Plan, out: Path, device: str, *, progress: bool) -> None:
        self.plan, self.out, self.device, self.progress = plan, out, device, progress
        pick_device(device)

    def run(self, task: Task, report: Bar) -> Result | Pruned:
        """Train a point, or what of it is not there yet."""
        point: Point = task.payload
        folder, recipe = self.out / "points" / point.name, self.plan.recipe_at(point)
        if self.plan.prune and (before := Pruned.read(folder, point)):
            return before
        judge = Judge(self.out / "points", point, warmup=recipe.train.warmup_epochs)

        def watch(fold: str, row: Row) -> None:
            share = (row["epoch"] + 1) / recipe.train.epochs
            report(row["epoch"] + 1, recipe.train.epochs, f"{point.name} {fold} {share:.0%}")
            if self.plan.prune:
                judge(fold, row)

        options: dict[str, Any] = {"device": self.device, "progress": self.progress}
        try:
            with _clock(self.out / SECONDS, point.name) as clock:
                run = training.complete(
                    recipe, folder, **options, on_epoch=watch, wait=3 * LOST_SECONDS
                )
        except GivenUp as end:
            end.verdict.write(folder)
            status_path(folder, end.verdict.fold).unlink(missing_ok=True)  # it has not failed
            return end.verdict
        return Result.of(run, point, seconds=clock[point.name])


class Findings:
    """What has come of the points so far."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan, self.out = plan, out
        self.results: dict[str, Result] = {}
        self.pruned: dict[str, Pruned] = {}
        self.failures: dict[str, str] = {}
        self.scores: dict[str, float | None] = {}

    def note(self, point: Point, outcome: Outcome) -> None:
        name, self.scores[point.name] = point.name, None
        if isinstance(outcome, Result):
            self.results[name] = outcome
            self.scores[name] = _score(self.plan, outcome)
        elif isinstance(outcome, Pruned):
            self.pruned[name], self.scores[name] = outcome, nan
        else:
            self.failures[name] = str(outcome)

    def sweep(self, order: Iterable[str]) -> Sweep:
        """Return all of it, in the order of the points and not in that of their ends."""
        order = list(order)
        return Sweep(
            plan=self.plan,
            results=[self.results[name] for name in order if name in self.results],
            failures={name: self.failures[name] for name in order if name in self.failures},
            pruned=[self.pruned[name] for name in order if name in self.pruned],
        )

    def write(self, order: Iterable[str]) -> None:
        found = self.sweep(order)
        write_text(self.out / "sweep.csv", found.as_csv(), replace=True)
        write_text(self.out / "sweep.md", found.as_markdown(), replace=True)


class Far:
    """How far the points are."""

    def __init__(self, step: Bar, total: int) -> None:
        self.step, self.total, self.done = step, total, 0

    def hear(self, _: Task, __: float, ___: float, remark: str) -> None:
        self.step(self.done, self.total, remark)

    def tick(self, task: Task) -> None:
        self.done += 1
        self.step(self.done, self.total, task.name)


@contextmanager
def _clock(path: Path, name: str) -> Iterator[dict[str, float]]:
    """Add the time that passes inside to what a point has taken before, also if it is stopped."""
    clock: dict[str, float] = {}
    start = monotonic()
    try:
        yield clock
    finally:
        with FileLock(path.with_name(f".{path.name}.lock")):  # others may be at other points
            clock |= read_json(path) if path.exists() else {}
            clock[name] = clock.get(name, 0.0) + monotonic() - start
            write_text(path, as_json(clock), replace=True)


def _score(plan: Plan, result: Result) -> float:
    """Return what a search goes by. It is never the test part."""
    score = result.mean("validation", plan.metric).mean
    if isnan(score) and plan.search != "grid":
        raise RecipeError(
            f"A search goes by the validation parts, and {result.point.name} has no "
            f"{plan.metric} there. Set splits.validation, or choose another --metric."
        )
    return score


def _points(
    plan: Plan, trials: int | None, scores: Scores, log: Path, *, several: bool
) -> tuple[Iterable[Point], int]:
    """Return the points, and how many there are. `scores` will hold those of the points so far."""
    if trials is not None and trials < 1:
        raise ValueError(f"{trials=} must be at least 1.")
    if plan.search == "bayes":
        import_optuna()
        most = trials or TRIALS
        return led_by_optuna(plan, most, scores, log=log, several=several), most
    points = plan.listed(trials)
    return points, len(points)


def _refuse_hopeless(plan: Plan, trials: int | None) -> None:
    """Raise if no point makes a model, or none has a cohort: mistakes in the plan, not in a point.

    Bags are not read here, as each point will.
    """
    points = islice(plan.draws(), TRIALS) if plan.search == "bayes" else plan.listed(trials)
    if problems := _all_problems(plan, points):
        raise problems[0]
    if any(key.split(".")[0] in ("cohort", "features", "data", "splits") for key in plan.axes):
        return
    recipe = plan.recipe
    unread = replace(recipe.data, scan=False)
    _, folds = load_cohort(recipe.cohort, recipe.features, unread, recipe.splits)
    if (plan.search != "grid" or plan.prune) and not any(fold.validation for fold in folds):
        raise RecipeError(
            "Searching and pruning go by the validation parts, and there are none. Set "
            "splits.validation, or pass --search grid without --prune."
        )


def _all_problems(plan: Plan, points: Iterable[Point]) -> list[CaprmilError]:
    """Return why each point makes no model; nothing if one does."""
    problems = []
    for point in points:
        try:
            plan.recipe_at(point).try_model()
            return []
        except CaprmilError as problem:
            problems.append(problem)
    return problems


def _open(out: Path, plan: Plan) -> None:
    """Keep the plan, or see that the one kept there is the same."""
    path, advice = out / PLAN, "Choose another folder for the new sweep."
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        write_text(path, config.dump(plan))
    elif not path.exists():
        raise RunError(f"{out} exists and is not a sweep. {advice}")
    elif changed := config.differences(config.load(path, into=Plan), plan):
        raise RunError(f"{out} holds another sweep ({'; '.join(changed)}). {advice}")


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold a sweep for this process: a second one would take the points of the first for broken."""
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise RunError(f"Another process is sweeping in {out}. Wait for it, or stop it.") from None
