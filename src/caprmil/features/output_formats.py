"""The files that a bag becomes in each layout: the one with the features is the last."""

import hashlib
import re
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.features import bags
from caprmil.features.bags import BagInfo
from caprmil.features.level0 import GRID, ORIGIN, SCALE, Level0Bag
from caprmil.slides.patches import MAGNIFICATIONS


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedFile:
    """A file to be written: arrays, how they lie, and attributes."""

    path: Path
    coords: NDArray[Any] | None = None
    features: str = ""  # name of the dataset, if it holds them
    dtype: str = "float32"
    chunk: int | None = None  # rows; None: contiguous
    said: dict[str, dict[str, Any]] = field(default_factory=dict)  # by dataset; '': on the file
    ours: BagInfo | None = None  # for a bag in our own layout


def as_caprmil(bag: Level0Bag, out: Path) -> list[PlannedFile]:
    """Plan OUT/NAME.h5."""
    info = replace(bag.info, path=out / f"{bag.name}.h5", kind="caprmil", dtype=bag.dtype)
    said = {
        name: getattr(info, name) for name in bags.ATTRIBUTES if getattr(info, name) is not None
    }
    own: dict[str, Any] = {"features": "features", "dtype": bag.dtype, "said": {"": said}}
    return [PlannedFile(path=out / f"{bag.name}.h5", coords=bag.coords, ours=info, **own)]


def as_trident(bag: Level0Bag, out: Path) -> list[PlannedFile]:
    """Plan the files of patches and of features in OUT/10x_224px_0px_overlap, or what it is."""
    coords = bag.points
    encoder, px, mpp, side = bag.need("encoder", "patch_px", "mpp", "patch_level0")
    target = _magnification(mpp)
    overlap = max(0, round(px * (1 - (bag.info.step or side) / side)))
    width, height = bag.info.slide_size or ("None", "None")  # its word for None
    job = out / f"{target:g}x_{px}px_{overlap}px_overlap"
    patches, features = job / "patches", job / ("features_" + re.sub(r"[^\w.-]+", "_", encoder))
    on_coords = {
        "patch_size": px,
        "patch_size_level0": round(side),  # true, where its rule would go by magnifications
        "level0_magnification": _level0_magnification(bag.info, target),
        "target_magnification": target,
        "overlap": overlap,
        "name": bag.name,
        "savetodir": str(patches),
        "level0_width": width,
        "level0_height": height,
        **_notes(bag.info, *GRID, *SCALE),  # not of the encoder: TRIDENT copies these
    }
    on_features = {"name": bag.name, "savetodir": str(features), "encoder": encoder}
    on_features |= _notes(bag.info, *ORIGIN)
    grid: dict[str, Any] = {"coords": coords, "chunk": 1}
    said = {"coords": on_coords, "features": on_features}
    own: dict[str, Any] = {"features": "features", "dtype": bag.dtype, "said": said}
    return [
        PlannedFile(path=patches / f"{bag.name}_patches.h5", said={"coords": on_coords}, **grid),
        PlannedFile(path=features / f"{bag.name}.h5", **grid, **own),
    ]


def _magnification(mpp: float) -> float:
    """Return 10 / mpp, whole where it nearly is."""
    exact = 10 / mpp
    near = abs(exact - round(exact)) <= 0.01 * exact
    return round(exact) if near else round(exact, 3)


def _level0_magnification(info: BagInfo, target: float) -> int:
    """Return the bucket of the slide's um/px, or else what TRIDENT's rule must have begun with."""
    if info.scale_rule == "exact" and info.slide_mpp:
        near = (times for below, times in MAGNIFICATIONS if info.slide_mpp < below)
        return next(near, max(1, round(10 / info.slide_mpp)))
    return max(1, round(target * (info.patch_level0 or 1) / (info.patch_px or 1)))


def as_clam(bag: Level0Bag, out: Path) -> list[PlannedFile]:
    """Plan files in OUT/patches, pt_files and h5_files, with patches that were cut at level 0."""
    name, coords, short = bag.name, bag.points, bag.points.astype(np.int32)
    (side,) = bag.need("patch_level0")
    size = {"level_dim": bag.info.slide_size, "downsampled_level_dim": bag.info.slide_size}
    said = {
        "patch_size": round(side),
        "patch_level": 0,
        "downsample": (1.0, 1.0),
        **(size if bag.info.slide_size else {}),
        "name": name,
        "save_path": str(out / "patches"),
        **_notes(bag.info, *GRID),
    }
    return [
        PlannedFile(
            path=out / "patches" / f"{name}.h5", coords=coords, chunk=1, said={"coords": said}
        ),
        PlannedFile(path=out / "pt_files" / f"{name}.pt", features="features"),
        PlannedFile(
            path=out / "h5_files" / f"{name}.h5", coords=short, features="features", chunk=32
        ),
    ]


def as_stamp(bag: Level0Bag, out: Path) -> list[PlannedFile]:
    """Plan OUT/NAME.h5, in micrometres. Its version says that we wrote it, in a form to compare."""
    coords = bag.points
    encoder, px, side, mpp = bag.need("encoder", "patch_px", "patch_level0", "slide_mpp")
    code = hashlib.sha256(f"{encoder} {bag.info.fingerprint}".encode()).hexdigest()
    said = {
        "stamp_version": f"2.0.0+caprmil.{version('caprmil')}",
        "extractor": encoder,
        "unit": "um",
        "tile_size_um": round(side * mpp, 6),
        "tile_size_px": px,
        "code_hash": code[:8],
        "feat_type": "tile",
        **_notes(bag.info, *GRID, *SCALE, *ORIGIN, "slide_size"),
    }
    um = (coords * mpp).astype(np.float32)
    own: dict[str, Any] = {"features": "feats", "dtype": "float16", "said": {"": said}}
    return [PlannedFile(path=out / f"{bag.name}.h5", coords=um, **own)]


PLANNERS = {
    "caprmil": as_caprmil,
    "trident": as_trident,
    "clam": as_clam,
    "stamp": as_stamp,
}


def _notes(info: BagInfo, *names: str) -> dict[str, Any]:
    notes = {f"caprmil_{name}": getattr(info, name) for name in names}
    return {name: note for name, note in notes.items() if note is not None}
