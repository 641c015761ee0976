"""Doctor: what this machine offers, and what is missing, before a long night."""

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = ("torch", "lightning", "numpy", "h5py", "scikit-learn", "safetensors", "matplotlib")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    remark: str = ""
    good: bool = True


def examine() -> list[Finding]:
    """Look at versions, devices, arithmetic, memory and disk."""
    return [*_packages(), *_devices(), *_space()]


def _packages() -> list[Finding]:
    found = [Finding(what="Python", found=platform.python_version())]
    for name in ("caprmil", *NEEDED):
        try:
            found.append(Finding(what=name, found=version(name)))
        except PackageNotFoundError:
            remark = "Install it: pip install caprmil"
            found.append(Finding(what=name, found="missing", remark=remark, good=False))
    return found


def _devices() -> list[Finding]:
    import torch

    from caprmil.learner import has_half_precision

    found = []
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        memory = torch.cuda.get_device_properties(number).total_memory / 1e9
        found.append(Finding(what=f"cuda:{number}", found=f"{name}, {memory:.0f} GB"))
    if torch.backends.mps.is_available():
        found.append(Finding(what="mps", found="Apple GPU"))
    if not found:
        built = f", torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        remark = "Training works on the CPU; large cohorts take longer."
        found.append(Finding(what="GPU", found=f"none{built}", remark=remark))
    threads = torch.get_num_threads()
    found.append(Finding(what="CPU", found=f"{os.cpu_count()} cores, {threads} threads used"))
    fast = has_half_precision()
    remark = "" if fast else "train.precision falls back to fp32 on this CPU."
    found.append(Finding(what="bf16 on the CPU", found="yes" if fast else "no", remark=remark))
    return found


def _space() -> list[Finding]:
    found = []
    if hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        found.append(Finding(what="memory", found=f"{memory:.0f} GB"))
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    low = free < 1
    remark = "Less than 1 GB: a run may not fit." if low else ""
    disk = Finding(what="disk here", found=f"{free:.0f} GB free", remark=remark, good=not low)
    return [*found, disk]
