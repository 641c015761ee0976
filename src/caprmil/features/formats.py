"""Reading of feature files: those of caprmil, TRIDENT, CLAM and STAMP, and plain arrays.

The format is recognised by the names of arrays and attributes in a file, not by its path. Values
are not checked here; `bags` does that.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from zipfile import is_zipfile

import h5py
import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError, CaprmilError
from caprmil.features.attributes import integer, number, rule, size, text
from caprmil.features.extra_attributes import extra_fields
from caprmil.features.stored_arrays import (
    COORDS,
    FEATURES,
    check_npz,
    check_sizes,
    own_datasets,
    zip_sizes,
)
from caprmil.features.text_heaps import check_heaps
from caprmil.io.blocks import PartialFile, read_blocks
from caprmil.io.paths import RemotePath, local_copy
from caprmil.slides.names import BAG_SUFFIXES

T = TypeVar("T")

HDF5 = (".h5", ".hdf5")

SCHEMA = 1
"""The version of caprmil's own format. Files of a later version are refused."""

_torch_lock = Lock()  # torch's list of safe classes is global to the process


class CoordinatesError(BagError):
    """A file of coordinates was given for one of features."""

    advice = "Pass the folder of the features: h5_files of CLAM, features_ENCODER of TRIDENT."


@dataclass(kw_only=True)
class FileContent:
    """Arrays and attributes of a feature file, unchecked. HDF5 and `.npy` are read on demand."""

    path: Path | None
    kind: str
    features: Any
    coords: Any
    dtype: str
    attributes: Mapping[str, Any]
    file: Path | None = None  # the local file, or the local copy of a remote file

    def __str__(self) -> str:
        return str(self.path or "The bag in memory")

    @property
    def of_slide(self) -> bool:
        """Whether the file is marked as features of a slide or patient, not of patches."""
        return text(self.attributes.get("feat_type")) in ("slide", "patient")


def from_arrays(
    path: Path | None, features: Any, coords: Any, attributes: Mapping[str, Any]
) -> FileContent:
    """Return arrays in memory as the content of a file."""
    arrays = {"features": np.asarray(features)}
    if coords is not None:
        arrays["coords"] = np.asarray(coords)
    return _content(path, "memory", arrays, attributes)


@contextmanager
def open_file(path: Path, parts: PartialFile | None = None) -> Iterator[FileContent]:
    """Open a feature file of any format.

    A remote file is copied to a local one, unless `parts` of it are passed.
    """
    with one_line_errors(path):
        _check_name(path)
        with nullcontext(parts) if parts else local_copy(path) as file:
            _check_content(path, file)
            with _arrays(path, file) as content:
                content.file = file if isinstance(file, Path) else None
                yield content


def read_npz(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return these arrays of an .npz file, which may hold far more than a bag may."""
    with one_line_errors(path):
        check_npz(path, path)
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Raise an error of one line for whatever a damaged file raises."""
    try:
        yield
    except FileNotFoundError:
        raise _missing(path) from None
    except CaprmilError:
        raise
    except MemoryError as problem:
        raise BagError(
            f"There is not enough memory for {path}. Free some, or extract fewer patches."
        ) from problem
    except BlockingIOError as problem:
        raise BagError(f"{path} is still being written. Wait for the other program.") from problem
    except Exception as problem:  # damaged files raise many types
        reason = " ".join(str(problem).split()).split(". ")[0].rstrip(".")
        raise BagError(
            f"{path} cannot be read ({reason}). It is truncated, damaged, or has a wrong suffix. "
            "Copy it again, or extract the features again."
        ) from problem


@contextmanager
def _arrays(path: Path, file: Any) -> Iterator[FileContent]:
    """Yield the content of `file`, a local file or parts of one, for the name `path`."""
    match path.suffix.lower():
        case ".npy":
            array = np.load(file, mmap_mode="r", allow_pickle=False)
            yield _content(path, "npy", {"features": array})
        case ".npz":
            check_npz(path, file)
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                yield _content(path, "npz", arrays)
        case ".pt":
            yield _content(path, "pt", _load_pt(path, file))
        case _:
            with h5py.File(file, "r") as h5:
                yield _h5_content(path, h5)


def read_header(path: Path, read: Callable[[FileContent], T]) -> T:
    """Return the result of `read` on a file. Of remote HDF5, only the needed parts are fetched."""
    if not isinstance(path, RemotePath) or path.suffix.lower() not in HDF5:
        with open_file(path) as content:
            return read(content)

    def read_parts(parts: PartialFile) -> T:
        with open_file(path, parts) as content:
            return read(content)

    try:
        return read_blocks(path, read_parts)
    except FileNotFoundError:
        raise _missing(path) from None


def _missing(path: Path) -> BagError:
    return BagError(f"There is no file {path}. Check its name and folder.")


def _check_name(path: Path) -> None:
    if not isinstance(path, RemotePath):
        _check_file(path)
    if path.suffix.lower() not in BAG_SUFFIXES:
        raise BagError(
            f"{path} does not have the suffix of a feature file. Known: {', '.join(BAG_SUFFIXES)}."
        )


def _check_file(path: Path) -> None:
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        raise BagError(
            f"{path} is still being written: there is a lock file {lock.name}. "
            "Wait, or remove the lock if TRIDENT is not running."
        )
    if not path.exists():
        raise _missing(path)
    if path.is_dir():
        raise BagError(f"{path} is a folder. Pass a feature file.")


def _check_content(path: Path, file: Path | PartialFile) -> None:
    if (file.size if isinstance(file, PartialFile) else file.stat().st_size) == 0:
        raise BagError(f"{path} is empty: writing it was interrupted. Extract the features again.")
    if isinstance(file, Path) and path.suffix.lower() in HDF5 and not h5py.is_hdf5(file):
        raise BagError(f"{path} is not an HDF5 file. The download may have failed. Copy it again.")


def _content(
    path: Path | None,
    kind: str,
    arrays: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
) -> FileContent:
    """Return features and coordinates by name. Outside HDF5, a single array is the features."""
    coords = next((name for name in COORDS if name in arrays), None)
    others = [name for name in arrays if name not in COORDS]
    known = [name for name in FEATURES if name in arrays]
    if not known and len(others) == 1 and kind != "h5":
        known = others
    if not known and coords is not None and not others:
        raise CoordinatesError(
            f"{path} has coordinates, and no features. {CoordinatesError.advice}"
        )
    if not known:
        raise BagError(
            f"{path} has no features; it has: {', '.join(arrays) or 'nothing'}. Pass a feature "
            f"file, or name the features one of {', '.join(FEATURES)}."
        )
    features = arrays[known[0]]
    lazy = kind in ("h5", "npy")  # read on demand
    return FileContent(
        path=path,
        kind=_h5_kind(known[0], coords, attributes or {}) if kind == "h5" else kind,
        features=features if lazy else to_array(features),
        coords=None if coords is None else arrays[coords] if lazy else to_array(arrays[coords]),
        dtype=str(features.dtype).removeprefix("torch."),
        attributes=attributes or {},
    )


def _h5_content(path: Path, file: Any) -> FileContent:
    arrays = own_datasets(path, file)
    if file.driver != "fileobj":  # of a remote file, only parts are here
        check_heaps(path, file, arrays.values())
    attributes: dict[str, Any] = {}
    for holder in (*arrays.values(), file):
        attributes |= holder.attrs
    return _content(path, "h5", arrays, attributes)


def _h5_kind(features: str, coords: str | None, attributes: Mapping[str, Any]) -> str:
    if "caprmil_schema" in attributes:
        return "caprmil"
    if features == "feats" or "stamp_version" in attributes:
        return "stamp"
    if {"patch_size_level0", "target_magnification", "savetodir"} & attributes.keys():
        return "trident"
    return "clam" if features == "features" and coords and not attributes else "h5"


def _load_pt(path: Path, file: Path) -> dict[str, Any]:
    """Return tensors and NumPy arrays; nothing else is unpickled."""
    import torch  # only here: bags load without torch

    # TRIDENT saves NumPy arrays. NumPy 1 and 2 have two names for the same function.
    rebuild: Any = np.empty(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    dtypes = [type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8")]
    allowed: list[Any] = [np.ndarray, np.dtype, *dtypes, *((rebuild, name) for name in names)]
    file_size = file.stat().st_size
    if is_zipfile(file):
        check_sizes(path, file_size, zip_sizes(file))
    try:
        with (
            _torch_lock,
            torch.serialization.safe_globals(allowed),
            warnings.catch_warnings(action="ignore"),  # about old pickle protocols
        ):
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise BagError(
            f"{path} contains more than tensors and arrays, or is damaged. It was not unpickled, "
            "because that can run code. Save only the features: torch.save(features, path)."
        ) from problem
    is_list = isinstance(content, list | tuple) and content  # vectors, or chunks of rows
    named = dict(enumerate(content)) if is_list else content
    named = named if isinstance(named, dict) else {"features": named}
    arrays = {str(name): item for name, item in named.items() if hasattr(item, "dtype")}
    # A tensor can repeat its values, and a list its tensors: they are larger than what was read.
    check_sizes(path, file_size, {name: item.nbytes for name, item in arrays.items()})
    if is_list and arrays:
        rows = [to_array(item) for item in arrays.values()]
        arrays = {"features": np.stack(rows) if rows[0].ndim == 1 else np.concatenate(rows)}
    return arrays


def to_array(stored: Any) -> NDArray[Any]:
    """Return an HDF5 dataset, tensor or array as an array. bfloat16 becomes float32."""
    if hasattr(stored, "detach"):
        tensor = stored.detach()
        return np.asarray(tensor.float() if "bfloat16" in str(tensor.dtype) else tensor)
    return np.asarray(stored[()])


def metadata(content: FileContent) -> dict[str, Any]:
    """Return the metadata of a file as fields of `BagInfo`."""
    readers = {"caprmil": _caprmil, "trident": _trident, "stamp": _stamp}
    return readers.get(content.kind, _others)(content)


def _caprmil(content: FileContent) -> dict[str, Any]:
    stored = content.attributes
    if stored["caprmil_schema"] > SCHEMA:
        raise BagError(
            f"{content} has schema {stored['caprmil_schema']}, but this version of caprmil reads "
            f"up to {SCHEMA}. Upgrade caprmil."
        )
    return {
        "encoder": text(stored.get("encoder")),
        "fingerprint": text(stored.get("fingerprint")),
        "settings": text(stored.get("settings")),
        "mpp": number(stored.get("mpp")),
        "slide_mpp": number(stored.get("slide_mpp")),
        "scale_rule": rule(stored.get("scale_rule")),
        "patch_px": integer(stored.get("patch_px")),
        "patch_level0": number(stored.get("patch_level0")),
        "step": number(stored.get("step")),
        "unit": "px",
        "slide_size": size(stored.get("slide_width"), stored.get("slide_height")),
        "slide_path": text(stored.get("slide_path")),
    }


def _trident(content: FileContent) -> dict[str, Any]:
    stored = content.attributes
    side, level0 = number(stored.get("patch_size")), number(stored.get("patch_size_level0"))
    magnification = number(stored.get("target_magnification"))
    of_slide = number(stored.get("level0_magnification"))
    overlap = number(stored.get("overlap")) or 0.0  # in pixels of the patch, not of level 0
    shared = level0 * overlap / side if level0 and side else 0.0
    if magnification and of_slide:  # TRIDENT rounds side and overlap down, each by itself
        shared = overlap * of_slide // magnification
    return {
        "encoder": text(stored.get("encoder")),
        "mpp": 10 / magnification if magnification else None,
        "scale_rule": "nominal" if magnification else None,
        "patch_px": integer(side),
        "patch_level0": level0,
        "step": number(level0 - shared) if level0 else None,
        "unit": "px",
        "slide_size": size(stored.get("level0_width"), stored.get("level0_height")),
        **extra_fields(stored),
    }


def _stamp(content: FileContent) -> dict[str, Any]:
    stored = content.attributes
    in_um = text(stored.get("unit")) == "um"
    um = number(stored.get("tile_size_um")) or (number(stored.get("tile_size")) if in_um else None)
    px = number(stored.get("tile_size_px"))
    if not in_um and um is None and content.coords is not None:
        coords = to_array(content.coords)
        if round(infer_step(coords.reshape(-1, 2)) or 0) == 224:
            # Early files have coordinates in pixels, of which 224 are 256 micrometres.
            um, px, content.coords = 256.0, 224.0, coords * (256 / 224)
    return {
        "encoder": text(stored.get("extractor")),
        "mpp": um / px if um and px else None,
        "scale_rule": "exact" if um and px else None,
        "patch_px": integer(px),
        "step": um,
        "unit": "um" if in_um or um else None,
    }


def _others(content: FileContent) -> dict[str, Any]:
    if content.kind == "memory":
        return {"unit": "px", **content.attributes}
    unit = "px" if content.kind == "clam" else None
    return {"encoder": text(content.attributes.get("encoder")), "unit": unit}


def infer_step(coords: NDArray[Any]) -> float | None:
    """Return the most frequent distance of neighbours, or None if it is not clear.

    Distances are taken within rows and columns, because CLAM lays a separate grid on each contour.
    """
    gaps = []
    for along, across in ((0, 1), (1, 0)):
        line = coords[np.lexsort((coords[:, along], coords[:, across]))].astype(np.float64)
        same = np.diff(line[:, across]) == 0
        gaps.append(np.diff(line[:, along])[same])
    gap = np.round(np.concatenate(gaps), 1)  # micrometres in float32 are not exact
    gap = gap[gap > 0]
    values, counts = np.unique(gap, return_counts=True)
    if not len(gap) or counts.max() < 2:
        return None
    step = float(values[counts.argmax()])
    off_grid = np.abs(gap / step - np.rint(gap / step)) > 0.1
    return None if off_grid.mean() > 0.5 else step
