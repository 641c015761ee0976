"""Bags: the patch features of one slide, read from and written to feature files.

caprmil's own format (HDF5) is written. The formats of TRIDENT, CLAM and STAMP and plain arrays are
read as well, see `formats`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from caprmil.encoders.table import name_of_width
from caprmil.errors import BagError
from caprmil.features import formats
from caprmil.features.formats import FileContent
from caprmil.features.placed_slides import PlacedSlide, cells_side_by_side, own_cells
from caprmil.io.atomic import atomic_write
from caprmil.io.notebook import html_picture, show_html
from caprmil.io.output_stream import create_hdf5
from caprmil.io.paths import as_path, check_utf8
from caprmil.slides.names import BAG_SUFFIXES, slide_name
from caprmil.slides.scale import ScaleRule

SUFFIXES = BAG_SUFFIXES
"""Suffixes of feature files. If a slide has several, the first is used: `.pt` files seldom have
coordinates."""

ATTRIBUTES = (
    *("encoder", "fingerprint", "settings", "mpp", "scale_rule", "patch_px", "patch_level0"),
    *("step", "slide_mpp", "slide_path"),
)
"""Fields of `BagInfo` that are stored as attributes of the same name."""

ROWS = 8192  # patches per chunk of a stream


@dataclass(frozen=True, kw_only=True)
class BagInfo:
    """The metadata of a bag."""

    path: Path | None  # None: in memory
    kind: str  # caprmil, trident, clam, stamp, h5 (any other), npy, npz, pt or memory
    n_patches: int
    width: int  # E
    dtype: str  # as stored
    encoder: str | None = None
    mpp: float | None = None  # microns per pixel of the patches as encoded
    scale_rule: ScaleRule | None = None  # nominal: mpp is 10 / magnification; exact: measured
    patch_px: int | None = None  # side of a patch as encoded, in pixels
    patch_level0: float | None = None  # side of a patch in level-0 pixels
    step: float | None = None  # distance of neighbouring patches, in the unit of the coordinates
    unit: Literal["px", "um"] | None = None  # of the coordinates; px: level-0 pixels
    slide_size: tuple[int, int] | None = None  # width and height in level-0 pixels
    slide_mpp: float | None = None  # microns per pixel at level 0
    slide_path: str | None = None  # the slide that was encoded, if the bag stores it
    fingerprint: str | None = None  # of the encoder's weights and transform
    settings: str | None = None  # TOML of all settings, if `caprmil encode` made the bag
    slides: tuple[PlacedSlide, ...] = ()  # of a patient, or sources, side by side: `bag_files`
    sources: tuple["BagInfo", ...] = ()  # whose features were concatenated: `source_bags`
    widths: tuple[int, ...] = ()  # of the sources, if the patches of several are one bag

    @property
    def part_name(self) -> Literal["slide", "source"]:
        """What `slides` are: slides of a patient, or sources of a slide or of each of them."""
        return "source" if self.widths else "slide"

    @property
    def one_scale(self) -> bool:
        """Whether all of the picture has one scale: sources of other scales are enlarged in it."""
        return not self.widths or all(place.scale == 1 for place in self.slides)

    def __post_init__(self) -> None:
        for name in ("mpp", "slide_mpp", "patch_px", "patch_level0", "step"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} is not a positive number.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Bag:
    """The patches of a slide: row n of `features` and row n of `coords` are the same patch.

    A bag of a patient has the patches of several slides (`bag_files`), and each of several sources
    on grids of their own is like a slide.
    """

    features: NDArray[np.floating[Any]]  # (N, E), float16 or float32
    coords: NDArray[Any] | None  # (N, 2), x and y of the top left corner, in `info.unit`
    info: BagInfo
    slide_of: NDArray[np.int64] | None = None  # (N,), the number of the slide in `info.slides`

    def __repr__(self) -> str:
        patches, width = self.features.shape
        name = "" if self.info.path is None else f"{self.info.path.name!r}: "
        made = f", {_made(self.info)}" if self.info.encoder or self.info.mpp else ""
        return f"Bag({name}{patches:,} patches x {width} features{made})"

    def _repr_html_(self) -> str:
        """Show the bag in a notebook: encoder, scale, and where its patches are."""
        patches, width = self.features.shape
        facts = [
            ("patches", f"{patches:,}"),
            ("features", f"{width} per patch, {self.features.dtype}"),
            ("encoder", self.info.encoder or "not known"),
            ("scale", f"{self.info.mpp:g} µm per pixel" if self.info.mpp else "not known"),
            ("coordinates", "none" if self.coords is None else None),
            ("file", self.info.path and f"{self.info.path} ({self.info.kind})"),
        ]
        name = "in memory" if self.info.path is None else slide_name(self.info.path.name)
        cells = self.grid()
        if cells is None:
            return show_html(f"Bag {name}", facts)
        columns, rows = (cells.max(axis=0) + 1).tolist()
        shrink = -(-max(columns, rows) // 400)
        picture = np.full((-(-rows // shrink), -(-columns // shrink), 3), 235, dtype=np.uint8)
        picture[cells[:, 1] // shrink, cells[:, 0] // shrink] = (150, 60, 110)
        shown = html_picture(picture, "Where the patches are", width=300)
        return show_html(f"Bag {name}", facts, shown)

    def grid(self) -> NDArray[np.int64] | None:
        """Return column and row of each patch, from 0, or None if the grid is unknown.

        CLAM lays a separate grid on each contour, so two patches can share a cell.
        """
        return grid_cells(self.coords, self.info, self.slide_of)

    def select(self, rows: NDArray[np.bool_] | NDArray[np.integer[Any]]) -> "Bag":
        """Return a bag with some of its patches, at least one."""
        features = self.features[rows]
        if not len(features):
            raise BagError("No patch would be left of the slide. Keep at least one.")
        coords = None if self.coords is None else self.coords[rows]
        return Bag(
            features=features,
            coords=coords,
            info=replace(self.info, n_patches=len(features)),
            slide_of=None if self.slide_of is None else self.slide_of[rows],
        )


def _made(info: BagInfo) -> str:
    """Return encoder and scale in a few words."""
    scale = f"{info.mpp:g} µm per pixel" if info.mpp else ""
    return " at ".join(filter(None, (info.encoder, scale)))


def grid_cells(
    coords: NDArray[Any] | None, info: "BagInfo", slide_of: NDArray[np.int64] | None = None
) -> NDArray[np.int64] | None:
    """Return column and row of each patch, from 0, or None if the grid is unknown.

    The slides of a patient, `slide_of`, are beside each other.
    """
    if coords is not None and slide_of is not None:
        return cells_side_by_side(coords, slide_of, info.slides)
    return None if coords is None or info.step is None else own_cells(coords, info.step)


def inspect(path: str | Path) -> BagInfo:
    """Return the metadata of a feature file. Features in HDF5 and `.npy` files are not read."""
    return formats.read_header(as_path(path), _describe)


def read(path: str | Path) -> Bag:
    """Return the bag in a feature file, with every value checked."""
    with formats.open_file(as_path(path)) as content:
        return _load(content)


@contextmanager
def streaming(path: str | Path, *, rows: int = ROWS) -> Iterator["Stream"]:
    """Open a feature file as a stream of chunks, in bounded memory.

    HDF5 and `.npy` files are streamed. Other formats are read into memory when opened.
    """
    with formats.open_file(as_path(path)) as content:
        yield Stream(content, _describe(content), rows)


class Stream:
    """The features of an open file in chunks of rows. Every pass checks every value."""

    def __init__(self, content: FileContent, info: BagInfo, rows: int) -> None:
        self.info, self.rows, self._content = info, rows, content
        self.slide_of: NDArray[np.int64] | None = None  # of the bag of one slide

    def __call__(self) -> Iterator[NDArray[np.floating[Any]]]:
        """Yield the chunks in order. The next chunk is prefetched by a thread."""
        starts = range(0, self.info.n_patches, self.rows)
        with ThreadPoolExecutor(1) as reader:
            pending = reader.submit(self.read, 0)
            for start in starts:
                chunk = pending.result()
                if start + self.rows < self.info.n_patches:
                    pending = reader.submit(self.read, start + self.rows)
                yield chunk

    def read(self, start: int) -> NDArray[np.floating[Any]]:
        """Return the rows of the chunk from `start`."""
        return self._rows(slice(start, start + self.rows), start)

    def pick(self, rows: NDArray[np.int64]) -> NDArray[np.floating[Any]]:
        """Return rows in any order, none twice."""
        order = rows.argsort()  # HDF5 reads rows in their order only
        found = self._rows(rows[order], int(rows.min()))
        picked = np.empty_like(found)
        picked[order] = found
        return picked

    def _rows(self, rows: Any, start: int) -> NDArray[np.floating[Any]]:
        features = self._content.features
        if isinstance(features, np.memmap):  # pages of an open map would stay resident
            features = np.load(str(self._content.file), mmap_mode="r", allow_pickle=False)
        chunk = features[0, rows] if len(features.shape) == 3 else features[rows]
        return _as_floats(self._content, formats.to_array(chunk), start)

    @cached_property
    def coords(self) -> NDArray[Any] | None:
        """Coordinates of the patches, as in a bag."""
        return _load_coords(self._content, self.info.n_patches)

    def grid(self) -> NDArray[np.int64] | None:
        """Return column and row of each patch, as in a bag."""
        return grid_cells(self.coords, self.info, self.slide_of)


def from_arrays(features: ArrayLike, coords: ArrayLike | None = None, **metadata: Any) -> Bag:
    """Return a bag in memory, checked like a file. `metadata` are fields of `BagInfo`."""
    return _load(formats.from_arrays(None, features, coords, metadata))


def write(
    path: str | Path,
    features: ArrayLike,
    coords: ArrayLike | None = None,
    *,
    dtype: Literal["float16", "float32"] = "float16",
    attributes: Mapping[str, str | int | float] | None = None,
    **metadata: Any,
) -> Path:
    """Write a bag atomically in caprmil's format, and return its path. A file is never replaced.

    `coords` are level-0 pixels, `metadata` are fields of `BagInfo`. `attributes` are stored in the
    file for other programs.
    """
    path = as_path(path)
    bag = _load(formats.from_arrays(path, features, coords, {}))
    n, width = bag.features.shape
    info = BagInfo(path=path, kind="caprmil", n_patches=n, width=width, dtype=dtype, **metadata)
    with writing(info, bag.coords, attributes=attributes) as append:
        append(bag.features)
    return path


@contextmanager
def writing(
    info: BagInfo,
    coords: NDArray[Any] | None,
    *,
    attributes: Mapping[str, str | int | float] | None = None,
    replace: bool = False,
) -> Iterator[Callable[[NDArray[Any]], None]]:
    """Write a bag in chunks, in bounded memory.

    Yields a function that appends rows of features. The file appears when it is complete.
    """
    path = as_path(info.path or "")
    if info.dtype not in ("float16", "float32") or info.scale_rule not in (
        "exact",
        "nominal",
        None,
    ):
        raise ValueError(f"{info.dtype=} or {info.scale_rule=} is not supported.")
    if path.suffix.lower() not in formats.HDF5:
        raise BagError(f"{path} cannot be written as '{path.suffix}'. Use .h5.")
    if path.exists() and not replace:
        raise BagError(f"{path} already exists. Remove it, or choose another name.")
    stored = {
        "caprmil_schema": formats.SCHEMA,
        **{name: getattr(info, name) for name in ATTRIBUTES},
    }
    stored["slide_width"], stored["slide_height"] = info.slide_size or (None, None)
    if taken := {*stored, "feat_type"} & set(attributes or ()):
        raise ValueError(f"{sorted(taken)} cannot be extra attributes: the format defines them.")
    known = {name: v for name, v in {**stored, **(attributes or {})}.items() if v is not None}
    with (
        atomic_write(path, replace=replace) as temporary,
        create_hdf5(temporary) as (file, check_written),
    ):
        shape = (info.n_patches, info.width)
        dataset = file.create_dataset("features", shape, info.dtype)  # contiguous: fastest to read
        if coords is not None:
            file.create_dataset("coords", data=_as_pixels(path, coords))
        file.attrs.update(known)
        filled = 0

        def append(features: NDArray[Any]) -> None:
            nonlocal filled
            dataset[filled : filled + len(features)] = _as_stored(path, features, info.dtype)
            filled += len(features)
            check_written()

        yield append
        if filled != info.n_patches:
            raise ValueError(f"{filled} rows were appended to a bag of {info.n_patches}.")


def group_by_slide(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return feature files by slide name, for each slide those of its preferred suffix."""
    by_slide: dict[str, list[Path]] = {}
    for file in sorted(files):
        if file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
            check_utf8(file)
            by_slide.setdefault(slide_name(file.name), []).append(file)

    def rank(file: Path) -> int:
        return SUFFIXES.index(file.suffix.lower())

    return {
        name: [file for file in group if rank(file) == min(map(rank, group))]
        for name, group in by_slide.items()
    }


def _as_stored(path: Path, features: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        stored = features.astype(dtype, copy=False)
    if _not_finite(stored).any():
        if not np.isfinite(features).all():
            raise BagError(f"{path}: some features are NaN or infinite. Check the encoder.")
        raise BagError(
            f"{path}: values up to {np.abs(features).max():.4g} do not fit into float16. "
            'Pass dtype="float32", or --set dtype=float32.'
        )
    return stored


def _as_pixels(path: Path, coords: NDArray[Any]) -> NDArray[np.int64]:
    if (coords != np.rint(coords)).any():
        raise BagError(
            f"{path}: coordinates must be integer level-0 pixels, but some have fractions. "
            "Divide micrometres by the microns per pixel of level 0, and round."
        )
    return coords.astype(np.int64)


def _load(content: FileContent) -> Bag:
    """Return the bag of a file, with every value checked."""
    info = _describe(content)
    features = formats.to_array(content.features).reshape(info.n_patches, info.width)
    return Bag(
        features=_as_floats(content, features),
        coords=_load_coords(content, info.n_patches),
        info=info,
    )


def _as_floats(
    content: FileContent, rows: NDArray[Any], start: int = 0
) -> NDArray[np.floating[Any]]:
    """Return rows of features with every value checked. float16 is kept, to be cast late."""
    dtype = np.float16 if content.features.dtype.itemsize == 2 else np.float32
    with np.errstate(over="ignore"):
        features = np.require(rows, dtype, ["C", "O", "W"])
    bad = np.flatnonzero(_not_finite(features))
    if len(bad):
        raise BagError(
            f"{content}: {len(bad)} of {len(rows)} patches have NaN or infinite features, "
            f"first in row {start + bad[0]}. Extract them again, in float32 if half precision "
            "overflows."
        )
    return features


def _load_coords(content: FileContent, n: int) -> NDArray[Any] | None:
    if content.coords is None:
        return None
    coords = formats.to_array(content.coords).reshape(n, 2)
    coords = coords.astype(np.float64 if coords.dtype.kind == "f" else np.int64)
    if not np.isfinite(coords).all():
        raise BagError(f"{content} has NaN or infinite coordinates. Extract it again.")
    return coords


def _not_finite(features: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each row has NaN or infinity.

    Their exponent is all ones, so as float16 bits they are the largest integers: positive ones read
    as signed, negative ones as unsigned. NumPy's isfinite takes about three times as long.
    """
    if features.dtype != np.float16:
        return ~np.isfinite(features).all(axis=1)
    positive = features.view(np.int16).max(axis=1) >= 0x7C00
    return positive | (features.view(np.uint16).max(axis=1) >= 0xFC00)


def _describe(content: FileContent) -> BagInfo:
    n, width = _check(content)
    metadata = formats.metadata(content)
    if named := metadata.get("encoder"):
        metadata["encoder"] = name_of_width(named, width)
    if content.coords is None:
        metadata["unit"] = None
    elif metadata.get("step") is None:
        content.coords = formats.to_array(content.coords)  # kept: one chunk per row is slow to read
        metadata["step"] = formats.infer_step(content.coords.reshape(n, 2))
    return BagInfo(
        path=content.path,
        kind=content.kind,
        n_patches=n,
        width=width,
        dtype=content.dtype,
        **metadata,
    )


def _check(content: FileContent) -> tuple[int, int]:
    """Check shapes and types, and return the number of patches and their width."""
    shape = tuple(content.features.shape)
    points = None if content.coords is None else tuple(content.coords.shape)
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if 0 in shape:
        raise BagError(f"{content} has no patches. Exclude the slide, or detect its tissue again.")
    if content.of_slide or len(shape) == 1 or (shape[:1] == (1,) and points and points[0] > 1):
        raise BagError(
            f"{content} has one vector, not one per patch: it looks like slide-level features. "
            "Pass the patch features they were made from."
        )
    if len(shape) != 2:
        raise BagError(f"{content} has features of shape {shape}. Save them as (patches, width).")
    if content.features.dtype.kind != "f":
        raise BagError(
            f"{content} has features of type {content.dtype}. Save them as float16 or 32."
        )
    if points is not None and points not in ((shape[0], 2), (1, shape[0], 2)):
        raise BagError(
            f"{content} has {shape[0]} patches but coordinates of shape {points}, not "
            f"({shape[0]}, 2). They may be from different runs: extract them again."
        )
    if points is not None and content.coords.dtype.kind not in "iuf":
        raise BagError(
            f"{content} has coordinates of type {content.coords.dtype}. Save them as int64."
        )
    return shape[0], shape[1]
