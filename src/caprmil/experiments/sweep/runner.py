"""Running a sweep: a run per point, one after the other or several at once; it can be resumed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isnan
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import optuna
from filelock import FileLock, Timeout
from optuna.trial import TrialState

from caprmil import config, figures
from caprmil.cohort.cohort import load_cohort
from caprmil.errors import CaprmilError, RecipeError, RunError
from caprmil.executors import Executor, Failed, LocalExecutor, Succeeded, Task, Worker
from caprmil.executors.job_status import LOST_SECONDS, status_path
from caprmil.experiments.sweep import PLAN, POINTS, PROPOSALS, SECONDS
from caprmil.experiments.sweep.axes import Point
from caprmil.experiments.sweep.plan import Plan
from caprmil.experiments.sweep.pruning import Pruned, PruningCheck
from caprmil.experiments.sweep.results import PointResult, SweepResults
from caprmil.experiments.sweep.search import Score, count_points, propose_points
from caprmil.io.atomic import check_writable, write_text
from caprmil.io.json_files import as_json, read_json
from caprmil.io.leftovers import clear_leftovers, final_name
from caprmil.io.paths import require_local
from caprmil.io.progress import Bar, bar
from caprmil.models.device import pick_device
from caprmil.runs.history import Row
from caprmil.training import cross_validation as training

Outcome: TypeAlias = PointResult | Pruned | CaprmilError
OnPoint: TypeAlias = Callable[[int, int, Point, Outcome | None], None]
"""Called before a point is trained, with None, and after: number, total, point, outcome."""


def run_sweep(
    plan: Plan,
    out: str | Path,
    *,
    trials: int | None = None,
    device: str = "auto",
    progress: bool = True,
    on_point: OnPoint | None = None,
    executor: Executor | None = None,
    allow_loggers: Sequence[str] = (),
) -> SweepResults:
    """Train every point of a plan as a run in `out/points`, and write tables and a figure.

    Finished points are not trained again: the same call resumes a sweep that was stopped, and with
    more trials it continues. If a point cannot be trained, its error is reported and the others
    are trained. An executor with several workers trains several points at once, and the folds of
    each in order. A sweep with the same axes in another order is the same sweep: it has the same
    points, and its tables in that order are written beside the others.
    """
    out, executor = require_local(out), executor or LocalExecutor()
    if not executor.remote:  # here and below: errors are found before anything is written
        pick_device(device)
    check_writable(out)
    total = count_points(plan, trials)
    _check_plan(plan, trials)
    asked, plan = plan, _open_folder(out, plan)
    outcomes = Outcomes(plan, asked, out)
    proposals = propose_points(
        plan,
        trials,
        outcomes.scores,
        log=out / PROPOSALS if plan.search == "bayes" else None,
        parallel=executor.remote,
    )
    tasks = PointTasks(proposals, total, out, on_point or (lambda *_: None))
    make_worker = partial(
        PointWorker,
        plan,
        out,
        device,
        progress=progress and not executor.remote,
        allow_loggers=allow_loggers,
    )
    with _lock(out), bar("Sweeping", shown=progress and executor.remote) as step:

        def on_progress(_task: Task, _done: float, _total: float, message: str) -> None:
            step(len(outcomes.scores), total, message)

        for each in executor.run(tasks, make_worker, on_progress):
            point, outcome = each.task.payload, _outcome(each)
            outcomes.add(point, outcome)
            outcomes.write(tasks.numbers)
            step(len(outcomes.scores), total, point.name)
            tasks.report(point, outcome)
        for results in outcomes.results(tasks.numbers):
            if results.points:
                figures.save(results.figure(), out / results.files["png"], replace=True)
    return results


def _outcome(each: Succeeded | Failed) -> Outcome:
    """Return the outcome of a point. An error that is not a CaprmilError is a bug: it is raised."""
    if isinstance(each, Succeeded):
        outcome: Outcome = each.result
        return outcome
    if isinstance(each.error, CaprmilError):
        return each.error
    if each.error is not None:
        raise each.error
    return CaprmilError(each.reason)


class PointTasks:
    """Points as tasks. A point is proposed only when a worker is free for it."""

    def __init__(self, points: Iterable[Point], total: int, out: Path, on_point: OnPoint) -> None:
        self.points, self.total, self.out, self.on_point = points, total, out, on_point
        self.numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Task]:
        for number, point in enumerate(self.points, 1):
            self.numbers[point.name] = number
            self.report(point, None)
            yield Task(point.name, status_path(self.out, point.name), point)

    def report(self, point: Point, outcome: Outcome | None) -> None:
        self.on_point(self.numbers[point.name], self.total, point, outcome)


class PointWorker(Worker):
    """Trains points, each as a run."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        device: str,
        *,
        progress: bool,
        allow_loggers: Sequence[str] = (),
    ) -> None:
        self.plan, self.out, self.device, self.progress = plan, out, device, progress
        self.allow_loggers = allow_loggers
        pick_device(device)

    def run(self, task: Task, report: Bar) -> PointResult | Pruned:
        """Return the result of a point, after training what is missing of it."""
        point: Point = task.payload
        folder, recipe = self.out / POINTS / point.name, self.plan.recipe_at(point)
        if self.plan.prune and (pruned := Pruned.read(folder, point)):
            return pruned
        check = PruningCheck(folder.parent, point, warmup_epochs=recipe.train.warmup_epochs)

        def on_epoch(fold: str, row: Row) -> None:
            done, epochs = row["epoch"] + 1, recipe.train.epochs
            report(done, epochs, f"{point.name} {fold} {done / epochs:.0%}")
            if self.plan.prune:
                check(fold, row)

        options: dict[str, Any] = {"device": self.device, "progress": self.progress}
        options["allow_loggers"] = self.allow_loggers
        try:
            with _timed(self.out / SECONDS, point.name) as seconds:
                run = training.complete(
                    recipe, folder, **options, on_epoch=on_epoch, wait=3 * LOST_SECONDS
                )
        except optuna.TrialPruned:
            assert check.pruned is not None
            check.pruned.write(folder)
            status_path(folder, check.pruned.fold).unlink(missing_ok=True)  # it has not failed
            return check.pruned
        return PointResult.from_run(run, point, seconds=seconds[point.name])


class Outcomes:
    """The outcomes of the points so far. `asked` is the plan with the axes as they were given."""

    def __init__(self, plan: Plan, asked: Plan, out: Path) -> None:
        self.plan, self.asked, self.out = plan, asked, out
        self.outcomes: dict[str, Outcome] = {}
        self.scores: dict[str, Score] = {}

    def add(self, point: Point, outcome: Outcome) -> None:
        self.outcomes[point.name] = outcome
        if isinstance(outcome, PointResult):
            self.scores[point.name] = _score(self.plan, outcome)
        else:
            pruned = isinstance(outcome, Pruned)
            self.scores[point.name] = TrialState.PRUNED if pruned else TrialState.FAIL

    def results(self, names: Iterable[str]) -> list[SweepResults]:
        """Return the results in the order of the names, which is that of the proposals.

        Last are those with the axes as they were given.
        """
        known = {name: self.outcomes[name] for name in names if name in self.outcomes}
        results = SweepResults(
            plan=self.plan,
            points=[each for each in known.values() if isinstance(each, PointResult)],
            failures={n: str(each) for n, each in known.items() if isinstance(each, CaprmilError)},
            pruned=[each for each in known.values() if isinstance(each, Pruned)],
        )
        if self.asked.has_order_of(self.plan):
            return [results]
        return [results, results.in_order_of(self.asked)]

    def write(self, names: Iterable[str]) -> None:
        for results in self.results(names):
            write_text(self.out / results.files["csv"], results.as_csv(), replace=True)
            write_text(self.out / results.files["md"], results.as_markdown(), replace=True)


@contextmanager
def _timed(path: Path, name: str) -> Iterator[dict[str, float]]:
    """Add the time spent inside to the seconds of a point, also after an error."""
    seconds = read_seconds(path)  # if it is damaged, this is found before the training
    start = monotonic()
    try:
        yield seconds
    finally:
        with FileLock(path.with_name(f".{path.name}.lock")):  # other workers write to it too
            seconds |= read_seconds(path)
            seconds[name] = seconds.get(name, 0.0) + monotonic() - start
            write_text(path, as_json(seconds), replace=True)


def read_seconds(path: Path) -> dict[str, float]:
    """Return the seconds of each point so far."""
    advice = "Remove it: earlier trainings are then not counted."
    seconds = read_json(path, advice=advice) if path.exists() else {}
    if not all(type(value) in (int, float) and value >= 0 for value in seconds.values()):
        raise RunError(f"{path} is damaged (a number is needed for each point). {advice}")
    return seconds


def _score(plan: Plan, result: PointResult) -> float:
    """Return the score that a search optimises. It is never that of the test parts."""
    score = result.mean("validation", plan.metric).mean
    if isnan(score) and plan.search != "grid":
        raise RecipeError(
            f"A search needs the {plan.metric} of the validation parts, and {result.point.name} "
            "has none. Set splits.validation, or choose another --metric."
        )
    return score


def _check_plan(plan: Plan, trials: int | None) -> None:
    """Raise if no point makes a model, or if the cohort is wrong. Bags are not read here."""
    problems = []
    for point in propose_points(plan, trials, {}):
        try:
            plan.recipe_at(point).try_model()
            break
        except CaprmilError as problem:
            problems.append(problem)
    else:
        raise problems[0]
    if any(
        key.split(".")[0] in ("cohort", "features", "sources", "data", "splits", "target")
        for key in plan.axes
    ):
        return
    recipe = plan.recipe
    unread = replace(recipe.data, scan=False)
    _, folds = load_cohort(
        *(recipe.cohort, recipe.features, unread, recipe.splits),
        target=recipe.target,
        join=recipe.join,
    )
    if (plan.search != "grid" or plan.prune) and not any(fold.validation for fold in folds):
        raise RecipeError(
            "Searching and pruning use the validation parts, and there are none. Set "
            "splits.validation, or pass --search grid without --prune."
        )


def _open_folder(out: Path, plan: Plan) -> Plan:
    """Write the plan to a new folder, or check that the plan in the folder is the same.

    Return the plan with its axes in the order of the folder. Names of points are in that order, and
    so are the draws of a search.
    """
    path, advice = out / PLAN, "Choose another folder for the new sweep."
    is_new = not out.exists() or (out.is_dir() and all(map(final_name, out.iterdir())))
    if not is_new and not path.exists():
        raise RunError(f"{out} exists and is not a sweep. {advice}")
    clear_leftovers(out)  # a process may have been killed at any file
    if is_new:
        write_text(path, config.dump(plan))
        return plan
    kept = config.load(path, into=Plan)
    if changed := config.differences(kept, plan):
        raise RunError(f"{out} holds another sweep ({'; '.join(changed)}). {advice}")
    return kept


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Lock a sweep for this process: a second one would train the same points."""
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise RunError(f"Another process is sweeping in {out}. Wait for it, or stop it.") from None
