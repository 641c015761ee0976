"""A bag of any format in level-0 pixels and microns per pixel, as conversion needs it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan, prod
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError, SlideError
from caprmil.features import bags, formats
from caprmil.features.attributes import number, pair
from caprmil.features.bags import BagInfo
from caprmil.features.extra_attributes import extra_fields
from caprmil.features.stored_arrays import own_datasets
from caprmil.slides.slide import Slide

Number = TypeVar("Number", int, float)

BLOCK = 2**24
"""Values of features per chunk in memory."""

_REMEDIES = {
    "encoder": "does not state its encoder. Pass --encoder.",
    "patch_px": "does not state the side of the encoded patches in pixels. Pass --patch-px.",
    "patch_level0": "does not state the size of its patches, and they are not on a grid. If it is "
    "from CLAM, copy its folder 'patches' next to the folder of the features.",
    "slide_mpp": "does not state the scale of its slide. Pass --slides or --slide-mpp.",
    "mpp": "does not state the scale of its patches. Pass --slides or --slide-mpp.",
}


@dataclass(kw_only=True)
class Level0Bag:
    """A bag with lengths in level-0 pixels. Its features stay on disk."""

    name: str
    path: Path
    info: BagInfo
    coords: NDArray[np.int64] | None

    @property
    def dtype(self) -> str:
        """The stored precision, float16 or float32."""
        return "float16" if self.info.dtype == "float16" else "float32"

    @property
    def required_coords(self) -> NDArray[np.int64]:
        """The coordinates, or BagError if there are none."""
        if self.coords is None:
            raise BagError(f"{self.path} has no coordinates, which this format requires.")
        return self.coords

    def require(self, *names: str) -> tuple[Any, ...]:
        """Return fields of the metadata, or raise BagError with a remedy if one is unknown."""
        for name in names:
            if getattr(self.info, name) is None:
                raise BagError(f"{self.path} {_REMEDIES[name]}")
        return tuple(getattr(self.info, name) for name in names)

    def features(self, dtype: str, *, ends: bool = False) -> Iterator[NDArray[Any]]:
        """Yield the features in chunks of rows, or only the first and the last row."""
        n, rows = self.info.n_patches, max(1, BLOCK // self.info.width)
        parts = (
            [(0, 1), (n - 1, n)] if ends else [(start, start + rows) for start in range(0, n, rows)]
        )
        with formats.open_file(self.path) as content:
            stored = content.features
            for start, end in parts:
                chunk = stored[start:end] if stored.ndim == 2 else stored[0, start:end]
                yield _cast(self.path, np.asarray(chunk), dtype)


def _cast(path: Path, rows: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        stored = rows.astype(dtype, copy=False)
    if not np.isfinite(rows).all():
        raise BagError(f"{path} has NaN or infinite features. Extract them again.")
    if not np.isfinite(stored).all():
        raise BagError(
            f"{path} has features up to {np.abs(rows).max():.4g}, which do not fit into {dtype}. "
            "Choose another format."
        )
    return stored


def to_level0(
    name: str,
    path: Path,
    *,
    slide: Path | None = None,
    slide_mpp: float | None = None,
    patch_px: int | None = None,
    encoder: str | None = None,
) -> Level0Bag:
    """Return a bag in level-0 pixels, with its slide and the user's options for missing fields."""
    stored = bags.inspect(path)
    coords, extra = _read_extra(path)
    if coords is not None and stored.unit is None:
        raise BagError(
            f"{path} does not state the unit of its coordinates. Write them in level-0 pixels "
            "with caprmil.features.bags.write."
        )
    if stored.kind == "clam" and coords is not None:
        extra = _clam_grid(name, path, coords) or {"patch_level0": stored.step}
    info = _infer(replace(stored, unit=stored.unit and "px", **extra))
    px = _reconcile(path, "px as the side of a patch", info.patch_px, patch_px)
    mpp0 = _reconcile(path, "um/px as the scale of its slide", info.slide_mpp, slide_mpp)
    info = replace(info, patch_px=px, slide_mpp=mpp0, encoder=encoder or info.encoder)
    if slide is not None and info.slide_path is None:
        info = replace(info, slide_path=str(slide.absolute()))
    if slide is not None and None in (info.slide_mpp, info.slide_size):
        info = _with_slide(info, slide)
    bag = Level0Bag(name=name, path=path, info=info, coords=None)
    if coords is not None and stored.unit == "um":
        (mpp0,) = bag.require("slide_mpp")
        side = stored.step and stored.step / mpp0  # STAMP's patches are adjacent
        bag.info = replace(info, **{"patch_level0": side, "step": side, **extra})
        coords = coords / mpp0
    bag.coords = None if coords is None else _pixels(path, coords, info.slide_size)
    bag.info = _infer(bag.info)
    return bag


def _read_extra(path: Path) -> tuple[NDArray[Any] | None, dict[str, Any]]:
    """Return the coordinates in a file, and the fields in its attributes `caprmil_...`."""
    with formats.open_file(path) as content:
        formats.metadata(content)  # converts the pixels of early STAMP files to micrometres
        stored = content.coords
        coords = None if stored is None else formats.to_array(stored).reshape(-1, 2)
        return coords, extra_fields(content.attributes)


def _clam_grid(name: str, path: Path, coords: NDArray[Any]) -> dict[str, Any] | None:
    """Return the metadata of CLAM's coordinate file, if there is one for the same patches."""
    for folder in path.parents[:3]:
        found = folder / "patches" / f"{name}.h5"
        with suppress(Exception), h5py.File(found) as file:  # damaged files raise many types
            grid = own_datasets(found, file)["coords"]
            stored = {"custom_downsample": 1, **grid.attrs}
            lengths = ("patch_size", "downsample", "custom_downsample")
            side = prod(number(stored[name]) or nan for name in lengths)
            level0 = number(stored["downsample"]) == 1
            slide_size = pair(stored.get("level_dim")) if level0 else None
            if side > 0 and grid.shape == coords.shape and np.array_equal(grid, coords):
                known = {"slide_size": slide_size} if slide_size else {}
                return {"patch_level0": side, **known, **extra_fields(stored)}
    return None


def _reconcile(
    path: Path, what: str, stored: Number | None, option: Number | None
) -> Number | None:
    """Return the stored value or else the option. They must agree within 1 %."""
    if stored is not None and option is not None and abs(stored - option) > 0.01 * stored:
        raise BagError(f"{path} has {stored:g} {what}, not {option:g}. Omit the option.")
    return option if stored is None else stored


def _with_slide(info: BagInfo, path: Path) -> BagInfo:
    """Return metadata with size and scale from the file of the slide."""
    mpp = info.slide_mpp
    with Slide(path, mpp=mpp) as slide:
        with suppress(SlideError):  # an error is raised later if the scale is needed
            mpp = slide.mpp
        if info.slide_size not in (None, slide.size):
            raise BagError(
                f"{info.path} is from a slide of {info.slide_size} pixels, but {path} has "
                f"{slide.size}. It is another slide, or another scan of it."
            )
        return replace(info, slide_size=slide.size, slide_mpp=mpp)


def _pixels(path: Path, coords: NDArray[Any], size: tuple[int, int] | None) -> NDArray[np.int64]:
    if not np.isfinite(coords).all():
        raise BagError(f"{path} has NaN or infinite coordinates. Extract it again.")
    pixels = np.rint(coords).astype(np.int64)
    if size is not None and (pixels.max(axis=0) > size).any():
        x, y = pixels.max(axis=0).tolist()
        raise BagError(
            f"{path} has patches at x = {x} and y = {y}, but its slide has {size[0]} x {size[1]} "
            "pixels. It is another slide, or the um/px are wrong."
        )
    return pixels


def _infer(info: BagInfo) -> BagInfo:
    """Return metadata with the missing one of px * mpp = patch_level0 * slide_mpp, if exact."""
    px, mpp, side, mpp0 = info.patch_px, info.mpp, info.patch_level0, info.slide_mpp
    if px and side and mpp0 and mpp is None:
        return replace(info, mpp=side * mpp0 / px, scale_rule="exact")
    if info.scale_rule == "exact" and px and mpp:
        if side and mpp0 is None:
            return replace(info, slide_mpp=px * mpp / side)
        if mpp0 and side is None:
            return replace(info, patch_level0=px * mpp / mpp0)
    return info
