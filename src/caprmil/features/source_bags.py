"""Source bags: the feature files of one slide from several sources, e.g. two encoders or scales.

If all sources have the same patches, the features of each patch are concatenated. Otherwise the
patches of all sources are one bag: features are padded with zeros to the widest source, and
followed by a column for each source, which is 1 for its patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError, count
from caprmil.features.bags import Bag, BagInfo, Stream

Join: TypeAlias = Literal["concatenation", "bag"]
"""concatenation: the features of each patch are concatenated; bag: all patches are one bag."""

Rows: TypeAlias = NDArray[np.int64] | slice


@dataclass(frozen=True)
class SourceBags:
    """The bag files of a slide, one of each source, in the order of the recipe."""

    sources: tuple[str, ...]
    paths: tuple[Path, ...]
    join: Join

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))

    def exists(self) -> bool:
        """Return whether all files exist."""
        return all(path.exists() for path in self.paths)


SlideFiles: TypeAlias = Path | SourceBags
"""The bag of one slide."""


def match_rows(coords: NDArray[Any], other: NDArray[Any]) -> Rows | None:
    """Return for each patch the row of the same place in another bag; None if places differ.

    Bags in another order are matched only if no place is there twice.
    """
    if np.array_equal(coords, other):
        return slice(None)
    if len(coords) != len(other):
        return None
    order, own = np.lexsort(coords.T), np.lexsort(other.T)
    places = coords[order]
    if not np.array_equal(places, other[own]) or (places[1:] == places[:-1]).all(axis=1).any():
        return None
    rows = np.empty(len(coords), dtype=np.int64)
    rows[order] = own
    return rows


def match_sources(
    names: Sequence[str], infos: Sequence[BagInfo], coords: Sequence[NDArray[Any] | None]
) -> list[Rows]:
    """Return for each source the rows of the patches of the first one.

    A BagError says why they cannot be matched.
    """
    first = coords[0]
    found: list[Rows] = []
    for name, info, own in zip(names, infos, coords, strict=True):
        if own is None or first is None:
            missing = name if own is None else names[0]
            raise BagError(f"{missing} has no coordinates")
        if info.unit != infos[0].unit:
            raise BagError(f"the coordinates of {names[0]} and {name} have different units")
        rows = match_rows(first, own)
        if rows is None:
            sizes = f"{names[0]} has {count(len(first), 'patch')}, {name} {len(own):,}"
            raise BagError(f"{names[0]} and {name} have patches at different places ({sizes})")
        found.append(rows)
    return found


def concatenate(files: SourceBags, parts: Sequence[Bag]) -> Bag:
    """Return a bag in which each patch has the features of all sources, in the first one's order"""
    infos = [part.info for part in parts]
    rows = _matched(files, infos, [part.coords for part in parts])
    features = [part.features[own] for part, own in zip(parts, rows, strict=True)]
    return Bag(
        features=np.concatenate(features, axis=1),
        coords=parts[0].coords,
        info=concatenate_infos(infos),
    )


def _matched(
    files: SourceBags, infos: Sequence[BagInfo], coords: Sequence[NDArray[Any] | None]
) -> list[Rows]:
    try:
        return match_sources(files.sources, infos, coords)
    except BagError as problem:
        raise BagError(
            f"The sources of a slide cannot be concatenated: {problem}. Encode both on one grid, "
            f'or train with sources.join = "bag". The files: {files}.'
        ) from None


def concatenate_infos(infos: Sequence[BagInfo]) -> BagInfo:
    """Return the metadata of concatenated features. Those of each source are in `sources`."""
    return replace(
        infos[0],
        width=sum(info.width for info in infos),
        sources=tuple(infos),
        **common_facts(infos),
    )


def common_facts(infos: Sequence[BagInfo]) -> dict[str, Any]:
    """Return the fields of a `BagInfo` that describe several sources together."""

    def same(name: str) -> Any:
        found = {getattr(info, name) for info in infos}
        return found.pop() if len(found) == 1 else None

    def first(name: str) -> Any:
        return next((v for info in infos if (v := getattr(info, name)) is not None), None)

    return {
        "path": None,
        "kind": "sources",
        "dtype": str(np.result_type(*(info.dtype for info in infos))),
        "encoder": join_names(info.encoder for info in infos),
        **{name: same(name) for name in ("mpp", "scale_rule", "patch_px")},
        **{name: first(name) for name in ("slide_size", "slide_mpp", "slide_path")},
        "fingerprint": None,
        "settings": None,
    }


def join_names(names: Any) -> str | None:
    """Return different names in one text; None if there are none."""
    return " + ".join(dict.fromkeys(name for name in names if name is not None)) or None


def bag_width(widths: Sequence[int]) -> int:
    """Return the width of a bag with the patches of sources of these widths."""
    return max(widths) + len(widths)


def widen(
    features: NDArray[np.floating[Any]], source: int, widths: Sequence[int]
) -> NDArray[np.floating[Any]]:
    """Return the features of patches of a source as they are in one bag with other sources."""
    wide = np.zeros((len(features), bag_width(widths)), dtype=features.dtype)
    wide[:, : features.shape[1]] = features
    wide[:, max(widths) + source] = 1
    return wide


def sums_by_source(
    features: NDArray[np.floating[Any]], widths: Sequence[int]
) -> NDArray[np.float64]:
    """Return for each source of one bag the sum of its patches; in its own column, their number."""
    wide = features.astype(np.float32)
    return (wide[:, max(widths) :].T @ wide).astype(np.float64)


def means_by_source(sums: NDArray[np.float64], widths: Sequence[int]) -> NDArray[np.float32]:
    """Return the mean feature of each source, one after the other, from `sums_by_source`."""
    numbers = sums[:, max(widths) :].diagonal()
    means = [own[:width] / n for own, width, n in zip(sums, widths, numbers, strict=True)]
    return np.concatenate(means).astype(np.float32)


def mean_patch(bag: Bag) -> NDArray[np.float32]:
    """Return the mean feature of a bag; if its patches are of several sources, that of each."""
    if bag.info.widths:
        return means_by_source(sums_by_source(bag.features, bag.info.widths), bag.info.widths)
    return np.asarray(bag.features.mean(axis=0, dtype=np.float32))


class ConcatenatedStream(Stream):
    """The concatenated features of open files in chunks of rows."""

    def __init__(self, files: SourceBags, parts: Sequence[Stream]) -> None:
        infos = [part.info for part in parts]
        self._matched = _matched(files, infos, [part.coords for part in parts])
        self.info, self.rows, self._parts = concatenate_infos(infos), parts[0].rows, parts
        self.slide_of = None

    def read(self, start: int) -> NDArray[np.floating[Any]]:
        """Return the rows of a chunk."""
        chunks = [
            part.read(start) if isinstance(rows, slice) else part.pick(rows[start:][: self.rows])
            for part, rows in zip(self._parts, self._matched, strict=True)
        ]
        return np.concatenate(chunks, axis=1)

    @cached_property
    def coords(self) -> NDArray[Any] | None:
        """Coordinates of the patches, as in the bag."""
        return self._parts[0].coords


class WidenedStream(Stream):
    """The features of one source in chunks of rows, as they are in one bag with other sources."""

    def __init__(self, part: Stream, source: int, widths: Sequence[int]) -> None:
        self.info, self.rows, self._part = part.info, part.rows, part
        self._source, self._widths, self.slide_of = source, widths, None

    def read(self, start: int) -> NDArray[np.floating[Any]]:
        """Return the rows of a chunk."""
        return widen(self._part.read(start), self._source, self._widths)

    @cached_property
    def coords(self) -> NDArray[Any] | None:
        """Coordinates of the patches, as in the bag."""
        return self._part.coords
