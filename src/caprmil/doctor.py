"""Checks of this machine before a long run: versions, devices, memory and disk."""

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from caprmil.errors import CaprmilError

NEEDED = ("torch", "lightning", "numpy", "h5py", "scikit-learn", "safetensors", "matplotlib")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    what: str
    found: str
    remark: str = ""
    good: bool = True


def examine() -> list[Finding]:
    """Return findings on versions, readers, encoders, their weights, devices, memory and disk."""
    return [*_packages(), *_readers(), *_encoders(), *_devices(), *_space()]


def _packages() -> list[Finding]:
    found = [Finding(what="Python", found=platform.python_version())]
    for name in ("caprmil", *NEEDED):
        try:
            found.append(Finding(what=name, found=version(name)))
        except PackageNotFoundError:
            remark = "Install it: pip install caprmil"
            found.append(Finding(what=name, found="missing", remark=remark, good=False))
    return found


def _readers() -> list[Finding]:
    import openslide
    import pyvips

    vips = ".".join(str(pyvips.version(part)) for part in range(3))
    remark = (
        "Reads a tiled TIFF or Aperio file where its pixels are those of OpenSlide, and OpenSlide "
        "the others. Column reader of qc.csv has what was used."
    )
    return [
        Finding(what="OpenSlide", found=str(openslide.__library_version__)),
        Finding(what="libvips", found=vips, remark=remark),
    ]


def _encoders() -> list[Finding]:
    from caprmil.encoders import CARDS, DEFAULT, load

    what = f"encoder {DEFAULT}"
    try:
        remark = f"Part of caprmil. Fingerprint {load(DEFAULT).fingerprint[:12]}."
        found = [Finding(what=what, found="loads", remark=remark)]
    except CaprmilError as problem:
        found = [Finding(what=what, found="broken", remark=str(problem), good=False)]
    for name in ("timm", "transformers"):
        try:
            found.append(Finding(what=name, found=version(name)))
        except PackageNotFoundError:
            remark = "Needed for encoders of the hub: pip install 'caprmil[encoders]'"
            found.append(Finding(what=name, found="not installed", remark=remark))
    cards = [card for card in CARDS.values() if card.hub]
    cached = sorted(card.name for card in cards if _in_cache(card.hub))
    remark = "Others are downloaded at first use, or passed by --weights FOLDER."
    found.append(
        Finding(what="downloaded weights", found=", ".join(cached) or "none", remark=remark)
    )
    found.append(_gated_access([str(card.hub) for card in cards if card.gated]))
    return found


def _in_cache(hub: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "pytorch_model.bin")
    return any(isinstance(try_to_load_from_cache(str(hub), name), str) for name in files)


def _gated_access(hubs: list[str]) -> Finding:
    """Return which gated models of the hub this user has access to."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    what, hubs = "gated encoders", sorted(set(hubs))
    if get_token() is None:
        remark = "To use them, request access on the hub and log in: hf auth login"
        return Finding(what=what, found="not logged in", remark=remark)
    granted = []
    for hub in hubs:
        try:
            HfApi().auth_check(hub)
            granted.append(hub)
        except HfHubHTTPError:
            continue
        except Exception as problem:  # its HTTP library raises many types
            remark = f"The hub cannot be reached ({type(problem).__name__})."
            return Finding(what=what, found="unknown", remark=remark)
    remark = "Request access to the others on their pages." if len(granted) < len(hubs) else ""
    return Finding(what=what, found=", ".join(granted) or "no access", remark=remark)


def _devices() -> list[Finding]:
    import torch

    from caprmil.training.trainer import has_half_precision

    found = []
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        memory = torch.cuda.get_device_properties(number).total_memory / 1e9
        found.append(Finding(what=f"cuda:{number}", found=f"{name}, {memory:.0f} GB"))
    if torch.backends.mps.is_available():
        found.append(Finding(what="mps", found="Apple GPU"))
    if not found:
        built = f", torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        remark = "Training works on the CPU, but large cohorts take longer."
        found.append(Finding(what="GPU", found=f"none{built}", remark=remark))
    threads = torch.get_num_threads()
    found.append(Finding(what="CPU", found=f"{os.cpu_count()} cores, {threads} threads in use"))
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
    remark = "Less than 1 GB: a run may need more." if low else ""
    disk = Finding(what="disk", found=f"{free:.0f} GB free", remark=remark, good=not low)
    return [*found, disk]
