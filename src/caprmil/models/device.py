"""The device that a model runs on, chosen by name."""

import re

import torch

from caprmil.errors import RunError


def pick_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the first GPU, or else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise RunError(f"A device is auto, cpu, cuda, cuda:1, ... or mps, not '{name}'.")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).partition(".")[0].partition("\n")[0]
        raise RunError(f"There is no device '{name}' here ({reason}). Use auto or cpu.") from None
