"""Search: the points of a plan, in the order of a grid or as Optuna's samplers propose them.

The study is in memory and is built again from the runs. A file of Optuna's would be a second record
of what the folders of points already say: it keeps killed trials as running, and cannot turn a
failed trial into a finished one.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState

from caprmil.errors import RunError
from caprmil.experiments.sweep.axes import Axis, Point, Values
from caprmil.experiments.sweep.plan import Plan
from caprmil.io.atomic import write_text
from caprmil.io.json_files import parse_json

DEFAULT_TRIALS = 20  # points of a search without --trials
DRAWS_PER_POINT = 100  # until a space is taken to have no other points

Score: TypeAlias = float | TrialState
"""The score of a point on validation, or that it failed or was pruned."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


def count_points(plan: Plan, trials: int | None) -> int:
    """Return the number of points that a sweep trains, at most."""
    if trials is not None and trials < 1:
        raise ValueError(f"{trials=} must be at least 1.")
    if plan.search == "grid" and trials is None:
        return len(plan.space.grid())
    return int(min(trials or DEFAULT_TRIALS, plan.space.size))


def propose_points(
    plan: Plan,
    trials: int | None,
    scores: Mapping[str, Score],
    *,
    log: Path | None = None,
    parallel: bool = False,
) -> Iterator[Point]:
    """Yield the points to train, each once. `scores` has those known so far, by point.

    A grid is in order. A part of a grid and a random search are drawn by Optuna's RandomSampler,
    and more trials begin with the points of fewer. A Bayesian search uses its TPESampler, with all
    scores that are known by then. Every trial has its own seed, so a search that was stopped
    proposes the same points again, finds them trained, and continues. With parallel workers a
    proposal depends on which points were finished, so the proposals are kept in `log`.
    """
    total = count_points(plan, trials)
    if plan.search == "grid" and total == plan.space.size:
        yield from plan.space.grid()
        return
    distributions = {key: distribution(axis) for key, axis in plan.space.axes.items()}
    study = optuna.create_study(direction="maximize" if plan.higher_is_better else "minimize")
    logged = read_log(log, distributions) if log and log.exists() else []
    running: dict[Trial, str] = {}
    names: set[str] = set()
    for number in range(DRAWS_PER_POINT * total):
        # TPE returns to a good point, and that counts as a trial. Other draws are repeated.
        if (number if plan.search == "bayes" else len(names)) >= total:
            return
        for trial in [trial for trial, name in running.items() if name in scores]:
            _tell(study, trial, scores[running.pop(trial)])
        study.sampler = make_sampler(plan, number, parallel=parallel)
        if number < len(logged):
            study.enqueue_trial(logged[number])
        trial = study.ask(distributions)
        if log and number >= len(logged):
            logged.append(trial.params)
            write_text(log, json.dumps(logged, indent=2) + "\n", replace=True)
        axes = plan.space.axes.items()
        point = plan.space.point({key: axis.text(trial.params[key]) for key, axis in axes})
        if plan.search == "bayes":
            running[trial] = point.name
        if point.name not in names:
            names.add(point.name)
            yield point


def read_log(log: Path, axes: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return the proposals so far; raise if they are not of these axes."""
    try:
        logged: list[dict[str, Any]] = parse_json(log.read_bytes())
        for params in logged:
            if params.keys() != axes.keys():
                raise ValueError(f"{params} is not a point")
            for key, axis in axes.items():
                axis.to_internal_repr(params[key])
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        raise RunError(
            f"{log} is damaged ({problem}). Restore it from a copy, or remove it: further points "
            "may then be others."
        ) from problem
    return logged


def distribution(axis: Axis) -> BaseDistribution:
    """Return what Optuna samples an axis from."""
    if isinstance(axis, Values):
        return CategoricalDistribution(axis.texts)
    if axis.integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def make_sampler(plan: Plan, number: int, *, parallel: bool) -> BaseSampler:
    """Return the sampler of a trial, with a seed of the plan and the number of the trial."""
    seed = int(np.random.SeedSequence([plan.seed, number]).generate_state(1)[0])
    if plan.search == "bayes":
        return TPESampler(seed=seed, constant_liar=parallel)
    return RandomSampler(seed=seed)


def _tell(study: optuna.Study, trial: Trial, score: Score) -> None:
    if isinstance(score, TrialState):
        study.tell(trial, state=score)
    else:
        study.tell(trial, score)
