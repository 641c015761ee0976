"""Cross-validation: a recipe and a cohort become a run, fold by fold."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from caprmil import config
from caprmil.cohort.cohort import load_cohort
from caprmil.errors import RunError, shorten
from caprmil.executors import Executor, LocalExecutor, Succeeded, Task
from caprmil.io.atomic import check_writable, write_text
from caprmil.io.paths import RemotePath, as_path, require_local
from caprmil.io.progress import Bar, bar
from caprmil.models.compiling import find_compiler
from caprmil.models.device import pick_device
from caprmil.runs.facts import COHORT
from caprmil.runs.remote import remote_run
from caprmil.runs.run import Run
from caprmil.runs.scores import SCORES
from caprmil.runs.scoring import score_run
from caprmil.training.beside import models_beside
from caprmil.training.distributed import ProcessGroup
from caprmil.training.early_checks import check_folder, check_start
from caprmil.training.fold_worker import FoldWorker, OnEpoch, Training
from caprmil.training.loggers import make_loggers
from caprmil.training.module import check_distributed
from caprmil.training.recipe import Recipe
from caprmil.training.run_folder import lock_run, open_run
from caprmil.training.trackers import check_trackers
from caprmil.training.warm_start import open_start

_log = logging.getLogger("caprmil")


def cross_validate(
    recipe: Recipe,
    out: str | Path,
    *,
    table: pd.DataFrame | None = None,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    progress: bool = True,
    score: bool = True,
    mean: bool = False,
    modalities: bool = False,
    executor: Executor | None = None,
    on_epoch: OnEpoch | None = None,
    allow_loggers: Sequence[str] = (),
) -> Run:
    """Train and score a model on every fold of a cohort. Each is scored on its own test part.

    `out` must be new, or hold an interrupted run of the same recipe: it is resumed, and ends with
    the numbers it would have had. Nothing in it is overwritten. A remote run is trained in a local
    copy. `table` replaces `recipe.cohort` and is written to cohort.csv in `out`. Without
    `score` the folds are trained and predicted, and the run stays unfinished. With `mean`, a Mean
    is trained on the same folds, in a folder of the run, and is one of the baselines. With
    `modalities`, a model of covariates or several sources is compared with a model of each of them
    alone, as `caprmil train` does. A logger of the recipe that is not Lightning's own runs its code
    only if `allow_loggers` names it.

    On several devices, the bags of a step are divided. A recipe with fewer is changed to one each.
    """
    out = as_path(out)
    if table is not None:
        recipe = replace(recipe, cohort=str(_write_cohort(table, require_local(out))))
    options: dict[str, Any] = {
        "device": device,
        "progress": progress,
        "score": score,
        "mean": mean,
        "modalities": modalities,
        "on_epoch": on_epoch,
        "allow_loggers": allow_loggers,
    }
    if executor is not None and executor.remote:  # devices are those of its workers
        if devices * nodes > 1:
            raise RunError("Ray has a fold for each worker: leave out --devices and --nodes.")
        return _train_at(recipe, out, **options, executor=executor)
    with ProcessGroup(device, devices, nodes) as group:
        if not group.is_main:
            group.run_jobs()
            return Run(out)
        options |= {"group": group if group.world_size > 1 else None}
        return _train_at(adjust_batch_size(recipe, group), out, **options)


def _write_cohort(table: pd.DataFrame, out: Path) -> Path:
    """Write a DataFrame as the cohort of a run; that of a run to resume must be the same."""
    path = out / COHORT
    text = table.to_csv(index=False, lineterminator="\n")
    if not path.exists():
        write_text(path, text)
    elif path.read_bytes() != text.encode("utf-8"):
        raise RunError(f"{path} is of another table. Choose another folder for the new run.")
    return path


def adjust_batch_size(recipe: Recipe, group: ProcessGroup) -> Recipe:
    """Return the recipe with at least one bag for each device in a step."""
    batch = max(recipe.train.batch_size, group.world_size)
    if batch > recipe.train.batch_size:
        _log.warning(
            "note: %d devices take one bag each: train.batch_size is %d, not %d.",
            *(group.world_size, batch, recipe.train.batch_size),
        )
    return replace(recipe, train=replace(recipe.train, batch_size=batch))


def cross_validate_all(
    recipes: Mapping[Path, Recipe],
    *,
    device: str = "auto",
    progress: bool = True,
    score: bool = True,
    mean: bool = False,
    modalities: bool = False,
    executor: Executor | None = None,
    group: ProcessGroup | None = None,
    on_epoch: OnEpoch | None = None,
    on_change: Callable[[], None] = lambda: None,
    allow_loggers: Sequence[str] = (),
    wait: float = 0.0,
) -> dict[Path, Run]:
    """Train and score several recipes, each in its folder. A remote executor runs all their folds.

    `on_change` is called when a part of a run is complete. Another process that holds one of the
    folders is waited for, up to `wait` seconds.
    """
    executor = executor or LocalExecutor()
    for out, recipe in recipes.items():
        _check(out, recipe, group, allow_loggers, device=None if executor.remote else device)
    trainings = {
        out: _open_training(out, recipe, progress, allow_loggers) for out, recipe in recipes.items()
    }
    beside = {
        out: _open_beside(out, training, mean=mean, modalities=modalities)
        for out, training in trainings.items()
    }
    together = trainings | {path: each for own in beside.values() for path, each in own.items()}
    with ExitStack() as held:
        for out, training in together.items():
            held.enter_context(lock_run(out, wait=wait))
            training.remove_statuses()
        on_change()
        options: dict[str, Any] = {"device": device, "progress": progress, "on_epoch": on_epoch}
        # A local executor scores each run before the next one starts.
        parts = [trainings] if executor.remote else [{out: t} for out, t in trainings.items()]
        failures = []
        for part in parts:
            own_beside = {path: each for out in part for path, each in beside[out].items()}
            everything = {**part, **own_beside}
            failures += _train(everything, executor, group, on_change=on_change, **options)
            for out, training in part.items():
                own = [training, *beside[out].values()]
                if score and all(each.trained for each in own):
                    score_run(training.run, training.cohort, progress=progress)
    if failures:
        count = sum(len(training.folds) for training in together.values())
        raise RunError(
            f"{len(failures)} of {count} folds could not be trained: "
            f"{shorten(failures, separator='; ')} The others are there, and the same command tries "
            "these again."
        )
    return {out: Run(out) for out in trainings}


def _check(
    out: Path,
    recipe: Recipe,
    group: ProcessGroup | None,
    allow_loggers: Sequence[str],
    *,
    device: str | None,
) -> None:
    """Find what is wrong before anything is written."""
    check_folder(out, recipe)
    check_start(recipe, out)
    if device is not None:
        pick_device(device)
    if recipe.train.compile:
        find_compiler()
    check_writable(out)
    check_trackers(make_loggers(recipe.loggers, out, allowed=allow_loggers))
    model = recipe.try_model()
    if group is not None:
        check_distributed(model, recipe.target, recipe.train, group)


class EpochProgress:
    """The progress of several folds, in epochs, counting those that were trained before."""

    def __init__(
        self, step: Bar, trainings: Mapping[Path, Training], tasks: Sequence[Task]
    ) -> None:
        self.step = step
        self.epochs = {out: training.recipe.train.epochs for out, training in trainings.items()}
        self.total = sum(self.epochs[out] * len(t.folds) for out, t in trainings.items())
        self.done = self.total - sum(self.epochs[task.payload.out] for task in tasks)
        self.running: dict[str, float] = {}

    def update(self, task: Task, done: float, _: float, remark: str) -> None:
        self.running[task.name] = done
        self.step(self.done + sum(self.running.values()), self.total, remark)

    def finish(self, task: Task) -> None:
        """Count all epochs of a fold, also if it was stopped early."""
        self.running.pop(task.name, None)
        self.done += self.epochs[task.payload.out]
        self.step(self.done + sum(self.running.values()), self.total, task.payload.fold.name)


def _open_training(
    out: Path, recipe: Recipe, progress: bool, allow_loggers: Sequence[str]
) -> Training:
    """Read the cohort of a recipe, and open its run."""
    with bar("Checking bags", shown=progress) as step:
        cohort, folds = load_cohort(
            recipe.cohort,
            recipe.features,
            recipe.data,
            recipe.splits,
            target=recipe.target,
            join=recipe.join,
            progress=step,
        )
    try_columns = () if cohort.covariates is None else cohort.covariates.fit(folds[0].train)
    model = recipe.build_model(cohort.in_dim, cohort.target, try_columns, cohort.widths)
    start = None
    if recipe.model.start is not None:
        start = open_start(recipe.model.start, out, model, cohort, folds)
        cohort = replace(cohort, notes=(*cohort.notes, *start.notes))
        _log.warning("note: training starts from %s", start.describe())
    for note in cohort.notes:
        _log.warning("note: %s", note)
    run = open_run(out, recipe, cohort, folds, start=start)
    return Training(run, recipe, cohort, tuple(folds), tuple(allow_loggers))


def _open_beside(
    out: Path, training: Training, *, mean: bool, modalities: bool
) -> dict[Path, Training]:
    """Open the runs of other models on the folds of a model, in its folder."""
    found = {}
    models = models_beside(training.recipe, training.cohort, mean=mean, modalities=modalities)
    for name, (recipe, cohort) in models.items():
        start = training.run.facts.start if recipe.model.start else None
        run = open_run(out / name, recipe, cohort, training.folds, start=start)
        found[out / name] = replace(training, run=run, recipe=recipe, cohort=cohort)
    return found


def _train(
    trainings: Mapping[Path, Training],
    executor: Executor,
    group: ProcessGroup | None,
    *,
    device: str,
    progress: bool,
    on_epoch: OnEpoch | None,
    on_change: Callable[[], None],
) -> list[str]:
    """Train all folds that are not there yet, and return which failed, and why."""
    tasks = [task for out, training in trainings.items() for task in training.tasks(out)]
    failures = []
    title = "Training " + ", ".join(training.recipe.model.name for training in trainings.values())
    make_worker = partial(FoldWorker, trainings, device, on_epoch, group)
    with bar(title, shown=progress) as step:
        epochs = EpochProgress(step, trainings, tasks)
        for outcome in executor.run(tasks, make_worker, epochs.update):
            if isinstance(outcome, Succeeded):
                epochs.finish(outcome.task)
                on_change()
            elif outcome.error is not None:
                raise outcome.error
            else:
                failures.append(f"{outcome.task.name} ({outcome.reason})")
    for training in trainings.values():  # those of a process that was killed at that moment
        training.remove_checkpoints()
    return failures


def _train_at(recipe: Recipe, out: Path, **options: Any) -> Run:
    """Train in a folder, or in a local copy of a remote run, which gets every finished fold."""
    if not isinstance(out, RemotePath):
        return cross_validate_all({out: recipe}, **options)[out]
    check_folder(out, recipe)
    # Only finished folds and files of the run itself are uploaded.
    options |= {"mean": False, "modalities": False}
    with remote_run(out, config.digest(recipe)) as copy:
        try:
            if not (copy.folder / SCORES).exists():  # else it was only not uploaded
                cross_validate_all({copy.folder: recipe}, **options, on_change=copy.try_upload)
        except RunError as problem:  # it names the local copy, which a user does not know
            raise RunError(str(problem).replace(str(copy.folder), str(out))) from problem
    return Run(out)


def complete(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    progress: bool = True,
    on_epoch: OnEpoch | None = None,
    allow_loggers: Sequence[str] = (),
    wait: float = 0.0,
) -> Run:
    """Return the finished run of a recipe in a folder; train what is missing."""
    out = require_local(out)
    options: dict[str, Any] = {"device": device, "progress": progress, "on_epoch": on_epoch}
    options |= {"allow_loggers": allow_loggers, "wait": wait}
    return complete_all({out: recipe}, **options)[out]


def complete_all(recipes: Mapping[Path, Recipe], **options: Any) -> dict[Path, Run]:
    """Return the finished runs of recipes; train what is missing.

    The options are those of `cross_validate_all`.
    """
    finished: dict[Path, Run] = {}
    for out, recipe in recipes.items():
        with suppress(RunError):
            run = Run(out)
            if run.finished and run.facts.digest == config.digest(recipe):
                finished[out] = run
    missing = {out: recipe for out, recipe in recipes.items() if out not in finished}
    trained = cross_validate_all(missing, **options) if missing else {}
    return {out: (finished | trained)[out] for out in recipes}
