"""The training of one fold, as a task of an executor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.covariates import Column, encode
from caprmil.cohort.folds import Fold
from caprmil.errors import RunError
from caprmil.evaluation.learned_combination import fit_combination
from caprmil.evaluation.patient_answers import combine_slides
from caprmil.evaluation.predictions import Predictions
from caprmil.executors import Task, Worker
from caprmil.executors.job_status import process_name, status_path
from caprmil.features import bags
from caprmil.features.batches import Cache, Sample
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.io.leftovers import clear_leftovers
from caprmil.io.progress import Bar
from caprmil.models import MILModel
from caprmil.models.device import device_title, pick_device
from caprmil.runs.facts import START
from caprmil.runs.history import Row
from caprmil.runs.inference import TrainedModel, complete_target, predict_samples
from caprmil.runs.model_metadata import model_metadata
from caprmil.runs.run import COMBINATION, MEAN_OF_SLIDES, Run
from caprmil.runs.timing import TestTiming, read_timing
from caprmil.targets.target_table import target_table
from caprmil.training.distributed import ProcessGroup
from caprmil.training.loggers import make_loggers
from caprmil.training.module import fit, kept_epoch
from caprmil.training.recipe import Recipe
from caprmil.training.trackers import TrackedFold, log_scores, tracked
from caprmil.training.warm_start import start_from

OnEpoch: TypeAlias = Callable[[str, Row], None]
"""Called with the name of a fold and its numbers after each epoch. An error stops the training."""


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
    def start_folder(self) -> Path:
        """The model whose weights training starts from. A run beside another one has no copy."""
        own = self.run.folder / START
        return own if own.is_dir() else self.run.folder.parent / START

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
    model = recipe.build_model(cohort.in_dim, target, columns, cohort.widths)
    if recipe.model.start is not None:
        start_from(model, MILModel.from_pretrained(training.start_folder), target)
    tracked_fold = TrackedFold(run=run.folder, name=fold.name, folder=work)
    options: dict[str, Any] = {"allowed": training.allow_loggers, "fold": tracked_fold}
    loggers = make_loggers(recipe.loggers, work, **options)
    with tracked(loggers, recipe, tracked_fold):
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
            loggers=loggers,
            on_epoch=on_epoch,
        )
        chosen = pick_device(device)
        trained = complete_target(
            TrainedModel(model, target),
            training.samples(fold.train, columns),
            cache=cache,
            device=chosen,
        )
        model.metadata = model_metadata(run, trained.target, fold.name)
        model.save_pretrained(work / "model")
        learned = {}
        if cohort.combine == "learned":
            part: Literal["validation", "train"] = "validation" if fold.validation else "train"
            known = fold.validation or fold.train
            answers = predict_samples(
                trained, training.samples(known, columns), cache=cache, device=chosen
            )
            slide_table = _slide_table(cohort, fold.name, known, answers)
            combination = fit_combination(slide_table, part, fitted=trained.target)
            write_text(work / COMBINATION, as_json(asdict(combination)), replace=True)
            learned[fold.name] = combination
        for part_name, slides in (("validation", fold.validation), ("test", fold.test)):
            path = work / f"{part_name}.csv"
            path.unlink(missing_ok=True)  # of a fold that was stopped at this point
            if slides:
                start = perf_counter()
                samples = training.samples(slides, columns)
                answers = predict_samples(trained, samples, cache=cache, device=chosen)
                seconds = perf_counter() - start
                table = _slide_table(cohort, fold.name, slides, answers)
                combined = combine_slides(table, cohort.combine, learned=learned)
                combined.write(path)
                if part_name == "test":
                    log_scores(loggers, combined)
                    device_used = device_title(chosen)
                    tested = TestTiming(seconds=seconds, slides=len(slides), device=device_used)
                    replace(read_timing(work), test=tested).write(work)
                    if learned:
                        (work / MEAN_OF_SLIDES).unlink(missing_ok=True)
                        combine_slides(table, "mean").write(work / MEAN_OF_SLIDES)
        facts = {
            "kept_epoch": kept_epoch(history, recipe.train),
            "epochs": len(history),
            "target": target_table(trained.target),
        }
        write_text(work / "fold.json", as_json(facts), replace=True)
    work.rename(run.fold_folder(fold.name))


def _slide_table(
    cohort: Cohort, fold: str, slides: Sequence[str], answers: NDArray[np.float64]
) -> Predictions:
    """Return the answers of a fold for slides, or for patients in one bag, with their labels."""
    return Predictions(
        slides=tuple(slides),
        target=cohort.target,
        answers=answers,
        labels=cohort.target.as_labels(cohort.labels[slide] for slide in slides),
        patients=tuple(cohort.patients[slide] for slide in slides),
        folds=(fold,) * len(slides),
        unit="patient" if cohort.joins else "slide",
    )
