"""The device that a model or an encoder runs on."""

import re
from collections.abc import Sequence

import torch

from caprmil.errors import RunError


def pick_device(
    device: str | torch.device, *, automatic: Sequence[str] = ("cuda",)
) -> torch.device:
    """Return a device of this machine by its name.

    `auto` is the first of the `automatic` kinds that is present, or else the CPU. Models leave out
    mps, which has no float64.
    """
    name = str(device)
    if name == "auto":
        present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        name = next((kind for kind in automatic if present[kind]), "cpu")
    if not re.fullmatch(r"cpu|(mps|cuda)(:\d+)?", name):
        raise RunError(f"A device is auto, cpu, cuda, cuda:1, ... or mps, not '{name}'.")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).partition(".")[0].partition("\n")[0]
        raise RunError(f"There is no device '{name}' here ({reason}). Use auto or cpu.") from None


def device_title(device: str | torch.device) -> str:
    """Return what a device is called in tables: the name of a GPU, or the threads of a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"
