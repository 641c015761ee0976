"""A study: a run that is open, the folds that there are to train, and who trains them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from filelock import FileLock

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.folds import Fold
from caprmil.errors import RunError
from caprmil.evaluation.predictions import Predictions
from caprmil.executors import Task, Worker
from caprmil.executors.job_status import process_name, status_path
from caprmil.features.batches import Cache, Sample
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.io.progress import Bar
from caprmil.models.device import pick_device
from caprmil.runs.inference import predict_samples
from caprmil.runs.run import Run
from caprmil.training.distributed import ProcessGroup
from caprmil.training.module import Row, fit, kept_epoch
from caprmil.training.recipe import Recipe, make_loggers

Watch: TypeAlias = Callable[[str, Row], None]
"""Hears the name of a fold and its numbers, after each epoch."""


@dataclass(frozen=True)
class FoldTask:
    """Which fold of which run there is to train."""

    out: Path
    fold: Fold


@dataclass(frozen=True)
class Study:
    """A run that is open, with all that is needed to train its folds."""

    run: Run
    recipe: Recipe
    cohort: Cohort
    folds: tuple[Fold, ...]

    def tasks(self, out: Path) -> list[Task]:
        """Return the folds that are not there yet."""
        return [
            Task(f"{out.name}/{fold.name}", status_path(out, fold.name), FoldTask(out, fold))
            for fold in self.folds
            if not self.run.fold_folder(fold.name).exists()
        ]

    def tidy(self) -> None:
        """Remove the checkpoints of folds that are done: they will not have to go on."""
        for fold in self.folds:
            for checkpoint in self.run.fold_folder(fold.name).glob("*.ckpt"):
                checkpoint.unlink(missing_ok=True)  # another worker may be tidying too


class Folds(Worker):
    """Trains fold after fold, and keeps bags in memory from one to the next."""

    def __init__(
        self,
        studies: Mapping[Path, Study],
        device: str,
        watch: Watch | None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.studies, self.device, self.watch, self.group = studies, device, watch, group
        pick_device(device)
        if unseen := [out for out in studies if not out.is_dir()]:
            raise RunError(
                f"{process_name()} does not see {unseen[0]}. All nodes of a cluster need it under "
                "this name: use a shared folder (for a run elsewhere, set XDG_CACHE_HOME to one)."
            )
        self.out, self.cache = Path(), Cache(0)

    def run(self, task: Task, report: Bar) -> None:
        out, fold = task.payload.out, task.payload.fold
        study = self.studies[out]
        if out != self.out:
            self.out, self.cache = out, Cache(study.recipe.train.cache_gb)

        def listen(row: Row) -> None:
            shown = [f"{name} {row[name]:.3f}" for name in ("val_loss", "val_auc") if name in row]
            report(row["epoch"] + 1, study.recipe.train.epochs, " ".join([fold.name, *shown]))
            if self.watch:
                self.watch(fold.name, row)

        # A worker whose cluster has lost its head may still be at it: it ends, or is done with it.
        with FileLock(out / "folds" / f".{fold.name}.lock"):
            if not study.run.fold_folder(fold.name).exists():
                options: dict[str, Any] = {"cache": self.cache, "device": self.device}
                options["group"] = self.group
                _train_fold(study.run, study.recipe, study.cohort, fold, **options, listen=listen)
        study.tidy()  # only now: a fold has its name, or all it needs to go on


class Far:
    """How far the folds are, in epochs, with those that were there before."""

    def __init__(self, step: Bar, studies: Mapping[Path, Study], tasks: Sequence[Task]) -> None:
        self.step = step
        self.epochs = {out: study.recipe.train.epochs for out, study in studies.items()}
        self.total = sum(self.epochs[out] * len(study.folds) for out, study in studies.items())
        self.done = self.total - sum(self.epochs[task.payload.out] for task in tasks)
        self.parts: dict[str, float] = {}

    def hear(self, task: Task, done: float, _: float, remark: str) -> None:
        self.parts[task.name] = done
        self.step(self.done + sum(self.parts.values()), self.total, remark)

    def tick(self, task: Task) -> None:
        """Note that a fold is done: all of its epochs, if it was stopped early too."""
        self.parts.pop(task.name, None)
        self.done += self.epochs[task.payload.out]
        self.step(self.done + sum(self.parts.values()), self.total, task.payload.fold.name)


def _samples(cohort: Cohort, slides: Sequence[str]) -> list[Sample]:
    return [
        Sample(e.name, e.path, -1 if e.label is None else e.label) for e in cohort.subset(slides)
    ]


def _train_fold(
    run: Run,
    recipe: Recipe,
    cohort: Cohort,
    fold: Fold,
    *,
    cache: Cache,
    device: str,
    listen: Callable[[Row], None],
    group: ProcessGroup | None = None,
) -> None:
    """Train on a fold in a folder of its own, which gets its name when all is in it."""
    work = run.folder / "folds" / f".{fold.name}.part"
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(fold.seed)
    model = recipe.model.build(cohort.in_dim, len(cohort.classes))
    history = fit(
        model,
        _samples(cohort, fold.train),
        _samples(cohort, fold.validation),
        settings=recipe.train,
        seed=fold.seed,
        cache=cache,
        folder=work,
        device=device,
        group=group,
        loggers=make_loggers(recipe.loggers, work),
        listen=listen,
    )
    model.save_pretrained(work / "model")
    place = pick_device(device)
    for part, slides in (("validation", fold.validation), ("test", fold.test)):
        path = work / f"{part}.csv"
        path.unlink(missing_ok=True)  # ours, from a fold that was stopped at this very point
        if slides:
            answers = predict_samples(model, _samples(cohort, slides), cache=cache, device=place)
            _table(cohort, fold, slides, answers).write(path)
    kept = {"kept_epoch": kept_epoch(history, recipe.train), "epochs": len(history)}
    write_text(work / "fold.json", as_json(kept), replace=True)
    work.rename(run.fold_folder(fold.name))


def _table(
    cohort: Cohort, fold: Fold, slides: Sequence[str], answers: np.ndarray[Any, Any]
) -> Predictions:
    return Predictions(
        slides=tuple(slides),
        classes=cohort.classes,
        probabilities=answers,
        labels=np.array([cohort.labels[slide] for slide in slides]),
        patients=tuple(cohort.patients[slide] for slide in slides),
        folds=(fold.name,) * len(slides),
    )
