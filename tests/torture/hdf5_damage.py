"""Damage to HDF5 files that keeps them readable as HDF5: attributes, arrays, types and links."""

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np

ATTRIBUTES: tuple[Any, ...] = (
    *("", "x", "um", "nan", "\u202e", b"\xff\xfe", 0, -1, 2**62, 1.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), True, np.empty(0), np.zeros((2, 2)), np.array(["a", "b"], "S1")),
    *(np.complex64(1j), h5py.Empty("f"), np.int8(-1), np.datetime64("2020").astype(int)),
)
NAMES = ("features", "coords", "feats", "coordinates", "patch_embeddings", "labels", "0")
KNOWN = ("caprmil_schema", "mpp", "step", "patch_px", "patch_level0", "slide_width", "unit")
KNOWN += ("slide_height", "overlap", "patch_size", "patch_size_level0", "tile_size", "tile_size_um")
KNOWN += ("tile_size_px", "target_magnification", "settings", "encoder", "feat_type", "scale_rule")
TYPES = ("f8", "f4", "f2", "i8", "u1", "i1", "c8", "S3", "?", ">f4", "V4", "u8")
SHAPES = ((), (0,), (0, 8), (6, 0), (1,), (6,), (2, 3), (1, 6, 8), (2, 6, 8), (1, 1, 6, 8), (7, 2))


def damage_hdf5(path: Path, random: Random) -> None:
    """Change a few things in an HDF5 file."""
    with h5py.File(path, "r+") as file:
        for _ in range(random.choice((1, 1, 2, 3))):
            change = random.choice((_attribute, _attribute, _array, _values, _link))
            with suppress(OSError, RuntimeError, KeyError):  # an earlier change may prevent it
                change(file, random)


def _attribute(file: Any, random: Random) -> None:
    holder = random.choice([file, *(file[name] for name in file if file.get(name) is not None)])
    name = random.choice([*KNOWN, *holder.attrs])
    if name in holder.attrs and random.random() < 0.2:
        del holder.attrs[name]
    else:
        holder.attrs[name] = random.choice(ATTRIBUTES)


def _array(file: Any, random: Random) -> None:
    """Replace an array by one of another type or shape."""
    name = random.choice([*file, *NAMES])
    if name in file:
        del file[name]
    shape, kind = random.choice(SHAPES), random.choice(TYPES)
    if random.random() < 0.1:
        file.create_group(name)
    elif random.random() < 0.2:
        file.create_dataset(name, shape, kind)  # declared, never written
    else:
        file[name] = np.zeros(shape, kind)


def _values(file: Any, random: Random) -> None:
    """Put extreme values into an array."""
    arrays = [file[n] for n in file if isinstance(file.get(n), h5py.Dataset) and file[n].size]
    if not arrays:
        return
    array = random.choice(arrays)
    values = (float("nan"), float("inf"), -1, 1e30, 2**40, 65504, -(2**62), 1e-45)
    at = tuple(random.randrange(side) for side in array.shape)
    try:
        array[at] = np.asarray(random.choice(values)).astype(array.dtype)
    except (TypeError, ValueError):
        return


def _link(file: Any, random: Random) -> None:
    """Replace an array by a link, or store it elsewhere."""
    name = random.choice([*file, *NAMES])
    if name in file:
        del file[name]
    match random.randrange(4):
        case 0:
            file[name] = h5py.SoftLink(random.choice(("/", "/nowhere", f"/{name}", "/coords")))
        case 1:
            file[name] = h5py.ExternalLink(random.choice(("/etc/passwd", "x.h5")), "features")
        case 2:
            outside = [("/etc/hostname", 0, h5py.h5f.UNLIMITED)]
            file.create_dataset(name, (6, 8), "f4", external=outside)
        case 3:
            layout = h5py.VirtualLayout((6, 8), "f4")
            layout[:] = h5py.VirtualSource("x.h5", "features", (6, 8))
            file.create_virtual_dataset(name, layout)
