"""Lightning's trainer for one device or several, with the usual handling of signals."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from caprmil.training.distributed import ProcessGroup

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def make_trainer(
    group: ProcessGroup,
    *,
    epochs: int,
    precision: str,
    clip: float,
    callbacks: Sequence[Callback],
    loggers: Sequence[Logger],
) -> pl.Trainer:
    """Return a trainer for the devices of a process group, of which this process has one."""
    device = group.device
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=group.devices if device.index is None or group.environment else [device.index],
        num_nodes=group.nodes,
        strategy=make_strategy(group),
        plugins=[PlainCheckpoints()],
        precision=usable_precision(precision, device),
        gradient_clip_val=clip or None,
        callbacks=[*callbacks, *([ExitOnSigterm()] if group.world_size > 1 else [])],
        logger=list(loggers),
        deterministic="warn" if device.type == "cuda" else None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


class PlainCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint to its file alone. `CheckpointKeeper` gives the file its name at the end.

    Lightning writes a file in TMPDIR first, which stays there if the process is killed.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,  # noqa: ARG002
    ) -> None:
        content = BytesIO()  # on a full disk, torch itself would raise an error without a reason
        torch.save(checkpoint, content)
        Path(path).write_bytes(content.getbuffer())


class ExitOnSigterm(Callback):
    """Ends a process of a group as soon as it gets SIGTERM.

    Lightning's own handler sends a message to the other processes first. They are exchanging
    gradients at that time, so all processes would wait for each other.
    """

    def on_train_start(self, *_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.exit)

    def exit(self, *_: Any) -> None:
        raise SIGTERMException


def make_strategy(group: ProcessGroup) -> DDPStrategy | str:
    """Return Lightning's strategy: DDP for several devices.

    DDP does not broadcast buffers. Class weights are the same in all processes, and the processes
    have different numbers of validation bags.
    """
    if group.environment is None:
        return "auto"
    return DDPStrategy(cluster_environment=group.environment, broadcast_buffers=False)


def has_half_precision() -> bool:
    """Return whether this CPU has bfloat16 arithmetic. Without it, bfloat16 is far slower."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def usable_precision(name: str, device: torch.device) -> Any:
    """Return Lightning's name of a precision; that of fp32 where the CPU has no half precision."""
    fast = name == "fp32" or (name == "bf16" and has_half_precision())
    slow = device.type == "cpu" and not fast
    if slow:
        warnings.warn(f"This CPU has no {name} arithmetic: training in fp32 instead.", stacklevel=3)
    return PRECISIONS["fp32" if slow else name]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the hints and messages of Lightning. Errors are still shown."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            warnings.filterwarnings("ignore", message=".*(num_workers|LeafSpec|Grad strides).*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let signals have their usual effect.

    On Ctrl-C Lightning exits and ignores further ones. On SIGTERM, which a cluster sends to a job
    that exceeds its time limit, it exits with 0 as if the training were finished.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SIGTERMException:
        raise SystemExit(128 + signal.SIGTERM) from None
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None
