"""The Lightning module: one model is trained on the bags of a fold."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from math import nan
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import Logger
from torch import Tensor

from caprmil.errors import CaprmilError, RunError, one_line
from caprmil.features import batches
from caprmil.features.batches import Batch, Cache, Sample
from caprmil.models import MILModel
from caprmil.models.compiling import compiled
from caprmil.models.layers import weighted_cross_entropy
from caprmil.runs.history import HISTORY, Row
from caprmil.targets import Target
from caprmil.training.checkpoints import CheckpointKeeper, History
from caprmil.training.data import EpochSampler, Steps
from caprmil.training.distributed import ProcessGroup
from caprmil.training.epoch_times import EpochTimes
from caprmil.training.linear_probes import init_from_probes
from caprmil.training.train_config import TrainConfig, check_classes, learning_rate
from caprmil.training.trainer import interruptible, make_trainer, quiet

ValidationOutput = tuple[Tensor, Tensor, dict[str, float]]  # outputs, labels, loss terms


class MILModule(pl.LightningModule):
    """A model with its loss, optimiser and validation score, in the form that Lightning needs."""

    def __init__(
        self,
        model: MILModel,
        target: Target,
        train: TrainConfig,
        seed: int,
        n_bags: int = 1,
        *,
        n_validation: int | None = None,
        steps: Steps | None = None,
        group: ProcessGroup | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.weights = weights
        self.n_validation, self.steps = n_validation, steps
        self.group = group or ProcessGroup("cpu")
        self.model, self.target, self.settings = model, target, train
        self.seed, self.n_bags = seed, n_bags
        model.save_memory(train.memory)
        model.top_k = train.top_k
        self.call_model = compiled(model) if train.compile else model.__call__
        self.losses: list[tuple[float, int]] = []
        self.validation_outputs: list[ValidationOutput] = []
        self.validation_row: Row = {}

    def loss_terms(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the outputs for a batch, and the terms of their loss."""
        output = self.call_model(**batch.inputs)
        return output.logits, self.model.loss(output, batch.labels)

    def on_train_batch_start(self, _: Batch, number: int) -> None:
        """Seed each epoch, so that a resumed run draws the same numbers.

        Not in `on_train_epoch_start`: Lightning skips it in the first epoch that is resumed.
        """
        if number > 0:
            return
        others = [self.group.rank] if self.group.rank else []  # each device has its own dropout
        seed = np.random.SeedSequence([self.seed, self.current_epoch, *others])
        state = seed.generate_state(1)
        torch.manual_seed(int(state[0]))
        self.losses.clear()
        self.model.on_epoch_start(self.current_epoch, self.n_bags)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        if self.settings.drop_patches:
            batch = batch.drop_patches(self.settings.drop_patches)
        terms = self.loss_terms(batch)[1]
        loss = torch.stack(list(terms.values())).sum()
        self.check_finite(loss, batch)
        if self.weights is not None:
            (name,) = batch.slides
            loss = loss * self.weights[name]
        counted = self.steps.own(number) if self.steps else len(batch.slides)
        self.losses.append((float(loss.detach()), counted))
        return loss * self.steps.weight(number) if self.steps else loss

    def check_finite(self, loss: Tensor, batch: Batch) -> None:
        """Stop a diverging training before its weights are kept."""
        if not loss.isfinite():
            raise RunError(
                f"The loss became {loss.item()} in epoch {self.current_epoch} at slide "
                f"{', '.join(batch.slides)}. Lower train.lr, or set train.clip = 1.0."
            )

    def on_validation_epoch_start(self) -> None:
        self.validation_outputs.clear()

    def validation_step(self, batch: Batch, _: int) -> None:
        outputs, terms = self.loss_terms(batch)
        self.check_finite(torch.stack(list(terms.values())).sum(), batch)
        # Models weigh the bag's term differently. The loss of the outputs alone can be compared.
        plain = self.model.criterion(outputs, batch.labels)
        values = {"loss": float(plain)}
        values |= {name: float(term) for name, term in terms.items() if name != "bag"}
        self.validation_outputs.append((outputs.float().cpu(), batch.labels.cpu(), values))

    def on_validation_epoch_end(self) -> None:
        """Score the whole validation part. Early stopping watches the loss of the outputs alone.

        All devices score all bags, each of which counts once and in its own position: they get the
        numbers that one device would get.
        """
        in_turn = zip_longest(*self.group.gather(self.validation_outputs))
        found = [each for turn in in_turn for each in turn if each is not None]
        outputs, labels, terms = zip(*found[: self.n_validation], strict=True)
        together = torch.cat(outputs).double(), torch.cat(labels)
        answers = self.target.answer(together[0]).numpy()
        truth, sizes = together[1].numpy(), [len(each) for each in labels]
        row = {
            f"val_{name}": float(np.average([t[name] for t in terms], weights=sizes))
            for name in terms[0]
        }
        # A loss with parameters of its own, as that of several targets, has its own form of it.
        score_together = getattr(
            self.model.criterion, "validation_loss", self.target.validation_loss
        )
        whole = score_together(*together)
        if whole is not None:
            row["val_loss"] = float(whole)
        metric = self.target.headline_metric
        scored = metric.function(truth, answers) if self.target.can_score(truth) else nan
        row[f"val_{metric.name}"] = scored
        self.validation_row = row
        self.log("val_loss", row["val_loss"], logger=False)  # for early stopping alone

    def row(self) -> Row:
        """Return the numbers of the epoch that has just ended."""
        losses, sizes = zip(*chain(*self.group.gather(self.losses)), strict=True)
        return {
            "epoch": self.current_epoch,
            "lr": learning_rate(self.current_epoch, self.settings),
            "weight_decay": self.settings.weight_decay,
            "train_loss": float(np.average(losses, weights=sizes)),
            **self.validation_row,
            **getattr(self.model.criterion, "numbers", dict)(),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what the loss remembers from step to step."""
        if hasattr(self.model.criterion, "state_dict"):
            checkpoint["criterion"] = self.model.criterion.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if hasattr(self.model.criterion, "load_state_dict"):
            self.model.criterion.load_state_dict(checkpoint["criterion"])

    def configure_optimizers(self) -> Any:
        no_decay = self.model.no_decay()
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
        for name, parameter in self.model.named_parameters():
            of_loss = "criterion" in name.split(".")
            groups[name in no_decay or of_loss]["params"].append(parameter)
        settings = self.settings
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            fused=self.device.type == "cpu" or None,  # a third of the time; elsewhere torch chooses
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: learning_rate(epoch, settings) / settings.lr
        )
        return [optimizer], [schedule]


def fit(
    model: MILModel,
    train: Sequence[Sample],
    validation: Sequence[Sample] = (),
    *,
    target: Target,
    folder: Path,
    settings: TrainConfig | None = None,
    seed: int = 0,
    cache: Cache | None = None,
    device: str = "auto",
    group: ProcessGroup | None = None,
    loggers: Sequence[Logger] = (),
    on_epoch: Callable[[Row], None] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Row]:
    """Train a model in place, and return its history, one row per epoch.

    Every epoch is saved in the folder, and training resumes from the last one found there.
    Without validation bags there is no early stopping, and the last weights are kept.
    A process group divides `batch_size` among its devices; its main process calls this.
    `weights` multiply the loss of bags by name, one bag per step.
    """
    settings, group = settings or TrainConfig(), group or ProcessGroup(device)
    check_distributed(model, target, settings, group)
    check_classes(model, target, settings)
    model.train()  # Lightning does not switch dropout on
    model.set_criterion(target.criterion([sample.label for sample in train]))
    last, kept = folder / "last.ckpt", folder / "kept.ckpt"
    if last.exists() and not kept.exists():
        raise damaged_checkpoint(kept, "it is missing")
    if settings.probes and not last.exists():
        init_from_probes(
            model,
            train,
            count=settings.probes,
            k=settings.top_k or 10,
            seed=seed,
            cache_gb=settings.cache_gb,
        )
    job = partial(
        _fit,
        model=model,
        target=target,
        train=train,
        validation=validation,
        folder=folder,
        settings=settings,
        seed=seed,
        start=last if last.exists() else None,
        weights=weights,
    )
    with group.distribute(job):
        rows = job(group, cache=cache, loggers=loggers, on_epoch=on_epoch)
    load_weights(model, kept)
    model.set_criterion(weighted_cross_entropy)
    model.cpu().eval()
    return rows


def _fit(
    group: ProcessGroup,
    *,
    model: MILModel,
    target: Target,
    train: Sequence[Sample],
    validation: Sequence[Sample],
    folder: Path,
    settings: TrainConfig,
    seed: int,
    start: Path | None,
    weights: Mapping[str, float] | None = None,
    cache: Cache | None = None,
    loggers: Sequence[Logger] = (),
    on_epoch: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Train on one device's part of the bags, and return the history of all devices."""
    cache = group.cache = cache or group.cache or Cache(settings.cache_gb)
    reading: dict[str, Any] = {"cache": cache, "workers": settings.workers}
    strata = None
    if settings.sampling == "balanced":
        labels = {str(number): sample.label for number, sample in enumerate(train)}
        strata = list(target.strata(labels)[0].values())
    sampler = EpochSampler(len(train), seed=seed, strata=strata)
    steps = Steps(sampler, settings.batch_size, rank=group.rank, world_size=group.world_size)
    # A device without a validation bag takes one that is not counted.
    own = validation[group.rank :: group.world_size] or validation[:1]

    history = History(folder / HISTORY, on_epoch)
    keeper = CheckpointKeeper(folder, history, partial(kept_epoch, settings=settings))
    early = EarlyStopping("val_loss", settings.min_delta, settings.patience)
    times = EpochTimes(folder)  # first, so that it does not measure the others
    callbacks: list[Callback] = [times, history, *([early] if validation else []), keeper]
    module = MILModule(
        model,
        target,
        settings,
        seed,
        len(train),
        n_validation=len(validation),
        steps=steps,
        group=group,
        weights=weights,
    )
    with quiet(), interruptible():
        trainer = make_trainer(
            group,
            epochs=settings.epochs,
            precision=settings.precision,
            clip=settings.clip,
            callbacks=callbacks,
            loggers=loggers,
        )
        try:
            trainer.fit(
                module,
                # The sizes of packed bags would be compiled in.
                batches.load(train, steps=steps, padded=settings.compile, **reading),
                batches.load(own, **reading) if own else None,
                ckpt_path=start,
                weights_only=True,
            )
        except Exception as problem:  # a damaged checkpoint raises errors of any type
            if start is None or history.started or isinstance(problem, (CaprmilError, MemoryError)):
                raise
            raise damaged_checkpoint(start, problem) from problem
    return history.rows


def check_distributed(
    model: MILModel, target: Target, settings: TrainConfig, group: ProcessGroup
) -> None:
    """Raise an error if a model cannot be trained on several devices."""
    if group.world_size == 1:
        return
    if target.one_device:
        raise RunError(target.one_device)
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


def load_weights(model: MILModel, checkpoint: Path) -> None:
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
        model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    except MemoryError:
        raise
    except Exception as problem:  # a damaged checkpoint raises errors of any type
        raise damaged_checkpoint(checkpoint, problem) from problem


def damaged_checkpoint(checkpoint: Path, problem: Exception | str) -> RunError:
    """Return the error of a checkpoint that cannot be used, with what to do."""
    reason = one_line(problem, 200) or type(problem).__name__
    return RunError(
        f"{checkpoint} is missing or damaged ({reason}). Remove {checkpoint.parent} and repeat the "
        "command: this fold is then trained from its start."
    )
