"""The layout of tissues in a synthetic section: the ground truth, in micrometres.

A field gives the amount of a tissue on a coarse grid, 0 to 255. A tissue is visible above
THRESHOLD. Fields do not depend on pixels, so they are the same at every scale of a section.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from caprmil.synthetic.textures import FLOATS, GLANDS, gland_radius_um

TRUTH_UM = 8.0
"""Micrometres per pixel of fields and kinds."""
KINDS = ("glass", "stroma", "fat", "lymphocytes", "gland", "tumour")
THRESHOLD = 128
Field = NDArray[np.uint8]


@dataclass(frozen=True)
class Anatomy:
    """Fields of the tissues, a list of glands, and the kind of tissue at each grid point."""

    fields: dict[str, Field]
    glands: NDArray[np.float64]  # rows of x, y in um, variant, quarter turns
    kinds: Field  # index into KINDS


def grid_um(shape: tuple[int, ...]) -> FLOATS:
    """Return y and x of every grid point in micrometres."""
    return np.float32(TRUTH_UM) * (np.indices(shape, dtype=np.float32) + np.float32(0.5))


def noise(rng: Generator, shape: tuple[int, int], um: float) -> FLOATS:
    """Return smooth noise with mean zero and features of about `um` micrometres."""
    rows, columns = (side * TRUTH_UM / um for side in shape)
    samples = rng.normal(size=(int(rows) + 4, int(columns) + 4)).astype(np.float32)
    box = (1, 1, 1 + columns, 1 + rows)
    return np.asarray(
        Image.fromarray(samples).resize(shape[::-1], Image.Resampling.BICUBIC, box=box)
    )


def field(amount: FLOATS) -> Field:
    """Return a field from amounts: 0 at the edge of a tissue, 0.5 where it is complete."""
    return np.clip(np.ceil(THRESHOLD + 255 * amount), 0, 255).astype(np.uint8)


def lay_out(shape: tuple[int, int], *, tumour: float, seed: int) -> Anatomy:
    """Return the anatomy of a section. Only the tumour depends on its share."""
    outline, filling, nests = (np.random.default_rng([seed, stream]) for stream in range(3))
    depth = _depth(outline, shape)
    inside = depth > 0
    fields = {"tissue": field(depth / 64)}
    free = inside
    for name, um, edge, low, high in (
        ("fat", 700, 0.5, 0.05, 0.3),
        ("lymphocytes", 260, 2.0, 0.02, 0.08),
    ):
        score = noise(filling, shape, um) + 0.25 * noise(filling, shape, um / 4)
        top = _top(score, free, filling.uniform(low, high) * inside.sum())
        fields[name] = field(np.where(free, top / edge, -1))
        free = free & (top < 0)
    glands = _glands(filling, depth, fields["fat"], fields["lymphocytes"])
    in_gland = _gland_mask(shape, glands)

    kinds = inside.astype(np.uint8)
    kinds[inside & (fields["fat"] > THRESHOLD)] = KINDS.index("fat")
    kinds[inside & (fields["lymphocytes"] > THRESHOLD)] = KINDS.index("lymphocytes")
    kinds[inside & in_gland] = KINDS.index("gland")
    fields["tumour"] = np.zeros(shape, dtype=np.uint8)
    if tumour:
        fields["tumour"] = _nests(nests, depth, inside & ~in_gland, tumour * inside.sum())
        kinds[fields["tumour"] > THRESHOLD] = KINDS.index("tumour")
    return Anatomy(fields, glands, kinds)


def _top(score: FLOATS, where: NDArray[np.bool_], count: float) -> FLOATS:
    """Return a score, shifted so that it is positive on `count` points of a region."""
    scores = np.sort(score[where])[::-1]
    return score - scores[min(round(count), len(scores) - 1)]


def _depth(rng: Generator, shape: tuple[int, int]) -> FLOATS:
    """Return the depth in tissue in um: parts with a wavy edge, tears and holes."""
    um = grid_um(shape)
    sides = np.array(shape) * TRUTH_UM
    long = int(sides[1] >= sides[0])
    parts = min(int(rng.integers(1, 4)), int(sides[long] / 400))
    depth = np.full(shape, -np.inf, dtype=np.float32)
    reach = 0.4 * min(sides[long] / parts, sides[1 - long])
    for part in range(parts):
        centre = sides * rng.uniform(0.45, 0.55, 2)
        centre[long] = sides[long] * (part + rng.uniform(0.46, 0.54)) / parts
        radii = sides * rng.uniform(0.32, 0.42, 2)
        radii[long] /= parts
        radius = np.hypot(*(um - centre[:, None, None]) / radii[:, None, None])
        depth = np.maximum(depth, (1 - radius) * min(radii))
    depth += reach * (
        0.18 * noise(rng, shape, 0.8 * reach) + 0.07 * noise(rng, shape, 0.25 * reach)
    )
    depth += 10 * noise(rng, shape, 50)

    wide = 26 * np.clip(noise(rng, shape, 600) - 0.55, 0, 1)
    tear = 300 * np.abs(noise(rng, shape, 500)) - wide
    hole = 90 * (1.9 - noise(rng, shape, 170))
    depth = np.minimum(depth, np.minimum(hole, np.where(wide > 0, tear, np.inf)))
    margin = np.minimum(um, sides[:, None, None] - um).min(axis=0) - 40
    return np.minimum(depth, margin).astype(np.float32)


def _glands(rng: Generator, depth: FLOATS, *avoid: Field) -> NDArray[np.float64]:
    """Return glands in lobules, inside the tissue and without overlap."""
    shape = depth.shape
    lobules = noise(rng, shape, 650) + 0.3 * noise(rng, shape, 200)
    lobules = _top(lobules, depth > 0, rng.uniform(0.15, 0.4) * (depth > 0).sum())
    sizes = np.clip(7.5 + 4 * noise(rng, shape, 900) + rng.normal(0, 2, shape), 0, GLANDS - 1)
    free = (lobules > 0) & (depth > 60) & np.logical_and.reduce([a < THRESHOLD - 40 for a in avoid])
    y, x = np.nonzero(free)
    order = rng.permutation(len(y))[: len(y) // 3]
    kept = np.empty((0, 3))
    for point in order:
        position = TRUTH_UM * (x[point] + 0.5), TRUTH_UM * (y[point] + 0.5)
        radius = float(gland_radius_um(sizes[y[point], x[point]]))
        apart = np.hypot(kept[:, 0] - position[0], kept[:, 1] - position[1])
        if (apart > 1.02 * (kept[:, 2] + radius)).all():
            kept = np.append(kept, [(*position, radius)], axis=0)
    variants = np.rint(
        (kept[:, 2] - gland_radius_um(0)) / (gland_radius_um(1) - gland_radius_um(0))
    )
    return np.column_stack([kept[:, :2], variants, rng.integers(0, 4, len(kept))])


def _gland_mask(shape: tuple[int, int], glands: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of glands."""
    in_gland = np.zeros(shape, dtype=bool)
    for x, y, variant, _ in glands:
        radius = float(gland_radius_um(variant))
        top, left = (max(0, int((at - radius) / TRUTH_UM)) for at in (y, x))
        window = np.s_[
            top : int((y + radius) / TRUTH_UM) + 2, left : int((x + radius) / TRUTH_UM) + 2
        ]
        rows, columns = np.indices(in_gland[window].shape) + 0.5
        apart = np.hypot((left + columns) * TRUTH_UM - x, (top + rows) * TRUTH_UM - y)
        in_gland[window] |= apart < radius
    return in_gland


def _nests(rng: Generator, depth: FLOATS, free: NDArray[np.bool_], count: float) -> Field:
    """Return a field of tumour in nests around one to three centres, on `count` points."""
    if count > 0.9 * free.sum():
        raise ValueError("There is not enough space for the tumour between the glands.")
    points = np.argwhere(free & (depth > min(50, depth[free].max() / 2)))
    starts = TRUTH_UM * (points[rng.integers(0, len(points), rng.integers(1, 4))] + 0.5)
    distance = np.hypot(*(grid_um(depth.shape)[:, None] - starts.T[:, :, None, None])).min(axis=0)
    reach = TRUTH_UM * np.sqrt(1.6 * count / np.pi / len(starts))
    score = 1.1 * noise(rng, depth.shape, 120) + 0.3 * noise(rng, depth.shape, 35)
    score = np.where(free, score - 2 * distance / reach, -np.inf).astype(np.float32)
    return field(_top(score, free, count) / 1.5)
