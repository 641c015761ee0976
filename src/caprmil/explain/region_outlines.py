"""Outlines of regions: the union of patches as polygons with holes."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from caprmil.explain.patch_boxes import PatchBoxes
from caprmil.slides.regions import Mask, Polygon, Ring

TOLERANCE = 0.01  # of a patch's side: edges that are nearer than this are one

# Steps along the edges of a cell, in this order: right, down, left, up. The cell is on the right.
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))


def outline(boxes: PatchBoxes, rows: NDArray[np.int64]) -> list[Polygon]:
    """Return the union of patches: one polygon for each part, its outline first, then its holes.

    Parts touch each other in corners at most. No ring meets itself. In the numbers of the
    coordinates, outlines run counterclockwise and holes clockwise, as GeoJSON (RFC 7946) wants.
    """
    corners = boxes.corners[rows]
    columns, left, right = _edges(corners[:, 0], boxes.side)
    lines, top, bottom = _edges(corners[:, 1], boxes.side)
    mask = np.zeros((len(lines) - 1, len(columns) - 1), dtype=np.bool_)
    for x0, x1, y0, y1 in zip(left, right, top, bottom, strict=True):
        mask[y0:y1, x0:x1] = True
    parts, n = ndimage.label(mask)  # connected by edges: a part that meets another in a corner ends
    return [
        tuple(np.stack([columns[x], lines[y]], axis=1) for x, y in map(np.transpose, rings))
        for rings in (_rings(parts == part) for part in range(1, n + 1))
    ]


def area(polygons: Sequence[Polygon]) -> float:
    """Return the area of polygons without their holes, in squares of the unit of coordinates."""
    return sum(signed_area(ring) for polygon in polygons for ring in polygon)


def area_mm2(polygons: Sequence[Polygon], mpp: float) -> float:
    """Return the area of polygons in level-0 pixels in square millimetres."""
    return area(polygons) * (mpp / 1000) ** 2


def signed_area(ring: Ring) -> float:
    """Return the area in a closed ring, negative if it runs clockwise."""
    x, y = (ring - ring[0]).T
    return float((x[:-1] * y[1:] - x[1:] * y[:-1]).sum() / 2)


def _edges(
    starts: NDArray[np.float64], side: float
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return all edges along an axis in order, and which of them each patch starts and ends at."""
    ends = np.concatenate([starts, starts + side])
    order = np.unique(ends)
    groups = np.concatenate([[True], np.diff(order) > TOLERANCE * side]).cumsum() - 1
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    at = groups[np.searchsorted(order, ends)]
    return order[first], at[: len(starts)], at[len(starts) :]


def _rings(mask: Mask) -> list[NDArray[np.int64]]:
    """Return the closed rings around a part that is connected by edges, the outline first.

    Edges have the part on their right (in a picture, whose y runs down). Where two cells meet in a
    corner only, the ring turns to the other cell: so it separates the part's hole from what is
    outside, and meets no corner twice.
    """
    padded = np.pad(mask, 1)
    middle = padded[1:-1, 1:-1]
    outside = (padded[:-2, 1:-1], padded[1:-1, 2:], padded[2:, 1:-1], padded[1:-1, :-2])
    shifts = ((0, 0), (1, 0), (1, 1), (0, 1))  # from a cell to where its edges start
    leaving: dict[tuple[int, int], list[int]] = {}
    for direction, (beyond, (right, down)) in enumerate(zip(outside, shifts, strict=True)):
        for y, x in np.argwhere(middle & ~beyond).tolist():
            leaving.setdefault((x + right, y + down), []).append(direction)
    rings = []
    while leaving:
        start = min(leaving)
        ring, at, direction = [start], start, leaving[start][0]
        turns = [direction]
        while True:
            _leave(leaving, at, direction)
            at = (at[0] + STEPS[direction][0], at[1] + STEPS[direction][1])
            ring.append(at)
            if at == start:
                break
            choices = leaving[at]
            other = (direction - 1) % 4
            direction = other if len(choices) > 1 and other in choices else choices[0]
            turns.append(direction)
        rings.append(_corners(ring, turns))
    return sorted(rings, key=lambda ring: -signed_area(ring.astype(np.float64)))


def _leave(leaving: dict[tuple[int, int], list[int]], at: tuple[int, int], direction: int) -> None:
    leaving[at].remove(direction)
    if not leaving[at]:
        del leaving[at]


def _corners(ring: list[tuple[int, int]], directions: list[int]) -> NDArray[np.int64]:
    """Return a closed ring without the points on its straight lines."""
    turns = [a != b for a, b in pairwise([directions[-1], *directions])]
    found = [point for point, turn in zip(ring[:-1], turns, strict=True) if turn]
    return np.array([*found, found[0]])
