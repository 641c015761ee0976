"""What lies in a feature file of TRIDENT, CLAM, STAMP or anybody else, unchecked.

Which tool wrote a file, its content says: names of arrays and attributes, never its path.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError, CaprmilError
from caprmil.io.blocks import PartialFile, read_blocks
from caprmil.io.paths import RemotePath, local_copy
from caprmil.slides.names import BAG_SUFFIXES

T = TypeVar("T")

SUFFIXES = BAG_SUFFIXES
"""What a bag's file may end in. Where a slide has several, the first is the one to take: HDF5 has
coordinates, `.pt` hardly ever."""

HDF5 = (".h5", ".hdf5")

SCHEMA = 1
"""The version of our own layout. A file of a later one is refused."""

_FEATURES = ("features", "feats", "patch_embeddings", "embeddings")
_COORDS = ("coords", "coordinates")
_loading = Lock()  # what torch may unpickle is a setting of the whole process


@dataclass(kw_only=True)
class Found:
    """What lies in a file, unchecked. HDF5 datasets and `.npy` files are not read yet."""

    path: Path | None
    kind: str
    features: Any
    coords: Any
    dtype: str
    attributes: Mapping[str, Any]
    file: Path | None = None  # on this machine: the file itself, or its copy in scratch

    def __str__(self) -> str:
        return str(self.path or "The bag in memory")

    @property
    def of_slide(self) -> bool:
        """Whether the file says that it holds one vector of a slide or a patient."""
        return _text(self.attributes.get("feat_type")) in ("slide", "patient")


def in_memory(path: Path | None, features: Any, coords: Any, said: Mapping[str, Any]) -> Found:
    """Return arrays as if they had been found in a file."""
    arrays = {"features": np.asarray(features)}
    if coords is not None:
        arrays["coords"] = np.asarray(coords)
    return _find(path, "memory", arrays, said)


@contextmanager
def opened(path: Path, parts: PartialFile | None = None) -> Iterator[Found]:
    """Open a file of any kind for as long as its arrays are looked at.

    One that is elsewhere is fetched whole, unless `parts` of it are to be looked at.
    """
    try:
        _check_name(path)
        with nullcontext(parts) if parts else local_copy(path) as file:
            _check_content(path, file)
            with _arrays(path, file) as found:
                found.file = file if isinstance(file, Path) else None
                yield found
    except FileNotFoundError:
        raise _no_file(path) from None
    except (CaprmilError, MemoryError):
        raise
    except BlockingIOError as problem:
        raise BagError(f"{path} is still being written. Wait for the other program.") from problem
    except Exception as problem:  # the libraries raise a dozen kinds at damaged files
        reason = " ".join(str(problem).split()).split(". ")[0].rstrip(".")
        raise BagError(
            f"{path} cannot be read ({reason}). It is cut short, damaged or not what its suffix "
            "says. Copy it again, or extract the features again."
        ) from problem


@contextmanager
def _arrays(path: Path, file: Any) -> Iterator[Found]:
    """Open `file`, which holds what is called `path`."""
    match path.suffix.lower():
        case ".npy":
            array = np.load(file, mmap_mode="r", allow_pickle=False)
            yield _find(path, "npy", {"features": array})
        case ".npz":
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                yield _find(path, "npz", arrays)
        case ".pt":
            yield _find(path, "pt", _load_pt(path, file))
        case _:
            with h5py.File(file, "r") as content:
                yield _find_h5(path, content)


def glance(path: Path, look: Callable[[Found], T]) -> T:
    """Return what `look` finds in a file. Of HDF5 elsewhere only that is fetched."""
    if not isinstance(path, RemotePath) or path.suffix.lower() not in HDF5:
        with opened(path) as found:
            return look(found)

    def look_at(parts: PartialFile) -> T:
        with opened(path, parts) as found:
            return look(found)

    try:
        return read_blocks(path, look_at)
    except FileNotFoundError:
        raise _no_file(path) from None


def _no_file(path: Path) -> BagError:
    return BagError(f"There is no file {path}. Check its name and folder.")


def _check_name(path: Path) -> None:
    if not isinstance(path, RemotePath):
        _check_file(path)
    if path.suffix.lower() not in SUFFIXES:
        raise BagError(f"{path} is no feature file by its suffix. Known: {', '.join(SUFFIXES)}.")


def _check_file(path: Path) -> None:
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        raise BagError(
            f"{path} is still being written, as {lock.name} beside it says. "
            "Wait, or remove the lock if no TRIDENT is running."
        )
    if not path.exists():
        raise _no_file(path)
    if path.is_dir():
        raise BagError(f"{path} is a folder. Pass one feature file of it.")


def _check_content(path: Path, file: Path | PartialFile) -> None:
    if (file.size if isinstance(file, PartialFile) else file.stat().st_size) == 0:
        raise BagError(f"{path} has 0 bytes: its writer was stopped. Extract the features again.")
    if isinstance(file, Path) and path.suffix.lower() in HDF5 and not h5py.is_hdf5(file):
        raise BagError(f"{path} is not an HDF5 file. Copy it again; the download may have failed.")


def _find(
    path: Path | None, kind: str, arrays: Mapping[str, Any], said: Mapping[str, Any] | None = None
) -> Found:
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
    return Found(
        path=path,
        kind=_h5_kind(known[0], coords, said or {}) if kind == "h5" else kind,
        features=features if late else array(features),
        coords=None if coords is None else arrays[coords] if late else array(arrays[coords]),
        dtype=str(features.dtype).removeprefix("torch."),
        attributes=said or {},
    )


def _find_h5(path: Path, file: Any) -> Found:
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


def _load_pt(path: Path, file: Path) -> dict[str, Any]:
    """Load tensors and NumPy arrays, and nothing that could run code."""
    import torch  # only here, so that everything else works without it

    # TRIDENT saves arrays. NumPy 1 and 2 call the same function by two names.
    rebuild: Any = np.empty(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    dtypes = [type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8")]
    allowed: list[Any] = [np.ndarray, np.dtype, *dtypes, *((rebuild, name) for name in names)]
    try:
        with (
            _loading,
            torch.serialization.safe_globals(allowed),
            warnings.catch_warnings(action="ignore"),  # of old pickle protocols
        ):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise BagError(
            f"{path} holds more than tensors and arrays, or is damaged. It was not unpickled, as "
            "that can run any code. Save the features alone: torch.save(features, path)."
        ) from problem
    if isinstance(content, list | tuple) and content:  # vectors, or pieces of several rows
        rows = [array(item) for item in content]
        content = np.stack(rows) if rows[0].ndim == 1 else np.concatenate(rows)
    arrays = content if isinstance(content, dict) else {"features": content}
    return {str(name): item for name, item in arrays.items() if hasattr(item, "dtype")}


def array(stored: Any) -> NDArray[Any]:
    """Return an array, from an HDF5 dataset or a tensor too. NumPy has no bfloat16."""
    if hasattr(stored, "detach"):
        tensor = stored.detach()
        return np.asarray(tensor.float() if "bfloat16" in str(tensor.dtype) else tensor)
    return np.asarray(stored[()])


def say(found: Found) -> dict[str, Any]:
    """Return what the file says of its patches, as fields of `BagInfo`."""
    tools = {"caprmil": _said_by_us, "trident": _said_by_trident, "stamp": _said_by_stamp}
    return tools.get(found.kind, _said_by_others)(found)


def _said_by_us(found: Found) -> dict[str, Any]:
    said = found.attributes
    if said["caprmil_schema"] > SCHEMA:
        raise BagError(
            f"{found} is of schema {said['caprmil_schema']}, and this version of caprmil reads up "
            f"to {SCHEMA}. Upgrade caprmil."
        )
    return {
        "encoder": _text(said.get("encoder")),
        "fingerprint": _text(said.get("fingerprint")),
        "settings": _text(said.get("settings")),
        "mpp": _number(said.get("mpp")),
        "slide_mpp": _number(said.get("slide_mpp")),
        "scale_rule": _text(said.get("scale_rule")),
        "patch_px": _whole(said.get("patch_px")),
        "patch_level0": _number(said.get("patch_level0")),
        "step": _number(said.get("step")),
        "unit": "px",
        "slide_size": _size(said.get("slide_width"), said.get("slide_height")),
    }


def _said_by_trident(found: Found) -> dict[str, Any]:
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


def _said_by_stamp(found: Found) -> dict[str, Any]:
    said = found.attributes
    in_um = _text(said.get("unit")) == "um"
    um = _number(said.get("tile_size_um")) or (_number(said.get("tile_size")) if in_um else None)
    px = _number(said.get("tile_size_px"))
    if not in_um and um is None and found.coords is not None:
        coords = array(found.coords)
        if round(infer_step(coords.reshape(-1, 2)) or 0) == 224:
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


def _said_by_others(found: Found) -> dict[str, Any]:
    if found.kind == "memory":
        return {"unit": "px", **found.attributes}
    unit = "px" if found.kind == "clam" else None
    return {"encoder": _text(found.attributes.get("encoder")), "unit": unit}


def infer_step(coords: NDArray[Any]) -> float | None:
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
