"""Cross-validation: a recipe and a cohort become a run, fold by fold."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from filelock import FileLock

from caprmil import config
from caprmil.cohort.cohort import Cohort, load_cohort
from caprmil.cohort.covariates import Column, encode
from caprmil.cohort.folds import Fold
from caprmil.errors import RunError, shorten
from caprmil.evaluation.patient_answers import combine_slides
from caprmil.evaluation.predictions import Predictions
from caprmil.executors import Executor, LocalExecutor, Succeeded, Task, Worker
from caprmil.executors.job_status import process_name, status_path
from caprmil.features import bags
from caprmil.features.batches import Cache, Sample
from caprmil.io.atomic import check_writable, write_text
from caprmil.io.json_files import as_json
from caprmil.io.leftovers import clear_leftovers
from caprmil.io.paths import RemotePath, as_path, require_local
from caprmil.io.progress import Bar, bar
from caprmil.models.compiling import find_compiler
from caprmil.models.device import device_title, pick_device
from caprmil.runs.history import Row
from caprmil.runs.inference import TrainedModel, complete_target, predict_samples
from caprmil.runs.remote import remote_run
from caprmil.runs.run import Run, target_table
from caprmil.runs.scores import SCORES
from caprmil.runs.scoring import score_run
from caprmil.runs.timing import TestTiming, read_timing
from caprmil.training.beside import recipes_beside
from caprmil.training.distributed import ProcessGroup
from caprmil.training.loggers import make_loggers
from caprmil.training.module import check_distributed, fit, kept_epoch
from caprmil.training.recipe import Recipe
from caprmil.training.run_folder import check_folder, lock_run, open_run

OnEpoch: TypeAlias = Callable[[str, Row], None]
"""Called with the name of a fold and its numbers after each epoch. An error stops the training."""

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
    `modalities`, a model with covariates is compared with one of the patches alone and one of the
    covariates alone. A logger of the recipe that is not Lightning's own runs its code only if
    `allow_loggers` names it.

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
    path = out / "cohort.csv"
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
    if device is not None:
        pick_device(device)
    if recipe.train.compile:
        find_compiler()
    check_writable(out)
    make_loggers(recipe.loggers, out, allowed=allow_loggers)
    model = recipe.try_model()
    if group is not None:
        check_distributed(model, recipe.target, recipe.train, group)


@dataclass(frozen=True)
class Training:
    """An open run with everything that is needed to train its folds."""

    run: Run
    recipe: Recipe
    cohort: Cohort
    folds: tuple[Fold, ...]
    allow_loggers: tuple[str, ...] = ()

    def tasks(self, out: Path) -> list[Task]:
        """Return a task for each fold that is not trained yet."""
        return [
            Task(f"{out.name}/{fold.name}", status_path(out, fold.name), FoldPayload(out, fold))
            for fold in self.folds
            if not self.run.fold_folder(fold.name).exists()
        ]

    @property
    def trained(self) -> bool:
        """Whether all folds are trained."""
        return len(self.run.done) == len(self.folds)

    def remove_checkpoints(self) -> None:
        """Remove the checkpoints of finished folds."""
        for fold in self.folds:
            for checkpoint in self.run.fold_folder(fold.name).glob("*.ckpt"):
                checkpoint.unlink(missing_ok=True)  # another worker may do the same

    def remove_statuses(self) -> None:
        """Remove the status of finished folds: of a process that was killed at that moment."""
        for fold in self.run.done:
            status_path(self.run.folder, fold.name).unlink(missing_ok=True)

    def columns(self, fold: Fold) -> tuple[Column, ...]:
        """Return the covariates, with their statistics over the training part of a fold."""
        covariates = self.cohort.covariates
        return () if covariates is None else covariates.fit(fold.train)

    def samples(self, slides: Sequence[str], columns: Sequence[Column] = ()) -> list[Sample]:
        """Return the bags, labels and covariates of slides."""
        target, covariates = self.cohort.target, self.cohort.covariates
        unread = None  # instead of the bag of each slide, for covariates alone
        if self.recipe.model.name == "none":
            unread = bags.from_arrays(np.zeros((1, self.cohort.in_dim), dtype=np.float32))
        return [
            Sample(
                e.name,
                unread or e.path,
                target.missing if e.label is None else e.label,
                None if covariates is None else encode(columns, covariates.of(e.name)),
            )
            for e in self.cohort.subset(slides)
        ]


@dataclass(frozen=True)
class FoldPayload:
    """Which fold of which run to train."""

    out: Path
    fold: Fold


class FoldWorker(Worker):
    """Trains fold after fold, and keeps bags in memory from one to the next."""

    def __init__(
        self,
        trainings: Mapping[Path, Training],
        device: str,
        on_epoch: OnEpoch | None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.trainings, self.device = trainings, device
        self.on_epoch, self.group = on_epoch, group
        pick_device(device)
        if missing := [out for out in trainings if not out.is_dir()]:
            raise RunError(
                f"{process_name()} does not see {missing[0]}. All nodes of a cluster need it under "
                "this name: use a shared folder (for a remote run, set XDG_CACHE_HOME to one)."
            )
        self.out, self.cache = Path(), Cache(0)

    def run(self, task: Task, report: Bar) -> None:
        out, fold = task.payload.out, task.payload.fold
        training = self.trainings[out]
        if out != self.out:
            self.out, self.cache = out, Cache(training.recipe.train.cache_gb)
        shown = ("val_loss", f"val_{training.cohort.target.headline}")

        def epoch_done(row: Row) -> None:
            numbers = [f"{name} {row[name]:.3f}" for name in shown if name in row]
            remark = " ".join([fold.name, *numbers])
            report(row["epoch"] + 1, training.recipe.train.epochs, remark)
            if self.on_epoch:
                self.on_epoch(fold.name, row)

        # A worker of a cluster that has lost its head node may still train this fold.
        with FileLock(out / "folds" / f".{fold.name}.lock"):
            if not training.run.fold_folder(fold.name).exists():
                options: dict[str, Any] = {"cache": self.cache, "device": self.device}
                train_fold(training, fold, **options, group=self.group, on_epoch=epoch_done)
        training.remove_checkpoints()  # only now: the fold has its name, or can still be resumed


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
            progress=step,
        )
    try_columns = () if cohort.covariates is None else cohort.covariates.fit(folds[0].train)
    recipe.build_model(cohort.in_dim, cohort.target, try_columns)
    for note in cohort.notes:
        _log.warning("note: %s", note)
    run = open_run(out, recipe, cohort, folds)
    return Training(run, recipe, cohort, tuple(folds), tuple(allow_loggers))


def _open_beside(
    out: Path, training: Training, *, mean: bool, modalities: bool
) -> dict[Path, Training]:
    """Open the runs of other models on the folds of a model, in its folder."""
    found = {}
    recipes = recipes_beside(training.recipe, mean=mean, modalities=modalities)
    for name, recipe in recipes.items():
        cohort = training.cohort
        if not recipe.data.reads_covariates:
            cohort = replace(cohort, covariates=None)
        run = open_run(out / name, recipe, cohort, training.folds)
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


def train_fold(
    training: Training,
    fold: Fold,
    *,
    cache: Cache,
    device: str,
    on_epoch: Callable[[Row], None],
    group: ProcessGroup | None = None,
) -> None:
    """Train a fold in a temporary folder, which gets its name when everything is in it."""
    run, recipe, cohort = training.run, training.recipe, training.cohort
    work = run.folder / "folds" / f".{fold.name}.part"
    work.mkdir(parents=True, exist_ok=True)
    clear_leftovers(work, locked=True)  # of a process that was killed while it wrote them
    torch.manual_seed(fold.seed)
    target = cohort.target.fit([cohort.labels[slide] for slide in fold.train])
    columns = training.columns(fold)
    model = recipe.build_model(cohort.in_dim, target, columns)
    history = fit(
        model,
        training.samples(fold.train, columns),
        training.samples(fold.validation, columns),
        target=target,
        settings=recipe.train,
        seed=fold.seed,
        cache=cache,
        folder=work,
        device=device,
        group=group,
        loggers=make_loggers(recipe.loggers, work, allowed=training.allow_loggers),
        on_epoch=on_epoch,
    )
    model.save_pretrained(work / "model")
    chosen = pick_device(device)
    trained = complete_target(
        TrainedModel(model, target),
        training.samples(fold.train, columns),
        cache=cache,
        device=chosen,
    )
    for part, slides in (("validation", fold.validation), ("test", fold.test)):
        path = work / f"{part}.csv"
        path.unlink(missing_ok=True)  # of a fold that was stopped at this point
        if slides:
            start = perf_counter()
            samples = training.samples(slides, columns)
            answers = predict_samples(trained, samples, cache=cache, device=chosen)
            seconds = perf_counter() - start
            table = Predictions(
                slides=tuple(slides),
                target=cohort.target,
                answers=answers,
                labels=cohort.target.as_labels(cohort.labels[slide] for slide in slides),
                patients=tuple(cohort.patients[slide] for slide in slides),
                folds=(fold.name,) * len(slides),
                unit="patient" if cohort.joins else "slide",
            )
            combine_slides(table, cohort.combine).write(path)
            if part == "test":
                device_used = device_title(chosen)
                tested = TestTiming(seconds=seconds, slides=len(slides), device=device_used)
                replace(read_timing(work), test=tested).write(work)
    facts = {
        "kept_epoch": kept_epoch(history, recipe.train),
        "epochs": len(history),
        "target": target_table(trained.target),
    }
    write_text(work / "fold.json", as_json(facts), replace=True)
    work.rename(run.fold_folder(fold.name))


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
