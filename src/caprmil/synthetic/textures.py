"""Periodic textures of tissue, drawn once per scale, from which sections are rendered.

A texture gives the amount of two stains at every pixel, haematoxylin (nuclei) and eosin (the
rest), in 255ths of an optical density of one. Cells are placed in micrometres with fixed seeds, so
a texture shows the same cells at every scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

PERIOD_UM = 512.0
FLOATS = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Texture:
    """Stains of every pixel, and the rank of its cell: visible where the field is above it."""

    stains: NDArray[np.uint16]  # haematoxylin in the high byte, eosin in the low one
    rank: NDArray[np.uint8]


@dataclass(frozen=True)
class Textures:
    """All textures at one scale."""

    stroma: Texture
    fat: Texture
    lymphocytes: Texture
    tumour: Texture
    glands: tuple[Texture, ...]  # one complete gland each


@lru_cache(maxsize=4)
def textures(mpp: float) -> Textures:
    """Return the textures of a scale (cached)."""
    if mpp > 1:  # too coarse to draw cells: downsample finer textures
        fine = textures(1.0)
        return Textures(
            stroma=_shrunk(fine.stroma, mpp),
            fat=_shrunk(fine.fat, mpp),
            lymphocytes=_shrunk(fine.lymphocytes, mpp),
            tumour=_shrunk(fine.tumour, mpp),
            glands=tuple(_shrunk(gland, mpp) for gland in fine.glands),
        )
    n = round(PERIOD_UM / mpp)
    return Textures(
        stroma=_stroma(n),
        fat=_fat(n),
        lymphocytes=_lymphocytes(n),
        tumour=_tumour(n),
        glands=tuple(_gland(variant, mpp) for variant in range(GLANDS)),
    )


def _shrunk(texture: Texture, times: float) -> Texture:
    size = [round(len(texture.rank) / times)] * 2
    h, e = np.divmod(texture.stains.astype(np.float32), 256)
    h, e = (np.asarray(Image.fromarray(part).resize(size)) / 255 for part in (h, e))
    rank = Image.fromarray(texture.rank).resize(size, Image.Resampling.NEAREST)
    return _texture(h, e, np.asarray(rank) / 255)


@lru_cache(maxsize=8)
def _nearest(
    spacing_um: float, jitter: float, neighbours: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return cell centres, and the nearest cells of every square micrometre (slow, cached)."""
    from scipy.spatial import cKDTree

    rows, columns = 2 * round(PERIOD_UM / spacing_um / 1.73), round(PERIOD_UM / spacing_um)
    y, x = np.divmod(np.arange(rows * columns), columns)
    hexagons = np.stack([(x + y % 2 / 2) / columns, (y + 0.5) / rows], axis=1) * PERIOD_UM
    rng = np.random.default_rng(0)
    centres = (hexagons + jitter * spacing_um * rng.normal(size=hexagons.shape)) % PERIOD_UM
    um = np.arange(PERIOD_UM) + 0.5
    grid = np.stack(np.meshgrid(um, um), axis=-1)
    _, nearest = cKDTree(centres, boxsize=PERIOD_UM).query(grid, k=[1, 2, 3][:neighbours])
    return centres.astype(np.float32), nearest.astype(np.int32)


class _Cells:
    """Cells of a tissue: for every pixel its nearest cell, and the offset from its centre."""

    def __init__(
        self, n: int, spacing_um: float, rng: Generator, *, jitter: float, neighbours: int = 1
    ) -> None:
        self.rng = rng
        self.centres, nearest = _nearest(spacing_um, jitter, neighbours)
        if n != len(nearest):
            finer = ((np.arange(n) + 0.5) * PERIOD_UM / n).astype(int)
            nearest = nearest[finer[:, None], finer]
        self.id = nearest[..., 0]
        offsets = [_offset(self.centres[nearest[..., k]]) for k in range(neighbours)]
        self.dx, self.dy = offsets[0]
        # Extra distance to the second cell (0 at a wall) and the third cell (0 at a corner).
        distances = [np.hypot(*offset) for offset in offsets]
        self.margins = [distance - distances[0] for distance in distances[1:]]

    def draw(self, mean: float, spread: float) -> FLOATS:
        """Return one random number per cell, at every pixel of the cell."""
        return self.rng.normal(mean, spread, len(self.centres)).astype(np.float32)[self.id]

    def rank(self, low: float, high: float) -> FLOATS:
        """Return a random rank per cell. Cells of low rank appear first at the edge of a tissue."""
        return self.rng.uniform(low, high, len(self.centres)).astype(np.float32)[self.id]

    def nucleus(self, long_um: float, short_um: float, turn: float, irregularity: float) -> FLOATS:
        """Return 1 inside nuclei and 0 outside, with an edge of one micrometre."""
        angle = self.draw(0.0, turn)
        size = np.clip(self.draw(1.0, 0.12), 0.7, 1.4)
        u = (self.dx * np.cos(angle) + self.dy * np.sin(angle)) / (long_um * size)
        v = (self.dy * np.cos(angle) - self.dx * np.sin(angle)) / (short_um * size)
        if irregularity:
            around = np.arctan2(v, u)
            size = 1 + irregularity * np.cos(2 * around + self.draw(0, 3))
            size += irregularity * np.cos(3 * around + self.draw(0, 3))
            u, v = u / size, v / size
        return np.clip((1 - np.hypot(u, v)) * short_um + 0.5, 0, 1)


def _offset(centres: NDArray[np.float32]) -> tuple[FLOATS, FLOATS]:
    """Return the offset of every pixel from its point, with periodic boundaries."""
    period = np.float32(PERIOD_UM)
    um = (np.arange(len(centres), dtype=np.float32) + 0.5) * (period / len(centres))
    dx, dy = um - centres[..., 0], um[:, None] - centres[..., 1]
    return dx - period * np.rint(dx / period), dy - period * np.rint(dy / period)


def _noise(n: int, rng: Generator, tall_um: float, wide_um: float | None = None) -> FLOATS:
    """Return periodic noise with mean 0, standard deviation 1 and the given feature size."""
    base = int(PERIOD_UM)
    frequency = np.fft.fftfreq(base)
    filtered = np.exp(-((2 * frequency[:, None] * tall_um) ** 2))
    filtered = filtered * np.exp(-((2 * frequency[: base // 2 + 1] * (wide_um or tall_um)) ** 2))
    noise = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(base, base))) * filtered)
    noise = ((noise - noise.mean()) / noise.std()).astype(np.float32)
    if n == base:
        return noise
    box = (4, 4, base + 4, base + 4)
    larger = Image.fromarray(np.pad(noise, 4, mode="wrap"))
    return np.asarray(larger.resize((n, n), Image.Resampling.BICUBIC, box=box))


def _warp(um: float, size_um: float, rng: Generator, *parts: FLOATS) -> Iterator[FLOATS]:
    """Return images warped by about `um` micrometres, with features of `size_um`."""
    n = len(parts[0])
    index = np.arange(n)
    dy, dx = (np.rint(um * n / PERIOD_UM * _noise(n, rng, size_um)).astype(int) for _ in "yx")
    y, x = (index[:, None] + dy) % n, (index + dx) % n
    return (part[y, x] for part in parts)


def _texture(h: FLOATS, e: FLOATS, rank: FLOATS) -> Texture:
    h, e, rank = (np.clip(255 * part, 0, 255) for part in (h, e, rank))
    return Texture((256 * np.floor(h) + e).astype(np.uint16), rank.astype(np.uint8))


def _stroma(n: int) -> Texture:
    """Return wavy collagen with clefts, and thin nuclei along it."""
    rng = np.random.default_rng(1)
    bundles, fibres = _noise(n, rng, 9, 160), _noise(n, rng, 2.5, 60)
    clefts = np.clip(_noise(n, rng, 4, 90) - 1.25, 0, 1)
    e = 0.25 + 0.045 * bundles + 0.04 * fibres - 0.22 * clefts
    cells = _Cells(n, 21, rng, jitter=0.3)
    nuclei = cells.nucleus(6.5, 1.7, 0.15, 0.0) * (cells.rank(0, 1) < 0.8)
    h = 0.03 + 0.01 * bundles + nuclei * cells.draw(0.5, 0.08)
    warped_h, warped_e = _warp(17, 170, rng, h, e)
    fray = 0.5 + 0.05 * _noise(n, rng, 10) + 0.03 * _noise(n, rng, 3)
    return _texture(warped_h, np.maximum(warped_e, 0.03), fray)


def _fat(n: int) -> Texture:
    """Return round empty cells with thin walls and a few flat nuclei."""
    rng = np.random.default_rng(2)
    cells = _Cells(n, 62, rng, jitter=0.14, neighbours=3)
    to_wall, to_corner = cells.margins
    ripple = 1.0 * _noise(n, rng, 14)
    inside = np.minimum(to_wall - 2.6, 0.6 * to_corner - 4.5) + ripple
    wall = np.clip(0.5 - inside / 2, 0, 1)
    corner = np.clip(1.5 - to_corner / 12, 0, 1)
    dots = np.clip(1.5 * (_noise(n, rng, 5) - 1.7), 0, 1) * corner * wall
    e = 0.01 + wall * (0.22 + 0.04 * _noise(n, rng, 4))
    h, e, rank = _warp(5, 30, rng, 0.5 * dots + 0.03 * wall, e, cells.rank(0.3, 0.7))
    return _texture(h, e, rank)


def _lymphocytes(n: int) -> Texture:
    """Return small round dark nuclei. The stroma is visible between them."""
    rng = np.random.default_rng(3)
    cells = _Cells(n, 8.6, rng, jitter=0.2)
    nuclei = cells.nucleus(3.5, 3.2, 1.5, 0.03)
    h = 0.08 + nuclei * (cells.draw(0.72, 0.07) + 0.08 * _noise(n, rng, 1.5))
    rank = np.where(nuclei > 0.02, cells.rank(0.2, 0.95), 1.0).astype(np.float32)
    return _texture(h, 0.14 + 0 * h, rank)


def _tumour(n: int) -> Texture:
    """Return crowded cells with large, irregular, dark nuclei of various sizes."""
    rng = np.random.default_rng(4)
    cells = _Cells(n, 13.2, rng, jitter=0.24, neighbours=2)
    (to_wall,) = cells.margins
    nuclei = cells.nucleus(6.3, 4.6, 1.5, 0.11) * np.clip(to_wall + 0.2, 0, 1)
    chromatin = 0.09 * _noise(n, rng, 1.6) + 0.12 * (_noise(n, rng, 1.4) > 2.2)
    h = 0.14 + 0.03 * _noise(n, rng, 6) + nuclei * (cells.draw(0.52, 0.13) + chromatin)
    e = 0.17 + 0.03 * _noise(n, rng, 5) - 0.07 * np.clip(1 - to_wall / 1.5, 0, 1)
    return _texture(h, e, cells.rank(0.42, 0.58))


GLANDS = 16


def gland_radius_um(variant: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean radius of a gland."""
    return 34.0 + 2.2 * np.asarray(variant)


def _gland(variant: int, mpp: float) -> Texture:
    """Return a ring of columnar cells around a lumen, with nuclei at the base."""
    rng = np.random.default_rng([5, variant])
    radius = float(gland_radius_um(variant))
    half = round(1.4 * radius / mpp)
    um = (np.arange(-half, half, dtype=np.float32) + 0.5) * mpp
    around = np.arctan2(um[:, None], um)
    outline = np.full_like(around, radius)
    for wave in (2, 3, 4, 5):
        outline += radius * rng.normal(0, 0.22 / wave) * np.cos(wave * around + rng.uniform(0, 6.3))
    depth = outline - np.hypot(um, um[:, None])  # in um, from the base to the lumen
    thick = 20 + rng.uniform(-2, 3)

    count = round(2 * np.pi * radius / 6.2)
    cell = around * count / (2 * np.pi)
    each = np.rint(cell).astype(int) % count
    aside = (cell - np.rint(cell)) * 2 * np.pi * (outline - 6) / count
    base = rng.normal(6.5, 1.1, count)[each]
    nuclei = np.hypot((depth - base) / rng.normal(4.4, 0.4, count)[each], aside / 2.5)
    nuclei = np.clip((1 - nuclei) * 2.5 + 0.5, 0, 1)

    apical = thick + 0.7 * np.cos(2 * np.pi * cell) - depth  # domed cell apices
    epithelium = np.clip(depth + 0.5, 0, 1) * np.clip(apical, 0, 1)
    border = np.exp(-((depth + 1.0) ** 2) / 2)
    secretion = np.clip((depth - thick) / 8, 0, 1) * rng.choice([0.0, 0.02, 0.08])
    h = epithelium * (0.07 + nuclei * rng.normal(0.5, 0.07, count)[each])
    e = 0.01 + epithelium * (0.19 - 0.06 * (depth > 11)) + 0.2 * border + secretion
    h, e, rank = (part.astype(np.float32) for part in (h, e, depth <= -2))
    return _texture(h, e, rank)
