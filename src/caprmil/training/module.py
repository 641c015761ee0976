"""Learner: one model learns from some bags. Lightning does the loop; what is in it is here."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import chain, zip_longest
from math import cos, isfinite, nan, pi
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping
from lightning.pytorch.loggers import Logger
from torch import Tensor

from caprmil.errors import RecipeError, RunError
from caprmil.evaluation import metrics
from caprmil.features import batches
from caprmil.features.batches import Batch, Cache, Loader, Sample
from caprmil.io.atomic import atomic_write, write_text
from caprmil.models import MILModel
from caprmil.models.base import Memory
from caprmil.models.compiling import compiled
from caprmil.models.layers import weighted_cross_entropy
from caprmil.training.data import EpochSampler, Steps
from caprmil.training.distributed import ProcessGroup
from caprmil.training.trainer import interruptible, make_trainer, quiet

Row = dict[str, float]
Answer = tuple[Tensor, Tensor, dict[str, float]]  # logits, labels and the terms of the loss


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The [train] table of a recipe. The defaults are the paper's."""

    epochs: int = 30
    lr: float = 2e-4
    weight_decay: float = 1e-5
    warmup_epochs: int = 6
    """0 for a plain cosine, which is what the authors' code does."""
    warmup_lr: float = 1e-5
    min_lr: float = 1e-7
    patience: int = 20
    """Stop when the validation loss has not fallen by `min_delta` for so many epochs."""
    min_delta: float = 1e-4
    weights: Literal["best", "last"] = "best"
    """Which epoch's weights to keep: the best on the validation loss, or the last."""
    batch_size: int = 1
    """Bags in a step, on all devices together, packed without padding. More are quicker where bags
    are small."""
    sampling: Literal["shuffle", "balanced"] = "shuffle"
    """balanced: draw bags with replacement, each class as often as the others."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weigh the loss of a bag by the rarity of its class."""
    clip: float = 0.0
    """Clip the norm of the gradient at this. 0 does not."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    cache_gb: float = 4.0
    """Keep bags in memory up to so many gigabytes."""
    memory: Memory = "auto"
    """What of a bag stays in memory while CAPRMIL learns from it: whole, keep (what patches are
    behind the first layer), stream (a piece at a time), or auto, by its size. The gradients are
    the same; less memory costs time."""
    compile: bool = False
    """Let torch.compile rewrite the model first. It needs a C++ compiler: see docs/export.md."""
    workers: int = 0
    """Processes that read ahead. Bags are then not kept in memory: each would keep its own."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} must be 1 or more, not {getattr(self, name)}.")
        positive = ("lr", "warmup_lr", "min_lr")
        for name in (*positive, "weight_decay", "clip", "min_delta", "cache_gb", "workers"):
            value = getattr(self, name)
            if not isfinite(value) or value < 0 or (value == 0 and name in positive):
                raise RecipeError(f"{name} cannot be {value}.")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise RecipeError(
                f"warmup_epochs must be less than epochs ({self.epochs}), not {self.warmup_epochs}."
            )


def learning_rate(epoch: int, train: TrainConfig) -> float:
    """Return the rate of an epoch: a straight warm-up, then a cosine down to the floor."""
    warmup = train.warmup_epochs
    if epoch < warmup:
        return train.warmup_lr + epoch * (train.lr - train.warmup_lr) / max(warmup - 1, 1)
    done = (epoch - warmup) / (train.epochs - warmup)
    return train.min_lr + (train.lr - train.min_lr) * (1 + cos(pi * done)) / 2


class Learner(pl.LightningModule):
    """Asks a model for its loss terms, sums and logs them."""

    def __init__(
        self,
        model: MILModel,
        train: TrainConfig,
        seed: int,
        n_bags: int = 1,
        *,
        n_validation: int | None = None,
        steps: Steps | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.n_validation, self.steps, self.group = (
            n_validation,
            steps,
            group or ProcessGroup("cpu"),
        )
        self.model, self.settings, self.seed, self.n_bags = model, train, seed, n_bags
        model.save_memory(train.memory)
        self.ask = compiled(model) if train.compile else model.__call__
        self.losses: list[tuple[float, int]] = []
        self.answers: list[Answer] = []
        self.validated: Row = {}

    def terms(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        output = self.ask(**batch.inputs)
        return output.logits, self.model.loss(output, batch.labels)

    def on_train_batch_start(self, _: Batch, number: int) -> None:
        """Seed anew, by epoch: a run that was interrupted draws what it would have drawn.

        Not in `on_train_epoch_start`: Lightning leaves that out in the first epoch it resumes.
        """
        if number > 0:
            return
        others = [self.group.rank] if self.group.rank else []  # each device has dropout of its own
        seed = np.random.SeedSequence([self.seed, self.current_epoch, *others])
        state = seed.generate_state(1)
        torch.manual_seed(int(state[0]))
        self.losses.clear()
        self.model.on_epoch_start(self.current_epoch, self.n_bags)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        terms = self.terms(batch)[1]
        loss = torch.stack(list(terms.values())).sum()
        self.check(loss, batch)
        counted = self.steps.own(number) if self.steps else len(batch.slides)
        self.losses.append((float(loss.detach()), counted))
        return loss * self.steps.weight(number) if self.steps else loss

    def check(self, loss: Tensor, batch: Batch) -> None:
        """Stop a training that has gone astray, before its weights are kept."""
        if not loss.isfinite():
            raise RunError(
                f"The loss became {loss.item()} in epoch {self.current_epoch} at slide "
                f"{', '.join(batch.slides)}. Lower train.lr, or set train.clip = 1.0."
            )

    def on_validation_epoch_start(self) -> None:
        self.answers.clear()

    def validation_step(self, batch: Batch, _: int) -> None:
        logits, terms = self.terms(batch)
        self.check(torch.stack(list(terms.values())).sum(), batch)
        values = {name: float(term) for name, term in terms.items()}
        self.answers.append((logits.float().cpu(), batch.labels.cpu(), values))

    def on_validation_epoch_end(self) -> None:
        """Score the validation part as a whole. What is watched is the loss of the bags alone.

        All devices score all bags, each of which is counted once and in its own place: they come
        to the same numbers as one would, and to the same end.
        """
        in_turn = zip_longest(*self.group.gather(self.answers))
        answers = [answer for turn in in_turn for answer in turn if answer is not None]
        logits, labels, terms = zip(*answers[: self.n_validation], strict=True)
        probabilities = torch.cat(logits).double().softmax(dim=-1).numpy()
        truth, sizes = torch.cat(labels).numpy(), [len(each) for each in labels]
        row = {
            f"val_{name}" if name != "bag" else "val_loss": float(
                np.average([t[name] for t in terms], weights=sizes)
            )
            for name in terms[0]
        }
        present = len(set(truth.tolist())) > 1
        row["val_auc"] = metrics.auc(truth, probabilities) if present else nan
        self.validated = row
        self.log("val_loss", row["val_loss"], logger=False)  # for early stopping alone

    def row(self) -> Row:
        """Return the numbers of the epoch that has just ended."""
        losses, sizes = zip(*chain(*self.group.gather(self.losses)), strict=True)
        return {
            "epoch": self.current_epoch,
            "lr": learning_rate(self.current_epoch, self.settings),
            "weight_decay": self.settings.weight_decay,
            "train_loss": float(np.average(losses, weights=sizes)),
            **self.validated,
        }

    def configure_optimizers(self) -> Any:
        spared = self.model.no_decay()
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
        for name, parameter in self.model.named_parameters():
            groups[name in spared]["params"].append(parameter)
        settings = self.settings
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: learning_rate(epoch, settings) / settings.lr
        )
        return [optimizer], [schedule]


class History(Callback):
    """Keeps a row of numbers for each epoch, writes them as CSV, and tells whoever listens."""

    def __init__(self, path: Path, listen: Callable[[Row], None] | None) -> None:
        self.path, self.listen = path, listen
        self.rows: list[Row] = []

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Stop at once if the run that is resumed had come to its early end already."""
        early = trainer.early_stopping_callback
        if early is not None and early.wait_count >= early.patience:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, learner: pl.LightningModule) -> None:
        row = cast(Learner, learner).row()
        self.rows.append(row)
        if not trainer.is_global_zero:
            return
        write_text(self.path, self.as_csv(), replace=True)
        # Not in the history, which is the same whenever a training is done again.
        reading = cast(Loader, trainer.train_dataloader)
        waited = {} if reading.num_workers else {"seconds_waiting": reading.waited}
        for logger in trainer.loggers:
            logger.log_metrics(row | waited, step=int(row["epoch"]))
        if self.listen:
            self.listen(row)

    def as_csv(self) -> str:
        text = StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class Keeper(Checkpoint):
    """Keeps each epoch, to go on from it, and beside it the one whose weights are to be used.

    Not Lightning's ModelCheckpoint: its memory of the best lags behind what it writes, and is lost
    when the folder has moved. Here the history says which epoch that is, and nothing else.
    """

    def __init__(self, folder: Path, history: History, settings: TrainConfig) -> None:
        self.last, self.kept = folder / "last.ckpt", folder / "kept.ckpt"
        self.history, self.settings = history, settings

    def on_train_epoch_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Write what is kept before the last: who goes on from the last can rely on it."""
        if kept_epoch(self.history.rows, self.settings) == trainer.current_epoch:
            self.save(trainer, self.kept)
        self.save(trainer, self.last)

    def save(self, trainer: pl.Trainer, path: Path) -> None:
        if not trainer.is_global_zero:
            trainer.save_checkpoint(path)  # which does not write here, but takes part
            return
        with atomic_write(path, replace=True) as passing:
            trainer.save_checkpoint(passing)


def fit(
    model: MILModel,
    train: Sequence[Sample],
    validation: Sequence[Sample] = (),
    *,
    folder: Path,
    settings: TrainConfig | None = None,
    seed: int = 0,
    cache: Cache | None = None,
    device: str = "auto",
    group: ProcessGroup | None = None,
    loggers: Sequence[Logger] = (),
    listen: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Train a model in place, and return its history, a row an epoch.

    Every epoch is kept in the folder, and training goes on from the last one found there.
    Without validation bags there is no early stopping, and the last weights are kept.
    A process group divides `batch_size` among its devices; its main process calls this.
    """
    settings, group = settings or TrainConfig(), group or ProcessGroup(device)
    check_distributed(model, settings, group)
    weigh_classes(model.train(), train, settings)  # Lightning does not switch dropout on
    last = folder / "last.ckpt"
    job = partial(
        _learn,
        model=model,
        train=train,
        validation=validation,
        folder=folder,
        settings=settings,
        seed=seed,
        start=last if last.exists() else None,
    )
    with group.distribute(job):
        rows = job(group, cache=cache, loggers=loggers, listen=listen)
    load_weights(model, folder / "kept.ckpt")
    model.set_criterion(weighted_cross_entropy)
    model.cpu().eval()
    return rows


def _learn(
    group: ProcessGroup,
    *,
    model: MILModel,
    train: Sequence[Sample],
    validation: Sequence[Sample],
    folder: Path,
    settings: TrainConfig,
    seed: int,
    start: Path | None,
    cache: Cache | None = None,
    loggers: Sequence[Logger] = (),
    listen: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Do one device's part: with every other bag, if there are two, and the history of all."""
    cache = group.cache = cache or group.cache or Cache(settings.cache_gb)
    reading: dict[str, Any] = {"cache": cache, "workers": settings.workers}
    sampler = EpochSampler(train, seed=seed, balanced=settings.sampling == "balanced")
    steps = Steps(sampler, settings.batch_size, rank=group.rank, world=group.world_size)
    own = (
        validation[group.rank :: group.world_size] or validation[:1]
    )  # who has none is not counted

    history = History(folder / "history.csv", listen)
    keeper = Keeper(folder, history, settings)
    early = EarlyStopping("val_loss", settings.min_delta, settings.patience)
    callbacks: list[Callback] = [history, *([early] if validation else []), keeper]
    with quiet(), interruptible():
        trainer = make_trainer(
            group,
            epochs=settings.epochs,
            precision=settings.precision,
            clip=settings.clip,
            callbacks=callbacks,
            loggers=loggers,
        )
        trainer.fit(
            Learner(
                model,
                settings,
                seed,
                len(train),
                n_validation=len(validation),
                steps=steps,
                group=group,
            ),
            batches.load(
                train,
                steps=steps,
                padded=settings.compile,  # sizes of packed bags would be compiled in
                **reading,
            ),
            batches.load(own, **reading) if own else None,
            ckpt_path=start,
            weights_only=True,
        )
    return history.rows


def check_distributed(model: MILModel, settings: TrainConfig, group: ProcessGroup) -> None:
    """Raise an error if a model cannot be trained on several devices."""
    if group.world_size == 1:
        return
    kept = model.state_dict().keys() & {name for name, _ in model.named_buffers()}
    if kept:
        raise RunError(
            f"{type(model).__name__} carries {', '.join(sorted(kept))} from bag to bag, which "
            "devices do not share. Train it on one."
        )
    if settings.compile:
        raise RunError("A compiled model trains on one device. Set train.compile = false.")


def kept_epoch(history: Sequence[Row], settings: TrainConfig) -> int:
    """Return the epoch whose weights were kept."""
    losses = [row.get("val_loss", nan) for row in history]
    if settings.weights == "last" or np.isnan(losses).all():
        return len(history) - 1
    return int(np.nanargmin(losses))


def weigh_classes(model: MILModel, train: Sequence[Sample], settings: TrainConfig) -> None:
    """Let rare classes count more in the loss, if the settings say so."""
    if settings.class_weights == "balanced":
        counts = np.bincount([sample.label for sample in train], minlength=model.n_outputs)
        weights = len(train) / model.n_outputs / np.maximum(counts, 1)
        tensor = torch.tensor(weights, dtype=torch.float32)
        model.set_criterion(partial(weighted_cross_entropy, weights=tensor))


def load_weights(model: MILModel, checkpoint: Path) -> None:
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
