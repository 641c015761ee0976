"""Annotated regions: QuPath's GeoJSON to masks, and masks to GeoJSON.

Coordinates in files are level-0 pixels, x then y, from the top left corner of the slide.
"""

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, cast

import contourpy
import numpy as np
from numpy.typing import NDArray

from caprmil.errors import SlideError, suggest
from caprmil.io.paths import as_path

Ring: TypeAlias = NDArray[np.float64]  # closed: corners (x, y), the last equals the first
Polygon: TypeAlias = tuple[Ring, ...]  # the outline, then the holes
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class Regions:
    """Polygons of a slide in level-0 pixels, each with its class name ('' if it has none)."""

    polygons: tuple[Polygon, ...]
    classes: tuple[str, ...]
    ignored: int = 0  # number of points, lines and empty geometries in the file

    def contains(self, points: NDArray[np.floating]) -> Mask:
        """Return whether each point (x, y) lies inside of a polygon and outside of its holes."""
        inside = np.zeros(len(points), dtype=bool)
        for polygon in self.polygons:
            inside |= _encloses(polygon, points)
        return inside

    def to_mask(self, shape: tuple[int, int], scale: tuple[float, float]) -> Mask:
        """Return a mask of all polygons; scale is mask pixels per level-0 pixel, in x and y.

        A pixel is inside if its centre is. Polygons may overlap, and may extend beyond the mask.
        """
        mask = np.zeros(shape, dtype=bool)
        for polygon in self.polygons:
            _fill(mask, [ring * scale for ring in polygon])
        return mask


def read_regions(
    path: str | os.PathLike[str], *, classes: Collection[str] | None = None
) -> Regions:
    """Return the polygons of a GeoJSON file: all of them, or those of some classes."""
    path = as_path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise SlideError(f"There is no region file {path}.") from None
    except OSError as problem:
        raise SlideError(f"{path} cannot be read: {problem.strerror}.") from None
    except (ValueError, RecursionError) as problem:
        raise SlideError(f"{path.name} is not a GeoJSON file: {problem}.") from None

    found: list[tuple[str, Polygon]] = []
    ignored = 0
    try:
        for name, geometry in _geometries(content):
            polygons = list(_polygons(geometry))
            found += [(name, polygon) for polygon in polygons]
            ignored += not polygons
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError):
        raise SlideError(
            f"{path.name} is not valid GeoJSON: features need a geometry, and polygons need rings "
            "of at least three corners. Export it again, e.g. from QuPath."
        ) from None
    if not found:
        raise SlideError(
            f"{path.name} has no polygon, but {ignored} other geometries. Draw one and export it."
        )
    known = {name for name, _ in found}
    if classes is not None:
        found = [(name, polygon) for name, polygon in found if name in classes]
    if not found:
        wanted = ", ".join(sorted(classes or ()))
        raise SlideError(
            f"{path.name} has no polygon of class '{wanted}'."
            + suggest(wanted, {name or "(no class)" for name in known})
        )
    return Regions(
        polygons=tuple(polygon for _, polygon in found),
        classes=tuple(name for name, _ in found),
        ignored=ignored,
    )


def outlines(mask: Mask) -> list[Polygon]:
    """Return the outline and the holes of each component of a mask, in mask pixels.

    Outlines run half way between pixel centres: `to_mask` returns the same mask.
    """
    padded = np.pad(mask, 1).astype(np.float32)
    generator = contourpy.contour_generator(
        z=padded, fill_type=contourpy.FillType.OuterOffset, name="serial"
    )
    # contourpy's types cover all fill types; OuterOffset returns corners and the ends of rings.
    points, offsets = cast(tuple[list[Ring], list[NDArray[Any]]], generator.filled(0.5, 2))
    return [
        tuple(
            _drop_collinear(corners[first:last] - 0.5)  # -1 for padding, +0.5 for the pixel centre
            for first, last in pairwise(ends)
        )
        for corners, ends in zip(points, offsets, strict=True)
    ]


def as_geojson(
    mask: Mask, scale_to_level0: tuple[float, float], *, name: str = "Tissue"
) -> dict[str, Any]:
    """Return a mask as QuPath annotations; scale is level-0 pixels per mask pixel, in x and y.

    There is no "crs" entry: QuPath reads coordinates as pixels, other programs as degrees.
    """
    return {
        "type": "FeatureCollection",
        "features": [
            {
                "type": "Feature",
                "geometry": {
                    "type": "Polygon",
                    "coordinates": [(ring * scale_to_level0).round(2).tolist() for ring in polygon],
                },
                "properties": {
                    "objectType": "annotation",
                    "classification": {"name": name, "color": [0, 160, 80]},
                },
            }
            for polygon in outlines(mask)
        ],
    }


def _geometries(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield class and geometry of a list or collection of features, a feature, or a geometry."""
    if isinstance(content, list):
        for item in content:
            yield from _geometries(item)
    elif content["type"] == "FeatureCollection":
        yield from _geometries(content["features"])
    elif content["type"] == "Feature":
        yield _class(content.get("properties") or {}), content["geometry"]
    else:
        yield "", content


def _class(properties: dict[str, Any]) -> str:
    """Return the class name, in any of the forms that versions of QuPath write."""
    named = properties.get("classification") or ""
    if isinstance(named, dict):
        named = named.get("name") or ": ".join(named.get("names") or [])
    return str(named)


def _polygons(geometry: Any) -> Iterator[Polygon]:
    """Yield the polygons of a geometry. Points and lines have none."""
    kind = geometry["type"] if geometry else None
    if kind == "GeometryCollection":
        for part in geometry["geometries"]:
            yield from _polygons(part)
    elif kind in ("Polygon", "MultiPolygon"):
        several = geometry["coordinates"] if kind == "MultiPolygon" else [geometry["coordinates"]]
        yield from (tuple(map(_ring, rings)) for rings in several if rings)


def _ring(corners: Any) -> Ring:
    ring = np.array([corner[:2] for corner in corners], dtype=np.float64)
    if ring.ndim != 2 or ring.shape[1] != 2 or not np.isfinite(ring).all():
        raise ValueError(f"{ring.shape=}")
    if (ring[0] != ring[-1]).any():
        ring = np.concatenate([ring, ring[:1]])
    if len(ring) < 4:
        raise ValueError(f"{len(ring)=}")
    return ring


def _drop_collinear(ring: Ring) -> Ring:
    """Return a ring without corners that lie on a straight line."""
    ring = ring[:-1].astype(np.float64)
    into, out = ring - np.roll(ring, 1, axis=0), np.roll(ring, -1, axis=0) - ring
    turns = into[:, 0] * out[:, 1] != into[:, 1] * out[:, 0]
    ring = ring[turns]
    return np.concatenate([ring, ring[:1]])


def _encloses(polygon: Polygon, points: NDArray[np.floating]) -> Mask:
    """Return whether a ray from each point to the right crosses an odd number of edges."""
    inside = np.zeros(len(points), dtype=bool)
    x, y = points[:, 0], points[:, 1]
    for ring in polygon:
        for (x0, y0), (x1, y1) in pairwise(ring):
            if y0 == y1:
                continue
            beside = (y0 > y) != (y1 > y)
            inside ^= beside & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
    return inside


def _fill(mask: Mask, rings: list[Ring]) -> None:
    """Set the pixels whose centre lies inside an odd number of rings."""
    corners = np.concatenate(rings)
    left, top = np.floor(corners.min(axis=0)).clip(0, mask.shape[::-1]).astype(int)
    right, bottom = np.ceil(corners.max(axis=0)).clip(0, mask.shape[::-1]).astype(int)
    window = mask[top:bottom, left:right]
    height, width = window.shape
    flips = np.zeros((height, width + 1), dtype=np.int32)
    for ring in rings:
        x, y = (ring - [left, top]).T
        (x0, x1), (y0, y1) = (x[:-1], x[1:]), (y[:-1], y[1:])
        # Rows whose centre line is crossed by each edge: [first, last).
        first = np.ceil(np.minimum(y0, y1) - 0.5).clip(0, height).astype(int)
        last = np.ceil(np.maximum(y0, y1) - 0.5).clip(0, height).astype(int)
        count = last - first
        edge = np.repeat(np.arange(len(count)), count)
        row = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count) + first[edge]
        slope = (x1 - x0)[edge] / (y1 - y0)[edge]
        crossing = x0[edge] + (row + 0.5 - y0[edge]) * slope
        np.add.at(flips, (row, np.ceil(crossing - 0.5).clip(0, width).astype(int)), 1)
    window |= flips.cumsum(axis=1)[:, :-1] % 2 == 1
