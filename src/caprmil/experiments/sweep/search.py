"""Searching: points that Optuna proposes, one at a time or several at once."""

import json
from collections.abc import Iterator, Mapping
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from caprmil.errors import RecipeError
from caprmil.experiments.sweep.plan import Plan, Point, Range
from caprmil.io.atomic import write_text
from caprmil.targets import find_metric

Scores = Mapping[str, float | None]
"""What a search goes by; None for a point that failed, NaN for one that was pruned."""


def led_by_optuna(
    plan: Plan, trials: int, scores: Scores, *, log: Path | None = None, several: bool = False
) -> Iterator[Point]:
    """Yield points that Optuna's TPE proposes, each with all scores in mind that are there by then.

    Its memory is made anew from the runs, and each trial has a seed of its own. So a search that
    was stopped comes to the same points again, finds them trained, and goes on as if it had never
    been stopped. If several are trained at once, a proposal depends on which were done by then:
    so what was drawn is kept in `log`, and drawn from there the next time.
    """
    optuna = import_optuna()
    lower = not find_metric(plan.metric).higher_is_better
    study = optuna.create_study(direction="minimize" if lower else "maximize")
    drawn: list[dict[str, Any]] = json.loads(log.read_text()) if log and log.exists() else []
    unheard: dict[Any, str] = {}  # trials whose points are in work
    for number in range(trials):
        for trial in [trial for trial, name in unheard.items() if name in scores]:
            _tell(study, trial, scores[unheard.pop(trial)])
        seed = np.random.SeedSequence([plan.seed, number]).generate_state(1)
        study.sampler = optuna.samplers.TPESampler(seed=int(seed[0]), constant_liar=several)
        if number < len(drawn):
            study.enqueue_trial(drawn[number])
        trial = study.ask()
        point = plan.point(_draw(plan, trial))
        if number >= len(drawn):
            drawn.append(trial.params)
            if log:
                write_text(log, json.dumps(drawn, indent=2) + "\n", replace=True)
        unheard[trial] = point.name
        yield point


def _draw(plan: Plan, trial: Any) -> dict[str, str]:
    """Let a trial choose a value on every axis."""
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
    return changes


def _tell(study: Any, trial: Any, score: float | None) -> None:
    states = import_optuna().trial.TrialState
    if score is None:
        study.tell(trial, state=states.FAIL)
    elif isnan(score):
        study.tell(trial, state=states.PRUNED)
    else:
        study.tell(trial, score)


def import_optuna() -> Any:
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
