"""A callback that measures the time and the peak memory of each training epoch."""

from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from caprmil.models.device import device_title
from caprmil.runs.timing import EpochTiming, FoldTiming

MIB = 2**20


class EpochTimes(Callback):
    """Measures each epoch over the training part, and writes timing.json. Validation is left out.

    A training that was stopped repeats its last epoch from the start, so every epoch is measured
    whole and in one process. Those before are read from the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.epochs: list[EpochTiming] = []
        self.started = self.paused = self.validation = 0.0
        self.peak: float | None = None

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Start the clock: Lightning skips the start of the first epoch that is resumed."""
        self._start(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self._start(trainer)

    def on_validation_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.paused = _now(trainer)
        self.peak = _peak_mib(trainer)

    def on_validation_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.validation += _now(trainer) - self.paused

    def on_train_epoch_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        seconds = _now(trainer) - self.started - self.validation
        peak = _peak_mib(trainer) if self.peak is None else self.peak
        device = device_title(trainer.strategy.root_device)
        self.epochs.append(
            EpochTiming(epoch=trainer.current_epoch, seconds=seconds, peak_mib=peak, device=device)
        )
        if trainer.is_global_zero:
            FoldTiming(epochs=tuple(self.epochs)).write(self.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": [asdict(epoch) for epoch in self.epochs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = [EpochTiming(**epoch) for epoch in state["epochs"]]

    def _start(self, trainer: pl.Trainer) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.started, self.validation, self.peak = _now(trainer), 0.0, None


def _now(trainer: pl.Trainer) -> float:
    """Return the time when the device has finished its queue."""
    device = trainer.strategy.root_device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


def _peak_mib(trainer: pl.Trainer) -> float | None:
    device = trainer.strategy.root_device
    return torch.cuda.max_memory_allocated(device) / MIB if device.type == "cuda" else None
