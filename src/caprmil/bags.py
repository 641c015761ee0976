"""A bag, the patch features of one slide, and the files of the field that hold one.

One layout is written (HDF5). Those of TRIDENT, CLAM and STAMP are read as well, and plain arrays;
which of them a file is, its content says.
"""

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from caprmil.errors import BagError

SUFFIXES = (".h5", ".hdf5", ".npz", ".npy", ".pt")
"""What a bag's file may end in. Where a slide has several, the first is the one to take: HDF5 has
coordinates, `.pt` hardly ever."""

SCHEMA = 1
"""The version of our own layout. A file of a later one is refused."""

ScaleRule: TypeAlias = Literal["exact", "nominal"]

_FEATURES = ("features", "feats", "patch_embeddings", "embeddings")
_COORDS = ("coords", "coordinates")


@dataclass(frozen=True, kw_only=True)
class BagInfo:
    """What a feature file says of itself."""

    path: Path | None  # None: made in memory
    kind: str  # caprmil, trident, clam, stamp, h5 (any other), npy, npz, pt or memory
    n_patches: int
    width: int  # E
    dtype: str  # as stored
    encoder: str | None = None
    mpp: float | None = None  # microns per pixel of the patches as the encoder saw them
    scale_rule: ScaleRule | None = None  # nominal: mpp is 10 / magnification; exact: measured
    patch_px: int | None = None  # side of a patch as the encoder saw it
    patch_level0: float | None = None  # side of a patch in level-0 pixels
    step: float | None = None  # between neighbouring patches, in the unit of the coordinates
    unit: Literal["px", "um"] | None = None  # of the coordinates; px: level-0 pixels
    slide_size: tuple[int, int] | None = None  # width and height in level-0 pixels

    def __post_init__(self) -> None:
        for name in ("mpp", "patch_px", "patch_level0", "step"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} is not a positive number.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Bag:
    """The patches of one slide: row n of `features` and row n of `coords` are the same patch."""

    features: NDArray[np.floating[Any]]  # (N, E), float16 or float32
    coords: NDArray[Any] | None  # (N, 2), x and y of the top left corner, in `info.unit`
    info: BagInfo

    def grid(self) -> NDArray[np.int64] | None:
        """Return column and row of each patch, from 0, or None where no grid is known.

        CLAM lays a grid of its own on every contour, so two of its patches can share a cell.
        """
        if self.coords is None or self.info.step is None:
            return None
        cells = (self.coords - self.coords.min(axis=0)) / self.info.step
        return np.rint(cells).astype(np.int64)


def inspect(path: str | Path) -> BagInfo:
    """Describe a feature file. The features of HDF5 and `.npy` files are not read."""
    with _opened(Path(path)) as found:
        return _describe(found)


def read(path: str | Path) -> Bag:
    """Read a feature file whole, and check every value in it."""
    with _opened(Path(path)) as found:
        return _load(found)


def from_arrays(features: ArrayLike, coords: ArrayLike | None = None, **said: Any) -> Bag:
    """Make a bag in memory, checked like a file. `said` are fields of `BagInfo`."""
    return _load(_in_memory(None, features, coords, said))


def write(
    path: str | Path,
    features: ArrayLike,
    coords: ArrayLike | None = None,
    *,
    encoder: str | None = None,
    mpp: float | None = None,
    scale_rule: ScaleRule | None = None,
    patch_px: int | None = None,
    patch_level0: float | None = None,
    step: float | None = None,
    slide_size: tuple[int, int] | None = None,
    attributes: Mapping[str, str | int | float] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
) -> Path:
    """Write a bag in our own layout: whole or not at all, and never over another file.

    `coords` are level-0 pixels. `attributes` are kept on the file for other readers.
    """
    path = Path(path)
    said = {
        "encoder": encoder,
        "mpp": mpp,
        "scale_rule": scale_rule,
        "patch_px": patch_px,
        "patch_level0": patch_level0,
        "step": step,
    }
    if dtype not in ("float16", "float32") or scale_rule not in ("exact", "nominal", None):
        raise ValueError(f"{dtype=} or {scale_rule=} is not known.")
    if path.suffix.lower() not in (".h5", ".hdf5"):
        raise BagError(f"{path} cannot be written as '{path.suffix}'. Name it .h5.")
    if path.exists():
        raise BagError(f"{path} is there already. Remove it first, or write elsewhere.")
    bag = _load(_in_memory(path, features, coords, said))
    datasets = {"features": _as_stored(path, bag.features, dtype)}
    if bag.coords is not None:
        datasets["coords"] = _as_pixels(path, bag.coords)
    width, height = slide_size or (None, None)
    ours = {"caprmil_schema": SCHEMA, **said, "slide_width": width, "slide_height": height}
    if taken := {*ours, "feat_type"} & set(attributes or ()):
        raise ValueError(f"{sorted(taken)} cannot be extra attributes: the layout has them.")
    _write_beside(path, datasets, {**ours, **(attributes or {})})
    return path


def _as_stored(path: Path, features: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        stored = features.astype(dtype, copy=False)
    if not np.isfinite(stored).all():
        raise BagError(
            f"{path}: values up to {np.abs(features).max():.4g} do not fit into float16. "
            'Pass dtype="float32".'
        )
    return stored


def _as_pixels(path: Path, coords: NDArray[Any]) -> NDArray[np.int64]:
    if (coords != np.rint(coords)).any():
        raise BagError(
            f"{path}: coordinates are whole level-0 pixels, but some here have fractions. "
            "Divide micrometres by the microns per pixel of level 0, and round."
        )
    return coords.astype(np.int64)


def _write_beside(path: Path, datasets: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    """Write under a passing name and rename, so that `path` is never half a file."""
    passing = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(passing, "x") as file:
            for name, data in datasets.items():
                file.create_dataset(name, data=data)  # contiguous and uncompressed: read fastest
            file.attrs.update({name: v for name, v in attributes.items() if v is not None})
        with passing.open("rb+") as stream:
            os.fsync(stream.fileno())
        passing.rename(path)
    except OSError as problem:
        raise BagError(
            f"{path} cannot be written ({problem}). Check space and rights in its folder."
        ) from problem
    finally:
        passing.unlink(missing_ok=True)


@dataclass(kw_only=True)
class _Found:
    """What lies in a file, unchecked. HDF5 datasets and `.npy` files are not read yet."""

    path: Path | None
    kind: str
    features: Any
    coords: Any
    dtype: str
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        return str(self.path or "The bag in memory")


def _in_memory(path: Path | None, features: Any, coords: Any, said: Mapping[str, Any]) -> _Found:
    arrays = {"features": np.asarray(features)}
    if coords is not None:
        arrays["coords"] = np.asarray(coords)
    return _find(path, "memory", arrays, said)


@contextmanager
def _opened(path: Path) -> Iterator[_Found]:
    """Open a file of any kind for as long as its arrays are looked at."""
    try:
        _check_file(path)
        match path.suffix.lower():
            case ".npy":
                array = np.load(path, mmap_mode="r", allow_pickle=False)
                yield _find(path, "npy", {"features": array})
            case ".npz":
                with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                    yield _find(path, "npz", arrays)
            case ".pt":
                yield _find(path, "pt", _load_pt(path))
            case _:
                with h5py.File(path, "r") as file:
                    yield _find_h5(path, file)
    except (BagError, MemoryError):
        raise
    except BlockingIOError as problem:
        raise BagError(f"{path} is still being written. Wait for the other program.") from problem
    except Exception as problem:  # the libraries raise a dozen kinds at damaged files
        reason = " ".join(str(problem).split()).split(". ")[0].rstrip(".")
        raise BagError(
            f"{path} cannot be read ({reason}). It is cut short, damaged or not what its suffix "
            "says. Copy it again, or extract the features again."
        ) from problem


def _check_file(path: Path) -> None:
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        raise BagError(
            f"{path} is still being written, as {lock.name} beside it says. "
            "Wait, or remove the lock if no TRIDENT is running."
        )
    if not path.exists():
        raise BagError(f"There is no file {path}. Check its name and folder.")
    if path.is_dir():
        raise BagError(f"{path} is a folder. Pass one feature file of it.")
    if path.suffix.lower() not in SUFFIXES:
        raise BagError(f"{path} is no feature file by its suffix. Known: {', '.join(SUFFIXES)}.")
    if path.stat().st_size == 0:
        raise BagError(f"{path} has 0 bytes: its writer was stopped. Extract the features again.")
    if path.suffix.lower() in (".h5", ".hdf5") and not h5py.is_hdf5(path):
        raise BagError(f"{path} is not an HDF5 file. Copy it again; the download may have failed.")


def _find(
    path: Path | None, kind: str, arrays: Mapping[str, Any], said: Mapping[str, Any] | None = None
) -> _Found:
    """Tell features and coordinates apart. Outside HDF5, a lone array is taken for the features."""
    coords = next((name for name in _COORDS if name in arrays), None)
    others = [name for name in arrays if name not in _COORDS]
    known = [name for name in _FEATURES if name in arrays]
    if not known and len(others) == 1 and kind != "h5":
        known = others
    if not known:
        raise BagError(
            f"{path} has no features; it has: {', '.join(arrays) or 'nothing'}. Pass the encoder's "
            f"file, or name the features one of {', '.join(_FEATURES)}."
        )
    features = arrays[known[0]]
    late = kind in ("h5", "npy")  # these are read when they are needed
    return _Found(
        path=path,
        kind=_h5_kind(known[0], coords, said or {}) if kind == "h5" else kind,
        features=features if late else _array(features),
        coords=None if coords is None else arrays[coords] if late else _array(arrays[coords]),
        dtype=str(features.dtype).removeprefix("torch."),
        attributes=said or {},
    )


def _find_h5(path: Path, file: Any) -> _Found:
    arrays = {name: item for name, item in file.items() if isinstance(item, h5py.Dataset)}
    said: dict[str, Any] = {}
    for holder in (*arrays.values(), file):
        said |= holder.attrs
    return _find(path, "h5", arrays, said)


def _h5_kind(features: str, coords: str | None, said: Mapping[str, Any]) -> str:
    if "caprmil_schema" in said:
        return "caprmil"
    if features == "feats" or "stamp_version" in said:
        return "stamp"
    if {"patch_size_level0", "target_magnification", "savetodir"} & said.keys():
        return "trident"
    return "clam" if features == "features" and coords and not said else "h5"


def _load_pt(path: Path) -> dict[str, Any]:
    """Load tensors and NumPy arrays, and nothing that could run code."""
    import torch  # only here, so that everything else works without it

    # TRIDENT saves arrays. NumPy 1 and 2 call the same function by two names.
    rebuild: Any = np.empty(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    dtypes = [type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8")]
    allowed: list[Any] = [np.ndarray, np.dtype, *dtypes, *((rebuild, name) for name in names)]
    try:
        # The warnings are of old pickle protocols.
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise BagError(
            f"{path} holds more than tensors and arrays, or is damaged. It was not unpickled, as "
            "that can run any code. Save the features alone: torch.save(features, path)."
        ) from problem
    if isinstance(content, list | tuple) and content:  # vectors, or pieces of several rows
        rows = [_array(item) for item in content]
        content = np.stack(rows) if rows[0].ndim == 1 else np.concatenate(rows)
    arrays = content if isinstance(content, dict) else {"features": content}
    return {str(name): item for name, item in arrays.items() if hasattr(item, "dtype")}


def _array(stored: Any) -> NDArray[Any]:
    """Return an array, from an HDF5 dataset or a tensor too. NumPy has no bfloat16."""
    if hasattr(stored, "detach"):
        tensor = stored.detach()
        return np.asarray(tensor.float() if "bfloat16" in str(tensor.dtype) else tensor)
    return np.asarray(stored[()])


def _load(found: _Found) -> Bag:
    """Read what was found, and check each value."""
    info = _describe(found)
    # Two bytes stay two bytes, to be cast at the last moment; all else becomes float32.
    dtype = np.float16 if found.features.dtype.itemsize == 2 else np.float32
    with np.errstate(over="ignore"):
        features = np.require(_array(found.features), dtype, ["C", "O", "W"])
    features = features.reshape(info.n_patches, info.width)
    bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
    if len(bad):
        raise BagError(
            f"{found}: {len(bad)} of {info.n_patches} patches have NaN or infinite features, the "
            f"first in row {bad[0]}. Extract them again, in float32 if half precision overflows."
        )
    coords = None
    if found.coords is not None:
        coords = _array(found.coords).reshape(info.n_patches, 2)
        coords = coords.astype(np.float64 if coords.dtype.kind == "f" else np.int64)
        if not np.isfinite(coords).all():
            raise BagError(f"{found} has NaN or infinite coordinates. Extract it again.")
    return Bag(features=features, coords=coords, info=info)


def _describe(found: _Found) -> BagInfo:
    n, width = _check(found)
    say = {"caprmil": _said_by_us, "trident": _said_by_trident, "stamp": _said_by_stamp}
    said = say.get(found.kind, _said_by_others)(found)
    if found.coords is None:
        said["unit"] = None
    elif said.get("step") is None:
        found.coords = _array(found.coords)  # kept, since rows as chunks are slow to read
        said["step"] = _infer_step(found.coords.reshape(n, 2))
    return BagInfo(
        path=found.path, kind=found.kind, n_patches=n, width=width, dtype=found.dtype, **said
    )


def _check(found: _Found) -> tuple[int, int]:
    """Check shapes and types, and return how many patches there are and how wide they are."""
    shape = tuple(found.features.shape)
    points = None if found.coords is None else tuple(found.coords.shape)
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if 0 in shape:
        raise BagError(f"{found} holds no patches. Leave the slide out, or look for tissue again.")
    of_slide = _text(found.attributes.get("feat_type")) in ("slide", "patient")
    if of_slide or len(shape) == 1 or (shape[:1] == (1,) and points and points[0] > 1):
        raise BagError(
            f"{found} holds one vector, not one per patch: it looks like a slide-level file. "
            "Pass the patch features it was made from."
        )
    if len(shape) != 2:
        raise BagError(f"{found} has features of shape {shape}. Save them as (patches, width).")
    if found.features.dtype.kind != "f":
        raise BagError(f"{found} has features of type {found.dtype}. Save them as float16 or 32.")
    if points is not None and points not in ((shape[0], 2), (1, shape[0], 2)):
        raise BagError(
            f"{found} has {shape[0]} patches but coordinates of shape {points}, not "
            f"({shape[0]}, 2). They may be of different runs: extract them again."
        )
    if points is not None and found.coords.dtype.kind not in "iuf":
        raise BagError(f"{found} has coordinates of type {found.coords.dtype}. Save them as int64.")
    return shape[0], shape[1]


def _said_by_us(found: _Found) -> dict[str, Any]:
    said = found.attributes
    if said["caprmil_schema"] > SCHEMA:
        raise BagError(
            f"{found} is of schema {said['caprmil_schema']}, and this version of caprmil reads up "
            f"to {SCHEMA}. Upgrade caprmil."
        )
    return {
        "encoder": _text(said.get("encoder")),
        "mpp": _number(said.get("mpp")),
        "scale_rule": _text(said.get("scale_rule")),
        "patch_px": _whole(said.get("patch_px")),
        "patch_level0": _number(said.get("patch_level0")),
        "step": _number(said.get("step")),
        "unit": "px",
        "slide_size": _size(said.get("slide_width"), said.get("slide_height")),
    }


def _said_by_trident(found: _Found) -> dict[str, Any]:
    said = found.attributes
    side, level0 = _number(said.get("patch_size")), _number(said.get("patch_size_level0"))
    magnification = _number(said.get("target_magnification"))
    overlap = _number(said.get("overlap")) or 0.0  # in pixels of the patch, not of level 0
    return {
        "encoder": _text(said.get("encoder")),
        "mpp": 10 / magnification if magnification else None,
        "scale_rule": "nominal" if magnification else None,
        "patch_px": _whole(side),
        "patch_level0": level0,
        "step": _number(level0 * (1 - overlap / side)) if side and level0 else None,
        "unit": "px",
        "slide_size": _size(said.get("level0_width"), said.get("level0_height")),
    }


def _said_by_stamp(found: _Found) -> dict[str, Any]:
    said = found.attributes
    in_um = _text(said.get("unit")) == "um"
    um = _number(said.get("tile_size_um")) or (_number(said.get("tile_size")) if in_um else None)
    px = _number(said.get("tile_size_px"))
    if not in_um and um is None and found.coords is not None:
        coords = _array(found.coords)
        if round(_infer_step(coords.reshape(-1, 2)) or 0) == 224:
            # Historic files count in pixels, and 224 of them are 256 micrometres.
            um, px, found.coords = 256.0, 224.0, coords * (256 / 224)
    return {
        "encoder": _text(said.get("extractor")),
        "mpp": um / px if um and px else None,
        "scale_rule": "exact" if um and px else None,
        "patch_px": _whole(px),
        "step": um,
        "unit": "um" if in_um or um else None,
    }


def _said_by_others(found: _Found) -> dict[str, Any]:
    if found.kind == "memory":
        return {"unit": "px", **found.attributes}
    unit = "px" if found.kind == "clam" else None
    return {"encoder": _text(found.attributes.get("encoder")), "unit": unit}


def _infer_step(coords: NDArray[Any]) -> float | None:
    """Return the commonest gap between neighbours, or None where none stands out.

    Gaps are taken along each row and column, since CLAM's contours have grids of their own.
    """
    gaps = []
    for along, across in ((0, 1), (1, 0)):
        line = coords[np.lexsort((coords[:, along], coords[:, across]))].astype(np.float64)
        same = np.diff(line[:, across]) == 0
        gaps.append(np.diff(line[:, along])[same])
    gap = np.round(np.concatenate(gaps), 1)  # micrometres in float32 are not quite even
    gap = gap[gap > 0]
    values, counts = np.unique(gap, return_counts=True)
    if not len(gap) or counts.max() < 2:
        return None
    step = float(values[counts.argmax()])
    off_grid = np.abs(gap / step - np.rint(gap / step)) > 0.1
    return None if off_grid.mean() > 0.5 else step


def _number(value: Any) -> float | None:
    """Return a positive number from an attribute: int, float, text, or TRIDENT's 'None'."""
    try:
        number = float(np.ravel(value)[0])
    except (TypeError, ValueError, IndexError):
        return None
    return number if number > 0 and isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else round(number)


def _size(width: Any, height: Any) -> tuple[int, int] | None:
    wide, high = _whole(width), _whole(height)
    return None if wide is None or high is None else (wide, high)


def _text(value: Any) -> str | None:
    text = value.decode() if isinstance(value, bytes) else value
    return text if isinstance(text, str) and text not in ("", "None") else None
