"""A bag in our terms: level-0 pixels and microns per pixel, whoever wrote it."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError, SlideError
from caprmil.features import bags, formats
from caprmil.features.bags import BagInfo
from caprmil.slides.slide import Slide

Number = TypeVar("Number", int, float)

BLOCK = 2**24
"""Features that are in memory at once."""

GRID = ("patch_level0", "step", "slide_mpp")
SCALE = ("mpp", "scale_rule")
ORIGIN = ("fingerprint", "settings")
"""Fields of `BagInfo` for which others have no word, noted as attributes `caprmil_...`."""

_REMEDIES = {
    "encoder": "does not name its encoder. Pass --encoder.",
    "patch_px": "does not say how many pixels wide the encoder saw its patches. Pass --patch-px.",
    "patch_level0": "does not say how wide its patches are, and they lie on no grid. If it is "
    "CLAM's, put its folder 'patches' beside the folder of the features.",
    "slide_mpp": "does not say how large a pixel of its slide is. Pass --slides or --slide-mpp.",
    "mpp": "does not say at which scale its patches were seen. Pass --slides or --slide-mpp.",
}


@dataclass(kw_only=True)
class Level0Bag:
    """A bag whose lengths are level-0 pixels. Its features stay on disk."""

    name: str
    path: Path
    info: BagInfo
    coords: NDArray[np.int64] | None

    @property
    def dtype(self) -> str:
        return "float16" if self.info.dtype == "float16" else "float32"

    @property
    def points(self) -> NDArray[np.int64]:
        if self.coords is None:
            raise BagError(f"{self.path} has no coordinates, and this layout cannot do without.")
        return self.coords

    def need(self, *names: str) -> tuple[Any, ...]:
        """Return fields of the description, or say how to make up for one that is not known."""
        for name in names:
            if getattr(self.info, name) is None:
                raise BagError(f"{self.path} {_REMEDIES[name]}")
        return tuple(getattr(self.info, name) for name in names)

    def features(self, dtype: str, *, ends: bool = False) -> Iterator[NDArray[Any]]:
        """Yield the features in order, some rows at a time, or only the first and the last row."""
        n, each = self.info.n_patches, max(1, BLOCK // self.info.width)
        parts = [(0, 1), (n - 1, n)] if ends else [(at, at + each) for at in range(0, n, each)]
        with formats.opened(self.path) as found:
            for start, end in parts:
                whole = found.features.ndim == 2
                rows = found.features[start:end] if whole else found.features[0, start:end]
                yield _fitting(self.path, np.asarray(rows), dtype)


def _fitting(path: Path, rows: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        stored = rows.astype(dtype, copy=False)
    if not np.isfinite(rows).all():
        raise BagError(f"{path} has NaN or infinite features. Extract them again.")
    if not np.isfinite(stored).all():
        raise BagError(
            f"{path} has features up to {np.abs(rows).max():.4g}, which do not fit into {dtype}. "
            "Choose another layout."
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
    """Put a bag in our terms, with the help of its slide and of what the user said."""
    said = bags.inspect(path)
    coords, noted = _look(path)
    if coords is not None and said.unit is None:
        raise BagError(
            f"{path} does not say in what unit its coordinates are. Write them in level-0 pixels, "
            "with caprmil.features.bags.write."
        )
    if said.kind == "clam" and coords is not None:
        noted = _clam_grid(name, path, coords) or {"patch_level0": said.step}
    info = _work_out(replace(said, unit=said.unit and "px", **noted))
    px = _agreed(path, "pixels as the side of a patch", info.patch_px, patch_px)
    mpp0 = _agreed(path, "um/px as the scale of its slide", info.slide_mpp, slide_mpp)
    info = replace(info, patch_px=px, slide_mpp=mpp0, encoder=encoder or info.encoder)
    if slide is not None and None in (info.slide_mpp, info.slide_size):
        info = _with_slide(info, slide)
    bag = Level0Bag(name=name, path=path, info=info, coords=None)
    if coords is not None and said.unit == "um":
        (mpp0,) = bag.need("slide_mpp")
        side = said.step and said.step / mpp0  # STAMP's patches touch
        bag.info = replace(info, **{"patch_level0": side, "step": side, **noted})
        coords = coords / mpp0
    bag.coords = None if coords is None else _pixels(path, coords, info.slide_size)
    bag.info = _work_out(bag.info)
    return bag


def _look(path: Path) -> tuple[NDArray[Any] | None, dict[str, Any]]:
    """Return the coordinates in a file, and what we noted there for ourselves."""
    with formats.opened(path) as found:
        formats.say(found)  # turns the pixels of historic STAMP files into micrometres
        coords = None if found.coords is None else formats.array(found.coords).reshape(-1, 2)
        return coords, _noted(found.attributes)


def _noted(attributes: Mapping[str, Any]) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    for name in (*GRID, *SCALE, *ORIGIN, "slide_size"):
        if (note := attributes.get(f"caprmil_{name}")) is not None:
            note = note.tolist() if hasattr(note, "tolist") else note
            notes[name] = tuple(note) if isinstance(note, list) else note
    return notes


def _clam_grid(name: str, path: Path, coords: NDArray[Any]) -> dict[str, Any] | None:
    """Return what CLAM's file of coordinates says, if one of the same patches is near."""
    for folder in path.parents[:3]:
        with suppress(OSError, KeyError), h5py.File(folder / "patches" / f"{name}.h5") as file:
            said = dict(file["coords"].attrs)
            shrunk = float(np.ravel(said["downsample"])[0])
            side = float(said["patch_size"]) * shrunk * float(said.get("custom_downsample", 1))
            top = shrunk == 1 and "level_dim" in said
            size = {"slide_size": tuple(said["level_dim"].tolist())} if top else {}
            if np.array_equal(file["coords"], coords):
                return {"patch_level0": side, **size, **_noted(said)}
    return None


def _agreed(path: Path, what: str, said: Number | None, told: Number | None) -> Number | None:
    if said is not None and told is not None and abs(said - told) > 0.01 * said:
        raise BagError(f"{path} says {said:g} {what}, not {told:g}. Leave the option out.")
    return told if said is None else said


def _with_slide(info: BagInfo, path: Path) -> BagInfo:
    """Look up size and scale in the slide's own file."""
    mpp = info.slide_mpp
    with Slide(path, mpp=mpp) as slide:
        with suppress(SlideError):  # a scale is missed only where it is needed
            mpp = slide.mpp
        if info.slide_size not in (None, slide.size):
            raise BagError(
                f"{info.path} is of a slide of {info.slide_size} pixels, but {path} has "
                f"{slide.size}. It is another slide, or another scan of it."
            )
        return replace(info, slide_size=slide.size, slide_mpp=mpp)


def _pixels(path: Path, coords: NDArray[Any], size: tuple[int, int] | None) -> NDArray[np.int64]:
    if not np.isfinite(coords).all():
        raise BagError(f"{path} has NaN or infinite coordinates. Extract it again.")
    whole = np.rint(coords).astype(np.int64)
    if size is not None and (whole.max(axis=0) > size).any():
        x, y = whole.max(axis=0).tolist()
        raise BagError(
            f"{path} has a patch at x = {x} and one at y = {y}, but its slide has {size[0]} x "
            f"{size[1]} pixels. Either it is another slide, or the um/px are wrong."
        )
    return whole


def _work_out(info: BagInfo) -> BagInfo:
    """Fill in what follows: px * mpp = patch_level0 * slide_mpp, if the scale is exact."""
    px, mpp, side, mpp0 = info.patch_px, info.mpp, info.patch_level0, info.slide_mpp
    if px and side and mpp0 and mpp is None:
        return replace(info, mpp=side * mpp0 / px, scale_rule="exact")
    if info.scale_rule == "exact" and px and mpp:
        if side and mpp0 is None:
            return replace(info, slide_mpp=px * mpp / side)
        if mpp0 and side is None:
            return replace(info, patch_level0=px * mpp / mpp0)
    return info
