"""Where the tissues of a generated section lie, in micrometres: the truth, before any pixel.

A field says on a coarse grid how much of a tissue is there, from 0 to 255; above SHOWS it is more
there than not. Fields know nothing of pixels, so every scale of a section has the same ones.
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
SHOWS = 128
Field = NDArray[np.uint8]


@dataclass(frozen=True)
class Anatomy:
    """Fields of the tissues, the glands one by one, and the kind of tissue that comes of them."""

    fields: dict[str, Field]
    glands: NDArray[np.float64]  # rows of x, y in um, variant, quarter turns
    kinds: Field  # an index of KINDS


def places(shape: tuple[int, ...]) -> FLOATS:
    """Return y and x in um of every point of a grid."""
    return np.float32(TRUTH_UM) * (np.indices(shape, dtype=np.float32) + np.float32(0.5))


def noise(rng: Generator, shape: tuple[int, int], um: float) -> FLOATS:
    """Return smooth noise about zero with bumps of about that size."""
    rows, columns = (side * TRUTH_UM / um for side in shape)
    dots = rng.normal(size=(int(rows) + 4, int(columns) + 4)).astype(np.float32)
    box = (1, 1, 1 + columns, 1 + rows)
    return np.asarray(Image.fromarray(dots).resize(shape[::-1], Image.Resampling.BICUBIC, box=box))


def field(amount: FLOATS) -> Field:
    """Turn amounts, zero where a tissue begins and half where it is full, into a field."""
    return np.clip(np.ceil(SHOWS + 255 * amount), 0, 255).astype(np.uint8)


def lay_out(shape: tuple[int, int], *, tumour: float, seed: int) -> Anatomy:
    """Lay out a section. All but the tumour is the same whatever its share is."""
    outline, filling, nests = (np.random.default_rng([seed, stream]) for stream in range(3))
    depth = _depth(outline, shape)
    inside = depth > 0
    fields = {"tissue": field(depth / 64)}
    bare = inside
    for name, um, edge, low, high in (
        ("fat", 700, 0.5, 0.05, 0.3),
        ("lymphocytes", 260, 2.0, 0.02, 0.08),
    ):
        score = noise(filling, shape, um) + 0.25 * noise(filling, shape, um / 4)
        most = _most(score, bare, filling.uniform(low, high) * inside.sum())
        fields[name] = field(np.where(bare, most / edge, -1))
        bare = bare & (most < 0)
    glands = _glands(filling, depth, fields["fat"], fields["lymphocytes"])
    ringed = _rings(shape, glands)

    kinds = inside.astype(np.uint8)
    kinds[inside & (fields["fat"] > SHOWS)] = KINDS.index("fat")
    kinds[inside & (fields["lymphocytes"] > SHOWS)] = KINDS.index("lymphocytes")
    kinds[inside & ringed] = KINDS.index("gland")
    fields["tumour"] = np.zeros(shape, dtype=np.uint8)
    if tumour:
        fields["tumour"] = _nests(nests, depth, inside & ~ringed, tumour * inside.sum())
        kinds[fields["tumour"] > SHOWS] = KINDS.index("tumour")
    return Anatomy(fields, glands, kinds)


def _most(score: FLOATS, where: NDArray[np.bool_], count: float) -> FLOATS:
    """Shift a score so that it is above zero on so many points of a region."""
    scores = np.sort(score[where])[::-1]
    return score - scores[min(round(count), len(scores) - 1)]


def _depth(rng: Generator, shape: tuple[int, int]) -> FLOATS:
    """Return how deep in the tissue a point lies, in um: pieces with a wavy edge, tears, holes."""
    um = places(shape)
    sides = np.array(shape) * TRUTH_UM
    long = int(sides[1] >= sides[0])
    pieces = min(int(rng.integers(1, 4)), int(sides[long] / 400))
    depth = np.full(shape, -np.inf, dtype=np.float32)
    reach = 0.4 * min(sides[long] / pieces, sides[1 - long])
    for piece in range(pieces):
        middle = sides * rng.uniform(0.45, 0.55, 2)
        middle[long] = sides[long] * (piece + rng.uniform(0.46, 0.54)) / pieces
        radii = sides * rng.uniform(0.32, 0.42, 2)
        radii[long] /= pieces
        from_middle = np.hypot(*(um - middle[:, None, None]) / radii[:, None, None])
        depth = np.maximum(depth, (1 - from_middle) * min(radii))
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
    """Set down glands in lobules, deep enough in the tissue and none upon another."""
    shape = depth.shape
    lobules = noise(rng, shape, 650) + 0.3 * noise(rng, shape, 200)
    lobules = _most(lobules, depth > 0, rng.uniform(0.15, 0.4) * (depth > 0).sum())
    sizes = np.clip(7.5 + 4 * noise(rng, shape, 900) + rng.normal(0, 2, shape), 0, GLANDS - 1)
    free = (lobules > 0) & (depth > 60) & np.logical_and.reduce([a < SHOWS - 40 for a in avoid])
    y, x = np.nonzero(free)
    order = rng.permutation(len(y))[: len(y) // 3]
    kept = np.empty((0, 3))
    for point in order:
        here = TRUTH_UM * (x[point] + 0.5), TRUTH_UM * (y[point] + 0.5)
        radius = float(gland_radius_um(sizes[y[point], x[point]]))
        apart = np.hypot(kept[:, 0] - here[0], kept[:, 1] - here[1])
        if (apart > 1.02 * (kept[:, 2] + radius)).all():
            kept = np.append(kept, [(*here, radius)], axis=0)
    variants = np.rint(
        (kept[:, 2] - gland_radius_um(0)) / (gland_radius_um(1) - gland_radius_um(0))
    )
    return np.column_stack([kept[:, :2], variants, rng.integers(0, 4, len(kept))])


def _rings(shape: tuple[int, int], glands: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where glands are."""
    ringed = np.zeros(shape, dtype=bool)
    for x, y, variant, _ in glands:
        radius = float(gland_radius_um(variant))
        top, left = (max(0, int((at - radius) / TRUTH_UM)) for at in (y, x))
        window = np.s_[
            top : int((y + radius) / TRUTH_UM) + 2, left : int((x + radius) / TRUTH_UM) + 2
        ]
        rows, columns = np.indices(ringed[window].shape) + 0.5
        apart = np.hypot((left + columns) * TRUTH_UM - x, (top + rows) * TRUTH_UM - y)
        ringed[window] |= apart < radius
    return ringed


def _nests(rng: Generator, depth: FLOATS, free: NDArray[np.bool_], count: float) -> Field:
    """Let tumour grow in nests about one to three places until it covers so many points."""
    if count > 0.9 * free.sum():
        raise ValueError("There is no room for so much tumour between the glands.")
    points = np.argwhere(free & (depth > min(50, depth[free].max() / 2)))
    starts = TRUTH_UM * (points[rng.integers(0, len(points), rng.integers(1, 4))] + 0.5)
    far = np.hypot(*(places(depth.shape)[:, None] - starts.T[:, :, None, None])).min(axis=0)
    reach = TRUTH_UM * np.sqrt(1.6 * count / np.pi / len(starts))
    score = 1.1 * noise(rng, depth.shape, 120) + 0.3 * noise(rng, depth.shape, 35)
    score = np.where(free, score - 2 * far / reach, -np.inf).astype(np.float32)
    return field(_most(score, free, count) / 1.5)
