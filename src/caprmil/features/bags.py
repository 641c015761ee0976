"""A bag, the patch features of one slide, and the files of the field that hold one.

One layout is written (HDF5). Those of TRIDENT, CLAM and STAMP are read as well, and plain arrays;
which of them a file is, its content says.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from caprmil.errors import BagError
from caprmil.features import formats
from caprmil.features.formats import Found
from caprmil.io.atomic import atomic_write
from caprmil.io.paths import as_path
from caprmil.slides.names import slide_name
from caprmil.slides.scale import ScaleRule

SUFFIXES = formats.SUFFIXES
ATTRIBUTES = (
    *("encoder", "fingerprint", "settings", "mpp", "scale_rule", "patch_px", "patch_level0"),
    *("step", "slide_mpp"),
)
"""Fields of `BagInfo` that are attributes of our files, by the same names."""

ROWS = 8192  # patches that are read at once from a file that is too large for memory


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
    slide_mpp: float | None = None  # microns per pixel at level 0
    fingerprint: str | None = None  # of the encoder's weights and transform
    settings: str | None = None  # TOML of all that shaped the bag, if `caprmil encode` made it

    def __post_init__(self) -> None:
        for name in ("mpp", "slide_mpp", "patch_px", "patch_level0", "step"):
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
        return grid_cells(self.coords, self.info)


def grid_cells(coords: NDArray[Any] | None, info: "BagInfo") -> NDArray[np.int64] | None:
    """Return column and row of each patch, from 0, or None where no grid is known."""
    if coords is None or info.step is None:
        return None
    return np.rint((coords - coords.min(axis=0)) / info.step).astype(np.int64)


def inspect(path: str | Path) -> BagInfo:
    """Describe a feature file. The features of HDF5 and `.npy` files are not read."""
    return formats.glance(as_path(path), _describe)


def read(path: str | Path) -> Bag:
    """Read a feature file whole, and check every value in it."""
    with formats.opened(as_path(path)) as found:
        return _load(found)


@contextmanager
def streaming(path: str | Path, *, rows: int = ROWS) -> Iterator["Stream"]:
    """Open a feature file to read it piece by piece, in memory that does not grow with it.

    HDF5 and `.npy` files are read so; the others are in memory as soon as they are open.
    """
    with formats.opened(as_path(path)) as found:
        yield Stream(found, _describe(found), rows)


class Stream:
    """The features of an open file, as many rows at a time. Every pass checks every value."""

    def __init__(self, found: Found, info: BagInfo, rows: int) -> None:
        self.info, self.rows, self._found = info, rows, found

    def __call__(self) -> Iterator[NDArray[np.floating[Any]]]:
        """Return the pieces in order, from the first patch on. The next is read ahead."""
        starts = range(0, self.info.n_patches, self.rows)
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self._read, 0)
            for start in starts:
                piece = ahead.result()
                if start + self.rows < self.info.n_patches:
                    ahead = reader.submit(self._read, start + self.rows)
                yield piece

    def _read(self, start: int) -> NDArray[np.floating[Any]]:
        features = self._found.features
        if isinstance(features, np.memmap):  # what was read of it would stay resident
            features = np.load(str(self._found.file), mmap_mode="r", allow_pickle=False)
        rows = slice(start, start + self.rows)
        piece = features[0, rows] if len(features.shape) == 3 else features[rows]
        return _as_floats(self._found, formats.array(piece), start)

    @cached_property
    def coords(self) -> NDArray[Any] | None:
        """Where the patches lie, as in a bag."""
        return _load_coords(self._found, self.info.n_patches)

    def grid(self) -> NDArray[np.int64] | None:
        """Return column and row of each patch, as in a bag."""
        return grid_cells(self.coords, self.info)


def from_arrays(features: ArrayLike, coords: ArrayLike | None = None, **said: Any) -> Bag:
    """Make a bag in memory, checked like a file. `said` are fields of `BagInfo`."""
    return _load(formats.in_memory(None, features, coords, said))


def write(
    path: str | Path,
    features: ArrayLike,
    coords: ArrayLike | None = None,
    *,
    dtype: Literal["float16", "float32"] = "float16",
    attributes: Mapping[str, str | int | float] | None = None,
    **said: Any,
) -> Path:
    """Write a bag in our own layout: whole or not at all, and never over another file.

    `coords` are level-0 pixels, `said` are fields of `BagInfo`. `attributes` are kept on the file
    for other readers.
    """
    path = as_path(path)
    bag = _load(formats.in_memory(path, features, coords, {}))
    n, width = bag.features.shape
    info = BagInfo(path=path, kind="caprmil", n_patches=n, width=width, dtype=dtype, **said)
    with writing(info, bag.coords, attributes=attributes) as put:
        put(bag.features)
    return path


@contextmanager
def writing(
    info: BagInfo,
    coords: NDArray[Any] | None,
    *,
    attributes: Mapping[str, str | int | float] | None = None,
    replace: bool = False,
) -> Iterator[Callable[[NDArray[Any]], None]]:
    """Write a bag piece by piece, for those that do not fit into memory.

    Yields a function that takes the next rows of features. The file appears when all are there.
    """
    path = as_path(info.path or "")
    if info.dtype not in ("float16", "float32") or info.scale_rule not in (
        "exact",
        "nominal",
        None,
    ):
        raise ValueError(f"{info.dtype=} or {info.scale_rule=} is not known.")
    if path.suffix.lower() not in formats.HDF5:
        raise BagError(f"{path} cannot be written as '{path.suffix}'. Name it .h5.")
    if path.exists() and not replace:
        raise BagError(f"{path} is there already. Remove it first, or write elsewhere.")
    ours = {"caprmil_schema": formats.SCHEMA, **{name: getattr(info, name) for name in ATTRIBUTES}}
    ours["slide_width"], ours["slide_height"] = info.slide_size or (None, None)
    if taken := {*ours, "feat_type"} & set(attributes or ()):
        raise ValueError(f"{sorted(taken)} cannot be extra attributes: the layout has them.")
    known = {name: v for name, v in {**ours, **(attributes or {})}.items() if v is not None}
    with atomic_write(path, replace=replace) as passing, h5py.File(passing, "x") as file:
        shape = (info.n_patches, info.width)
        store = file.create_dataset("features", shape, info.dtype)  # contiguous: read fastest
        if coords is not None:
            file.create_dataset("coords", data=_as_pixels(path, coords))
        file.attrs.update(known)
        filled = 0

        def put(features: NDArray[Any]) -> None:
            nonlocal filled
            store[filled : filled + len(features)] = _as_stored(path, features, info.dtype)
            filled += len(features)

        yield put
        if filled != info.n_patches:
            raise ValueError(f"{filled} rows were put into a bag of {info.n_patches}.")


def group_by_slide(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the bags among files by the name of their slide, only those of its best ending."""
    shelf: dict[str, list[Path]] = {}
    for file in sorted(files):
        if file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
            shelf.setdefault(slide_name(file.name), []).append(file)

    def rank(file: Path) -> int:
        return SUFFIXES.index(file.suffix.lower())

    return {
        name: [file for file in own if rank(file) == min(map(rank, own))]
        for name, own in shelf.items()
    }


def _as_stored(path: Path, features: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        stored = features.astype(dtype, copy=False)
    if _not_finite(stored).any():
        if not np.isfinite(features).all():
            raise BagError(f"{path}: some features are NaN or infinite. Look at the encoder.")
        raise BagError(
            f"{path}: values up to {np.abs(features).max():.4g} do not fit into float16. "
            'Pass dtype="float32", or --set dtype=float32.'
        )
    return stored


def _as_pixels(path: Path, coords: NDArray[Any]) -> NDArray[np.int64]:
    if (coords != np.rint(coords)).any():
        raise BagError(
            f"{path}: coordinates are whole level-0 pixels, but some here have fractions. "
            "Divide micrometres by the microns per pixel of level 0, and round."
        )
    return coords.astype(np.int64)


def _load(found: Found) -> Bag:
    """Read what was found, and check each value."""
    info = _describe(found)
    features = formats.array(found.features).reshape(info.n_patches, info.width)
    return Bag(
        features=_as_floats(found, features), coords=_load_coords(found, info.n_patches), info=info
    )


def _as_floats(found: Found, rows: NDArray[Any], start: int = 0) -> NDArray[np.floating[Any]]:
    """Check each value. Two bytes stay two bytes, to be cast at the last moment."""
    dtype = np.float16 if found.features.dtype.itemsize == 2 else np.float32
    with np.errstate(over="ignore"):
        features = np.require(rows, dtype, ["C", "O", "W"])
    bad = np.flatnonzero(_not_finite(features))
    if len(bad):
        raise BagError(
            f"{found}: {len(bad)} of {len(rows)} patches have NaN or infinite features, the "
            f"first in row {start + bad[0]}. Extract them again, in float32 if half precision "
            "overflows."
        )
    return features


def _load_coords(found: Found, n: int) -> NDArray[Any] | None:
    if found.coords is None:
        return None
    coords = formats.array(found.coords).reshape(n, 2)
    coords = coords.astype(np.float64 if coords.dtype.kind == "f" else np.int64)
    if not np.isfinite(coords).all():
        raise BagError(f"{found} has NaN or infinite coordinates. Extract it again.")
    return coords


def _not_finite(features: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell of each row whether it holds NaN or infinity.

    The exponent of these is all ones, so in float16 their bits are the largest integers: with a
    plus, read as signed; with a minus, as unsigned. NumPy's isfinite takes about thrice as long.
    """
    if features.dtype != np.float16:
        return ~np.isfinite(features).all(axis=1)
    plus = features.view(np.int16).max(axis=1) >= 0x7C00
    return plus | (features.view(np.uint16).max(axis=1) >= 0xFC00)


def _describe(found: Found) -> BagInfo:
    n, width = _check(found)
    said = formats.say(found)
    if found.coords is None:
        said["unit"] = None
    elif said.get("step") is None:
        found.coords = formats.array(found.coords)  # kept, since rows as chunks are slow to read
        said["step"] = formats.infer_step(found.coords.reshape(n, 2))
    return BagInfo(
        path=found.path, kind=found.kind, n_patches=n, width=width, dtype=found.dtype, **said
    )


def _check(found: Found) -> tuple[int, int]:
    """Check shapes and types, and return how many patches there are and how wide they are."""
    shape = tuple(found.features.shape)
    points = None if found.coords is None else tuple(found.coords.shape)
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if 0 in shape:
        raise BagError(f"{found} holds no patches. Leave the slide out, or look for tissue again.")
    if found.of_slide or len(shape) == 1 or (shape[:1] == (1,) and points and points[0] > 1):
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
