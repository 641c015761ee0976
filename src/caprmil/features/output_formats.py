"""The output formats of conversion: the files of a bag in each. The feature file is the last."""

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
from caprmil.features.extra_attributes import GRID, ORIGIN, SCALE
from caprmil.features.level0 import Level0Bag
from caprmil.slides.patches import MAGNIFICATIONS


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedFile:
    """A file to write: arrays, chunking and attributes."""

    path: Path
    coords: NDArray[Any] | None = None
    features: str = ""  # name of the dataset; empty: a file without features
    dtype: str = "float32"
    chunk: int | None = None  # rows per chunk; None: contiguous
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by dataset; '': file
    info: BagInfo | None = None  # for a bag in caprmil's format


def plan_caprmil(bag: Level0Bag, out: Path) -> list[PlannedFile]:
    """Return the plan of OUT/NAME.h5."""
    path = out / f"{bag.name}.h5"
    info = replace(bag.info, path=path, kind="caprmil", dtype=bag.dtype)
    fields = {name: getattr(info, name) for name in bags.ATTRIBUTES}
    return [
        PlannedFile(
            path=path,
            coords=bag.coords,
            features="features",
            dtype=bag.dtype,
            attributes={"": {name: value for name, value in fields.items() if value is not None}},
            info=info,
        )
    ]


def plan_trident(bag: Level0Bag, out: Path) -> list[PlannedFile]:
    """Return the plan of patch and feature files in e.g. OUT/10x_224px_0px_overlap."""
    coords = bag.required_coords
    encoder, px, mpp, side = bag.require("encoder", "patch_px", "mpp", "patch_level0")
    target = _magnification(mpp)
    level0 = _level0_magnification(bag.info, target)
    overlap = max(0, round(px * (1 - (bag.info.step or side) / side)))
    width, height = bag.info.slide_size or ("None", "None")  # as TRIDENT writes None
    job = out / f"{target:g}x_{px}px_{overlap}px_overlap"
    patches, features = job / "patches", job / ("features_" + re.sub(r"[^\w.-]+", "_", encoder))
    on_coords = {
        "patch_size": px,
        "patch_size_level0": int(px * level0 // target),  # what TRIDENT cuts at these coordinates
        "level0_magnification": level0,
        "target_magnification": target,
        "overlap": overlap,
        "name": bag.name,
        "savetodir": str(patches),
        "level0_width": width,
        "level0_height": height,
        **_extra(bag.info, *GRID, *SCALE),
    }
    on_features = {"name": bag.name, "savetodir": str(features), "encoder": encoder}
    # TRIDENT copies attributes of coordinates to features of other encoders, but not these.
    on_features |= _extra(bag.info, "encoder", *ORIGIN)
    return [
        PlannedFile(
            path=patches / f"{bag.name}_patches.h5",
            coords=coords,
            chunk=1,
            attributes={"coords": on_coords},
        ),
        PlannedFile(
            path=features / f"{bag.name}.h5",
            coords=coords,
            chunk=1,
            features="features",
            dtype=bag.dtype,
            attributes={"coords": on_coords, "features": on_features},
        ),
    ]


def _magnification(mpp: float) -> float:
    """Return 10 / mpp, rounded if it is within 1 % of an integer."""
    exact = 10 / mpp
    is_integer = abs(exact - round(exact)) <= 0.01 * exact
    return round(exact) if is_integer else round(exact, 3)


def _level0_magnification(info: BagInfo, target: float) -> int:
    """Return the bucket of the slide's um/px, or the magnification that TRIDENT's rule implies."""
    if info.scale_rule == "exact" and info.slide_mpp:
        buckets = (times for below, times in MAGNIFICATIONS if info.slide_mpp < below)
        return next(buckets, max(1, round(10 / info.slide_mpp)))
    return max(1, round(target * (info.patch_level0 or 1) / (info.patch_px or 1)))


def plan_clam(bag: Level0Bag, out: Path) -> list[PlannedFile]:
    """Return the plan of files in OUT/patches, pt_files and h5_files, with patches at level 0."""
    name, coords = bag.name, bag.required_coords
    (side,) = bag.require("patch_level0")
    size = {"level_dim": bag.info.slide_size, "downsampled_level_dim": bag.info.slide_size}
    on_coords = {
        "patch_size": round(side),
        "patch_level": 0,
        "downsample": (1.0, 1.0),
        **(size if bag.info.slide_size else {}),
        "name": name,
        "save_path": str(out / "patches"),
        **_extra(bag.info, *GRID),
    }
    return [
        PlannedFile(
            path=out / "patches" / f"{name}.h5",
            coords=coords,
            chunk=1,
            attributes={"coords": on_coords},
        ),
        PlannedFile(path=out / "pt_files" / f"{name}.pt", features="features"),
        PlannedFile(
            path=out / "h5_files" / f"{name}.h5",
            coords=coords.astype(np.int32),
            features="features",
            chunk=32,
        ),
    ]


def plan_stamp(bag: Level0Bag, out: Path) -> list[PlannedFile]:
    """Return the plan of OUT/NAME.h5, in micrometres. Its version names caprmil as the writer."""
    coords = bag.required_coords
    encoder, px, side, mpp = bag.require("encoder", "patch_px", "patch_level0", "slide_mpp")
    code = hashlib.sha256(f"{encoder} {bag.info.fingerprint}".encode()).hexdigest()
    on_file = {
        "stamp_version": f"2.0.0+caprmil.{version('caprmil')}",
        "extractor": encoder,
        "unit": "um",
        "tile_size_um": round(side * mpp, 6),
        "tile_size_px": px,
        "code_hash": code[:8],
        "feat_type": "tile",
        **_extra(bag.info, *GRID, *SCALE, *ORIGIN, "slide_size"),
    }
    return [
        PlannedFile(
            path=out / f"{bag.name}.h5",
            coords=(coords * mpp).astype(np.float32),
            features="feats",
            dtype="float16",
            attributes={"": on_file},
        )
    ]


PLANNERS = {
    "caprmil": plan_caprmil,
    "trident": plan_trident,
    "clam": plan_clam,
    "stamp": plan_stamp,
}


def _extra(info: BagInfo, *names: str) -> dict[str, Any]:
    """Return known fields as attributes `caprmil_...`, see `extra_attributes`."""
    fields = {f"caprmil_{name}": getattr(info, name) for name in names}
    return {name: value for name, value in fields.items() if value is not None}
