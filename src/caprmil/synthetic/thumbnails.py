"""Synthetic thumbnails with the mask that tissue detection should return.

An image is unevenly lit, tinted glass, times the absorption of tissue, ink and dirt
(Beer-Lambert), plus sensor noise and JPEG compression. The generator is independent of the
detector.
"""

import io
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage, special
from scipy.spatial import cKDTree

from caprmil.errors import UnknownNameError

MPP = 8.0

Field = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Optical density in red, green and blue of one unit of dye.
HAEMATOXYLIN = (0.60, 0.72, 0.33)
EOSIN = (0.08, 0.80, 0.34)
COUNTERSTAIN = (0.62, 0.60, 0.36)  # haematoxylin in IHC, bluer than in H&E
DAB = (0.30, 0.58, 0.78)
INKS = {
    "blue pen": (1.10, 0.75, 0.22),
    "black pen": (0.95, 0.93, 0.88),
    "green pen": (1.20, 0.42, 0.62),
    "red pen": (0.10, 0.85, 0.78),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class SyntheticThumbnail:
    """An image with its ground truth."""

    image: NDArray[np.uint8]
    truth: Mask  # tissue that is not covered by pen
    pen: Mask
    mpp: float = MPP


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The settings of an image. A case is a scene with a name."""

    tissue: str = "blobs"  # blobs, cores, scraps, fat, everywhere, none
    stain: float = 1.0  # strength of the stain
    ihc: bool = False
    tint: bool = False  # tinted glass
    light: str = "even"  # even, vignette, slope (linear gradient)
    ink: str = ""
    strokes: int = 2
    across: bool = False  # strokes may cross the tissue
    frame: str = ""  # black, white: the colour of the area that was not scanned
    dirt: int = 4  # number of dust specks
    lines: int = 0  # number of coverslip edges
    bubbles: int = 0


# The name of a case seeds its random numbers: renaming a case changes its images.
CASES = {
    "normal": Scene(),
    "tinted glass": Scene(tint=True),
    "vignette": Scene(light="vignette"),
    "slope of light": Scene(light="slope"),
    "thin biopsy": Scene(tissue="cores"),
    "biopsy, tint, slope": Scene(tissue="cores", tint=True, light="slope"),
    "scraps": Scene(tissue="scraps"),
    "pale": Scene(stain=0.22),
    "pale, vignette": Scene(stain=0.22, light="vignette"),
    "pale, tint, slope": Scene(stain=0.22, tint=True, light="slope"),
    "fat": Scene(tissue="fat"),
    "IHC": Scene(ihc=True),
    "IHC, pale, slope": Scene(ihc=True, stain=0.3, light="slope"),
    "blue pen": Scene(ink="blue pen"),
    "black pen": Scene(ink="black pen"),
    "green pen": Scene(ink="green pen"),
    "red pen": Scene(ink="red pen"),
    "biopsy, more pen": Scene(tissue="cores", ink="blue pen", strokes=5),
    "biopsy, black pen": Scene(tissue="cores", ink="black pen", strokes=4),
    "pen across tissue": Scene(ink="green pen", across=True),
    "blue across tissue": Scene(ink="blue pen", across=True),
    "IHC with pen": Scene(ihc=True, ink="blue pen"),
    "black frame": Scene(frame="black"),
    "white frame": Scene(frame="white", light="slope"),
    "dust": Scene(tissue="cores", dirt=150),
    "coverslip edge": Scene(lines=3),
    "air bubbles": Scene(bubbles=4),
    "tissue everywhere": Scene(tissue="everywhere"),
    "everywhere, with pen": Scene(tissue="everywhere", ink="green pen", across=True),
    "blank": Scene(tissue="none"),
    "blank, tint, slope": Scene(tissue="none", tint=True, light="slope", dirt=30),
    "blank with pen": Scene(tissue="none", ink="blue pen", light="vignette"),
    "blank, edge, frame": Scene(tissue="none", lines=2, frame="black", dirt=30),
}


def thumbnail(
    case: str, seed: int = 0, *, shape: tuple[int, int] = (700, 900)
) -> SyntheticThumbnail:
    """Return an image of a case. The same seed gives the same image."""
    if case not in CASES:
        raise UnknownNameError("case", case, CASES)
    rng = np.random.default_rng([seed, zlib.crc32(case.encode())])
    return draw(CASES[case], rng, shape)


def draw(scene: Scene, rng: np.random.Generator, shape: tuple[int, int]) -> SyntheticThumbnail:
    """Return an image of a scene."""
    truth, presence = _tissue(scene.tissue, rng, shape)
    density = scene.stain * presence[..., None] * _dyes(rng, shape, ihc=scene.ihc)
    strokes = np.zeros(shape)
    if scene.ink:
        strokes = _strokes(rng, shape, scene.strokes, over=None if scene.across else truth)
        density = density + strokes[..., None] * _varied(rng, INKS[scene.ink], 0.08)
    density = density + _specks(rng, shape, scene.dirt)
    density = density + _lines(rng, shape, scene.lines)[..., None]
    density = density + _bubbles(rng, shape, scene.bubbles)[..., None]
    image = _glass(rng, shape, tint=scene.tint, light=scene.light) * 10**-density
    outside = np.zeros(shape, dtype=bool)
    if scene.frame:
        outside = _outside(rng, shape)
        image[outside] = 0 if scene.frame == "black" else 255
    image = (
        image
        + ndimage.gaussian_filter(
            rng.normal(scale=rng.uniform(1, 3), size=image.shape), (0.6, 0.6, 0)
        )
        * ~outside[..., None]
    )
    pen = strokes > 0.08
    return SyntheticThumbnail(
        image=_through_jpeg(image, quality=int(rng.integers(75, 93))),
        truth=truth & ~pen & ~outside,
        pen=pen & ~outside,
    )


def _noise(
    rng: np.random.Generator, shape: tuple[int, int], size: float, octaves: int = 1
) -> Field:
    """Return smooth noise with standard deviation 1 and features of about `size` pixels."""
    total = np.zeros(shape)
    for octave in range(octaves):
        sigma = size / 2**octave
        step = max(1, int(sigma / 2))  # smooth noise is sampled coarsely and interpolated
        small = [-(-side // step) + 8 for side in shape]
        grain = ndimage.gaussian_filter(rng.normal(size=small), sigma / step, mode="wrap")
        grain = ndimage.zoom(grain / grain.std(), step, order=1)
        total += grain[: shape[0], : shape[1]] / 2**octave
    return (total - total.mean()) / total.std()


def _varied(rng: np.random.Generator, colour: tuple[float, float, float], spread: float) -> Field:
    return np.asarray(colour) * rng.normal(1, spread, size=3).clip(0.7, 1.3)


def _tissue(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Mask, Field]:
    """Return the tissue mask, and the amount of tissue: lumina and fat cells are empty tissue."""
    if kind == "none":
        return np.zeros(shape, dtype=bool), np.zeros(shape)
    if kind == "everywhere":
        truth = np.ones(shape, dtype=bool)
    elif kind == "cores":
        truth = _cores(rng, shape)
    else:
        truth = _blobs(rng, shape, scraps=kind == "scraps")
    presence = truth.astype(float)
    if kind == "fat":
        fat = _noise(rng, shape, 60) > -0.2
        presence = np.where(truth & fat, _fat_cells(rng, shape), presence)
    elif kind == "blobs":
        lumen = (_noise(rng, shape, 60, 2) > 2.1) & ndimage.binary_erosion(truth, iterations=20)
        truth, presence = truth & ~_large(lumen, 2000), presence * ~lumen
    if kind in ("blobs", "everywhere"):
        gaps = _noise(rng, shape, 4) > 2.4  # small lumina and cracks
        presence = presence * ~gaps
    return truth, ndimage.gaussian_filter(presence, 0.7)


def _large(mask: Mask, pixels: int) -> Mask:
    labels, count = ndimage.label(mask)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    sizes[0] = 0
    return (sizes >= pixels)[labels]


def _blobs(rng: np.random.Generator, shape: tuple[int, int], *, scraps: bool) -> Mask:
    """Return a mask of blobs with ragged edges: a few large ones, or many small ones."""
    rows, columns = np.indices(shape)
    blobs = np.zeros(shape, dtype=bool)
    for _ in range(int(rng.integers(10, 18)) if scraps else int(rng.integers(1, 4))):
        radius = rng.uniform(12, 36) if scraps else rng.uniform(0.2, 0.38) * min(shape)
        centre = [rng.uniform(1.1 * radius, side - 1.1 * radius) for side in shape]
        stretch = rng.uniform(0.6, 1.6)
        distance = np.hypot((rows - centre[0]) * stretch, (columns - centre[1]) / stretch)
        ragged = 0.22 * _noise(rng, shape, radius / 2, 4)
        blobs |= distance / radius + ragged < 0.9
    return _large(blobs, 250)


def _cores(rng: np.random.Generator, shape: tuple[int, int]) -> Mask:
    """Return a mask of needle biopsies: thin, curved, of varying width, sometimes broken."""
    mask = np.zeros(shape, dtype=bool)
    rows, columns = np.indices(shape)
    for number in range(count := int(rng.integers(1, 4))):
        centre = shape[0] * (number + 1) / (count + 1)
        along = np.linspace(0.08, 0.92, 200) * shape[1]
        bend = rng.normal(scale=shape[0] * 0.04, size=5)
        across = centre + np.interp(along, np.linspace(0, shape[1], 5), bend)
        path = ndimage.gaussian_filter1d(across, 10)
        width = rng.uniform(9, 22) * (1 + 0.25 * _noise(rng, shape, 25, 3))
        distance = np.abs(rows - np.interp(columns, along, path))
        inside = (columns > along[0]) & (columns < along[-1])
        gap = rng.uniform(0.2, 0.8) * shape[1]
        mask |= (distance < width) & inside & (np.abs(columns - gap) > rng.uniform(0, 25))
    return _large(mask, 250)


def _fat_cells(rng: np.random.Generator, shape: tuple[int, int]) -> Field:
    """Return the walls between fat cells of about 80 micrometres."""
    spacing = 10
    rows, columns = np.meshgrid(*(np.arange(0, side, spacing) for side in shape), indexing="ij")
    centres = np.stack([rows.ravel(), columns.ravel()], axis=1).astype(float)
    centres = centres + rng.uniform(-0.4 * spacing, 0.4 * spacing, size=centres.shape)
    pixels = np.indices(shape).reshape(2, -1).T
    near, _ = cKDTree(centres).query(pixels, k=2)
    wall: Field = np.exp(-(((near[:, 1] - near[:, 0]) / 1.2) ** 2)).reshape(shape)
    return 0.55 * wall + 0.02


def _dyes(rng: np.random.Generator, shape: tuple[int, int], *, ihc: bool) -> Field:
    """Return the optical density of tissue over the whole image: matrix, nuclei, chromogen."""
    matrix = (0.28 + 0.06 * _noise(rng, shape, 30, 3) + 0.05 * _noise(rng, shape, 1.5)).clip(0.08)
    cells = 1 / (1 + np.exp(-2 * _noise(rng, shape, 25, 2)))
    nuclei = cells * np.clip(_noise(rng, shape, 1.0) - 0.2, 0, None) * 0.45
    if not ihc:
        return matrix[..., None] * _varied(rng, EOSIN, 0.12) + (nuclei + 0.06)[..., None] * _varied(
            rng, HAEMATOXYLIN, 0.08
        )
    positive = 1 / (1 + np.exp(-6 * (_noise(rng, shape, 20, 3) - rng.uniform(0, 1.5))))
    brown = positive * (0.35 + 0.1 * _noise(rng, shape, 1.5)).clip(0)
    return (0.5 * matrix + nuclei)[..., None] * _varied(rng, COUNTERSTAIN, 0.05) + brown[
        ..., None
    ] * _varied(rng, DAB, 0.08)


def _strokes(
    rng: np.random.Generator, shape: tuple[int, int], count: int, *, over: Mask | None
) -> Field:
    """Return the amount of ink: curved strokes, a few tenths of a millimetre wide."""
    ink = np.zeros(shape)
    free = np.ones(shape) if over is None else ndimage.distance_transform_edt(~over)
    for _ in range(count):
        radius = rng.uniform(16, 40)
        length = rng.uniform(0.25, 0.7) * min(shape)
        start = np.array([rng.uniform(0.1, 0.9) * side for side in shape])
        turn = np.cumsum(rng.normal(scale=0.06, size=60)) + rng.uniform(0, 2 * np.pi)
        path = start + np.cumsum(np.stack([np.sin(turn), np.cos(turn)], 1), axis=0) * length / 60
        rows, columns = path.round().astype(int).T
        keep = (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1])
        line = np.ones(shape, dtype=bool)
        line[rows[keep], columns[keep]] = False
        distance = ndimage.distance_transform_edt(line) + 3 * _noise(rng, shape, 8)
        stroke = special.expit((radius - distance) / rng.uniform(0.8, 3))
        depth = rng.uniform(0.6, 1.1) * (1 + 0.15 * _noise(rng, shape, 15)).clip(0.4)
        ink = np.maximum(ink, stroke * depth)
    return ink * (free > 12 if over is not None else 1)


def _specks(rng: np.random.Generator, shape: tuple[int, int], count: int) -> Field:
    """Return the density of dust: grey, brown or blue specks of a few pixels, many faint."""
    density = np.zeros((*shape, 3))
    for _ in range(count):
        row, column = (int(rng.integers(6, side - 6)) for side in shape)
        spot = np.zeros((13, 13))
        spot[6, 6] = 1
        spot = ndimage.gaussian_filter(spot, rng.uniform(0.6, 1.8, size=2))
        colour = rng.uniform(0.6, 1.0, size=3) * rng.choice([0.08, 0.3, 0.6])
        patch = density[row - 6 : row + 7, column - 6 : column + 7]
        patch += (spot / spot.max())[..., None] * colour
    return density


def _lines(rng: np.random.Generator, shape: tuple[int, int], count: int) -> Field:
    """Return the density of coverslip edges: straight grey lines."""
    rows, columns = np.indices(shape)
    density = np.zeros(shape)
    for _ in range(count):
        angle = rng.normal(scale=0.03) + rng.choice([0, np.pi / 2])
        offset = rng.uniform(0.03, 0.15) * (shape[0] if abs(np.cos(angle)) > 0.7 else shape[1])
        distance = np.abs(rows * np.cos(angle) + columns * np.sin(angle) - offset)
        density += rng.uniform(0.08, 0.35) * np.exp(-((distance / rng.uniform(1, 3)) ** 2))
    return density


def _bubbles(rng: np.random.Generator, shape: tuple[int, int], count: int) -> Field:
    """Return the density of air bubbles: dark rims."""
    rows, columns = np.indices(shape)
    density = np.zeros(shape)
    for _ in range(count):
        row, column = (rng.uniform(0, side) for side in shape)
        distance = np.hypot(rows - row, columns - column) - rng.uniform(25, 90)
        density += rng.uniform(0.05, 0.3) * np.exp(-((distance / rng.uniform(1.5, 3)) ** 2))
    return density


def _glass(rng: np.random.Generator, shape: tuple[int, int], *, tint: bool, light: str) -> Field:
    """Return the colour of empty glass, 0 to 255."""
    colour = rng.uniform(232, 248) + rng.normal(scale=1.5, size=3)
    if tint:
        colour = colour * rng.uniform(0.86, 0.97, size=3)
    rows, columns = (np.linspace(-1, 1, side) for side in shape)
    across, down = np.meshgrid(columns, rows)
    fall = np.zeros(shape)
    if light == "vignette":
        fall = rng.uniform(0.10, 0.22) * (across**2 + down**2) / 2
    elif light == "slope":
        angle = rng.uniform(0, 2 * np.pi)
        gradient = across * np.cos(angle) + down * np.sin(angle)
        fall = rng.uniform(0.12, 0.25) * (gradient / 1.42 + 1) / 2
    return ((1 - fall)[..., None] * colour).clip(0, 255)


def _outside(rng: np.random.Generator, shape: tuple[int, int]) -> Mask:
    """Return a mask of the area that was not scanned: steps along the sides."""
    outside = np.zeros(shape, dtype=bool)
    for edge in range(4):
        side = np.rot90(outside, edge)
        for start in range(0, side.shape[1], 100):
            side[: int(rng.integers(0, 4)) * 20, start : start + 100] = True
    return outside


def _through_jpeg(image: Field, *, quality: int) -> NDArray[np.uint8]:
    data = io.BytesIO()
    Image.fromarray(image.round().clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=quality)
    return np.asarray(Image.open(data))
