"""Callbacks that keep the history of a training and its checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint

from caprmil.features.batches import Loader
from caprmil.io.atomic import atomic_write
from caprmil.runs.history import Row, write_history


class History(Callback):
    """Keeps a row of numbers per epoch, writes them as CSV, and passes them to `on_epoch`."""

    def __init__(self, path: Path, on_epoch: Callable[[Row], None] | None) -> None:
        self.path, self.on_epoch = path, on_epoch
        self.rows: list[Row] = []
        self.started = False

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Stop at once if the run that is resumed was already stopped early."""
        self.started = True  # a checkpoint that was given could be read
        early = trainer.early_stopping_callback
        if early is not None and early.wait_count >= early.patience:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        row: Row = cast(Any, module).row()
        self.rows.append(row)
        if not trainer.is_global_zero:
            return
        write_history(self.rows, self.path)
        # Not in the history, which is the same whenever a training is repeated.
        reading = cast(Loader, trainer.train_dataloader)
        waited = {} if reading.num_workers else {"seconds_waiting": reading.waited}
        for logger in trainer.loggers:
            logger.log_metrics(row | waited, step=int(row["epoch"]))
        if self.on_epoch:
            self.on_epoch(row)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class CheckpointKeeper(Checkpoint):
    """Saves the last epoch, to resume from it, and the one whose weights are to be used.

    Not Lightning's ModelCheckpoint: its record of the best lags behind what it writes, and is lost
    when the folder has moved. Here the history alone decides which epoch that is.
    """

    def __init__(
        self, folder: Path, history: History, kept_epoch: Callable[[Sequence[Row]], int]
    ) -> None:
        self.last, self.kept = folder / "last.ckpt", folder / "kept.ckpt"
        self.history, self.kept_epoch = history, kept_epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Write the kept epoch before the last one: a resumed training relies on it."""
        if self.kept_epoch(self.history.rows) == trainer.current_epoch:
            self.save(trainer, self.kept)
        self.save(trainer, self.last)

    def save(self, trainer: pl.Trainer, path: Path) -> None:
        if not trainer.is_global_zero:
            trainer.save_checkpoint(path)  # which does not write here, but must be called
            return
        with atomic_write(path, replace=True) as temporary:
            trainer.save_checkpoint(temporary)
