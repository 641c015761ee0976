"""Running a plan: point after point, resumed by itself, on its own or led by Optuna."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from math import isnan
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
from filelock import FileLock, Timeout

from caprmil import config, figures, runs, storage, training
from caprmil.cohort import load as load_cohort
from caprmil.errors import CaprmilError, RecipeError, RunError
from caprmil.files import refuse_unwritable, write_text
from caprmil.metrics import LOWER_IS_BETTER
from caprmil.sweep.plan import TRIALS, Plan, Point, Range
from caprmil.sweep.results import Result, Sweep

PLAN, SECONDS = "sweep.toml", "seconds.json"

Listener: TypeAlias = Callable[[int, int, Point, Result | CaprmilError | None], None]
"""Hears of a point before it is trained (None) and after: number, total, point, what came of it."""


def sweep(
    plan: Plan,
    out: str | Path,
    *,
    trials: int | None = None,
    device: str = "auto",
    progress: bool = True,
    listen: Listener | None = None,
) -> Sweep:
    """Train every point of a plan as a run in `out/points`, and write tables and a picture.

    What is there already is not trained again, so the same call goes on where it was stopped; with
    more trials it goes further. A point that cannot be trained is noted, and the others go on.
    """
    out, say = storage.here(out), listen or (lambda *_: None)
    runs.pick_device(device)  # here and below: what is wrong is found before anything is written
    refuse_unwritable(out)
    scores: dict[str, float] = {}
    points, total = _points(plan, trials, scores)
    _refuse_hopeless(plan, trials)
    _open(out, plan)
    results: dict[str, Result] = {}
    failures: dict[str, str] = {}
    with _alone(out):
        for number, point in enumerate(points, 1):
            if point.name in results or point.name in failures:  # a search may come back
                continue
            say(number, total, point, None)
            outcome = _train(plan, point, out, device=device, progress=progress)
            if isinstance(outcome, Result):
                results[point.name] = outcome
                scores[point.name] = _score(plan, outcome)
            else:
                failures[point.name] = str(outcome)
            found = Sweep(plan=plan, results=list(results.values()), failures=failures)
            write_text(out / "sweep.csv", found.as_csv(), replace=True)
            write_text(out / "sweep.md", found.as_markdown(), replace=True)
            say(number, total, point, outcome)
        if results:
            figures.save(found.figure(), out / "sweep.png", replace=True)
    return found


def _train(
    plan: Plan, point: Point, out: Path, *, device: str, progress: bool
) -> Result | CaprmilError:
    """Train a point, or what of it is not there yet; return what went wrong if it cannot be."""
    try:
        recipe = plan.recipe_at(point)
        with _clock(out / SECONDS, point.name) as clock:
            run = training.complete(
                recipe, out / "points" / point.name, device=device, progress=progress
            )
        return Result.of(run, point, seconds=clock[point.name])
    except CaprmilError as problem:
        return problem


@contextmanager
def _clock(path: Path, name: str) -> Iterator[dict[str, float]]:
    """Add the time that passes inside to what a point has taken before, also if it is stopped."""
    clock = runs.read_json(path) if path.exists() else {}
    start = monotonic()
    try:
        yield clock
    finally:
        clock[name] = clock.get(name, 0.0) + monotonic() - start
        write_text(path, runs.as_json(clock), replace=True)


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
    plan: Plan, trials: int | None, scores: Mapping[str, float]
) -> tuple[Iterable[Point], int]:
    """Return the points, and how many there are. `scores` will hold those of the points so far."""
    if trials is not None and trials < 1:
        raise ValueError(f"{trials=} must be at least 1.")
    if plan.search == "bayes":
        _optuna()
        return _led_by_optuna(plan, trials or TRIALS, scores), trials or TRIALS
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
    if plan.search != "grid" and not any(fold.validation for fold in folds):
        raise RecipeError(
            "A search goes by the validation parts, and there are none. Set splits.validation, or "
            "pass --search grid."
        )


def _all_problems(plan: Plan, points: Iterable[Point]) -> list[CaprmilError]:
    """Return why each point makes no model; nothing if one does."""
    problems = []
    for point in points:
        try:
            plan.recipe_at(point).model.build(1024, 2)
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


def _led_by_optuna(plan: Plan, trials: int, scores: Mapping[str, float]) -> Iterator[Point]:
    """Yield points that Optuna's TPE proposes, each after the score of the one before is there.

    Its memory is made anew from the runs, and each trial has a seed of its own. So a search that
    was stopped asks for the same points again, finds them trained, and goes on as if it had never
    been stopped: the runs are the only truth, and no second file has to agree with them.
    """
    optuna = _optuna()
    lower = plan.metric in LOWER_IS_BETTER
    study = optuna.create_study(direction="minimize" if lower else "maximize")
    for number in range(trials):
        seed = np.random.SeedSequence([plan.seed, number]).generate_state(1)
        study.sampler = optuna.samplers.TPESampler(seed=int(seed[0]))
        trial = study.ask()
        changes = {}
        for key, axis in plan.space().items():
            if not isinstance(axis, Range):
                changes[key] = trial.suggest_categorical(key, axis.texts)
            elif axis.whole:
                drawn = trial.suggest_int(key, int(axis.low), int(axis.high), log=axis.log)
                changes[key] = axis.text(drawn)
            else:
                drawn = trial.suggest_float(key, axis.low, axis.high, log=axis.log)
                changes[key] = axis.text(drawn)
        point = plan.point(changes)
        yield point
        if point.name in scores:
            study.tell(trial, scores[point.name])
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _optuna() -> Any:
    """Return Optuna, quiet; or say how to get it."""
    try:
        import optuna
    except ImportError:
        raise RecipeError(
            "--search bayes needs Optuna: pip install 'caprmil[search]'. "
            "--search random does without."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
