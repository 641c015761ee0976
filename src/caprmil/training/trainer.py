"""Trainer: Lightning's, made for one device or a team of them, and made to behave."""

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from caprmil.training.distributed import Team

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def make_trainer(
    team: Team,
    *,
    epochs: int,
    precision: str,
    clip: float,
    callbacks: Sequence[Callback],
    loggers: Sequence[Logger],
) -> pl.Trainer:
    """Return a trainer for the devices of a team, of which this process has one."""
    place = team.device
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="gpu" if place.type == "cuda" else place.type,
        devices=team.devices if place.index is None or team.seat else [place.index],
        num_nodes=team.nodes,
        strategy=strategy(team),
        precision=usable_precision(precision, place),
        gradient_clip_val=clip or None,
        callbacks=[*callbacks, *([Leaving()] if team.world > 1 else [])],
        logger=list(loggers),
        deterministic="warn" if place.type == "cuda" else None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


class Leaving(Callback):
    """Ends one process of several at once when it is terminated.

    Lightning tells the others first, from inside the signal handler, while they are busy with
    gradients: all would wait for each other from then on.
    """

    def on_train_start(self, *_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.leave)

    def leave(self, *_: Any) -> None:
        raise SIGTERMException


def strategy(team: Team) -> DDPStrategy | str:
    """Return how Lightning is to train: as ever, or with the gradients of all devices averaged.

    Buffers stay as they are: class weights are the same everywhere, and bags in validation are not
    as many everywhere.
    """
    if team.seat is None:
        return "auto"
    return DDPStrategy(cluster_environment=team.seat, broadcast_buffers=False)


def has_half_precision() -> bool:
    """Tell whether this CPU multiplies in bfloat16; where it does not, that is far slower."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def usable_precision(name: str, device: torch.device) -> Any:
    """Return Lightning's word for a precision, or that of fp32 where half is no help."""
    fast = name == "fp32" or (name == "bf16" and has_half_precision())
    slow = device.type == "cpu" and not fast
    if slow:
        warnings.warn(f"This CPU has no {name} arithmetic: training in fp32 instead.", stacklevel=3)
    return PRECISIONS["fp32" if slow else name]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning's advice and announcements off the screen; its errors stay."""
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
    """Let signals do what they do elsewhere.

    On Ctrl-C Lightning exits, and ignores the next ones; when it is terminated, as a cluster does
    with a job that runs too long, it leaves with 0 as if all were done.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SIGTERMException:
        raise SystemExit(128 + signal.SIGTERM) from None
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None
