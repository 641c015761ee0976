"""Rendering of a synthetic section in blocks: cells, stain and artefacts."""

from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from caprmil.synthetic.anatomy import THRESHOLD, TRUTH_UM, Anatomy, field, grid_um, noise
from caprmil.synthetic.textures import FLOATS, Texture, textures

ARTEFACTS = ("pen", "tint", "fold", "blur")
HAEMATOXYLIN, EOSIN = (0.56, 0.72, 0.41), (0.22, 0.80, 0.56)  # optical density of red, green, blue
INKS = ((0.12, 0.25, 0.75), (0.1, 0.5, 0.3), (0.12, 0.12, 0.14))  # blue, green, black
TINTS = ((236, 226, 200), (218, 230, 242), (242, 220, 228))  # colours of tinted glass
BLUR_UM = 5.0

Pixels = NDArray[np.uint8]


class Box(NamedTuple):
    """A rectangle of level-0 pixels."""

    x: int
    y: int
    width: int
    height: int


class Renderer:
    """Renders independent blocks of a section, so memory does not depend on its size.

    A cell of a texture is visible where the field is above the rank of the cell, so tissues
    start and end with complete cells.
    """

    def __init__(
        self, anatomy: Anatomy, *, mpp: float, seed: int, artefacts: tuple[str, ...]
    ) -> None:
        self.mpp, self.glands, self.textures = mpp, anatomy.glands, textures(mpp)
        sides = np.array([len(gland.stains) for gland in self.textures.glands])
        self.sides = sides[self.glands[:, 2].astype(int)]
        self.corners = np.rint(self.glands[:, :2].T / mpp - self.sides / 2).astype(int)
        self.transposed = self.textures.stroma.stains.T.ravel()
        shape = anatomy.kinds.shape
        stain, artefact = (np.random.default_rng([seed, stream]) for stream in (3, 4))
        # Textures are periodic. A smooth warp hides the repetition.
        self.warp = [Image.fromarray(80 / mpp * noise(stain, shape, 900)) for _ in "yx"]
        density = 1 + 0.08 * noise(stain, shape, 1500) + 0.05 * noise(stain, shape, 150)
        upright = 6 * noise(stain, shape, 600) - 1
        glass = stain.normal((244, 242, 244), 1.5)
        effects = _artefacts(artefact, anatomy) if artefacts else {}
        tint, self.ink = artefact.choice(TINTS), artefact.choice(INKS).astype(np.float32)
        if "fold" in artefacts:
            density = density * (1 + effects["fold"] / 200)
        self.colours = _colours(stain, tint if "tint" in artefacts else glass)
        self.fields = {**anatomy.fields, "upright": field(upright)}
        self.fields["density"] = np.clip(64 * density, 0, 255).astype(np.uint8)  # 64: factor 1
        self.fields |= {name: effects[name] for name in ("pen", "blur") if name in artefacts}
        self.images = {name: Image.fromarray(part) for name, part in self.fields.items()}

    def block(self, box: Box) -> Pixels:
        """Return the pixels of a block."""
        pixels = self._stained(box)
        if (blur := self._field("blur", box)) is not None:
            pixels = _mix(pixels, self._blurred(box), blur)
        if (pen := self._field("pen", box)) is not None:
            pixels = _mix(pixels, pixels * self.ink, pen)
        return pixels

    def _stained(self, box: Box) -> Pixels:
        """Return a block without pen and blur: layers of tissue, as colours of the two stains."""
        inside, density = self._field("tissue", box), self._field("density", box)
        if inside is None or density is None:
            return np.full((box.height, box.width, 3), self.colours[0])
        index = self._index(box)
        glass = inside <= self.textures.stroma.rank.take(index)
        stains = self._stroma(box, index)
        self._cover(stains, "fat", box, index)
        self._cover(stains, "lymphocytes", box, index)
        self._add_glands(stains, box)
        self._cover(stains, "tumour", box, index)
        haematoxylin = np.minimum((stains >> 8) * density.astype(np.uint16) >> 6, 255)
        eosin = np.minimum((stains & 255) * density.astype(np.uint16) >> 6, 255)
        return self.colours.take((haematoxylin << 8 | eosin) * ~glass, axis=0)

    def _field(self, name: str, box: Box) -> Pixels | None:
        """Return a field at every pixel of a block, or None if it is zero there."""
        left, top, right, bottom = _on_grid(box, self.mpp)
        near = np.s_[max(0, int(top) - 1) : int(bottom) + 2, max(0, int(left) - 1) : int(right) + 2]
        if name not in self.fields or not self.fields[name][near].any():
            return None
        return _zoom(self.images[name], box, self.mpp)

    def _index(self, box: Box) -> NDArray[np.intp]:
        """Return the index into the textures at every pixel of a block."""
        n = len(self.textures.stroma.stains)
        y, x = (_zoom(image, box, self.mpp).astype(np.int32) for image in self.warp)
        y += np.arange(box.y, box.y + box.height, dtype=np.int32)[:, None]
        x += np.arange(box.x, box.x + box.width, dtype=np.int32)
        return ((y - n * (y // n)) * n + (x - n * (x // n))).astype(np.intp)

    def _stroma(self, box: Box, index: NDArray[np.intp]) -> NDArray[np.uint16]:
        """Return the stains of stroma, with horizontal or vertical fibres."""
        stroma = self.textures.stroma
        if (upright := self._field("upright", box)) is None:
            return stroma.stains.take(index)
        return np.where(upright > THRESHOLD, self.transposed.take(index), stroma.stains.take(index))

    def _cover(
        self, stains: NDArray[np.uint16], name: str, box: Box, index: NDArray[np.intp]
    ) -> None:
        """Draw the cells of a tissue over the stains, in place."""
        if (amount := self._field(name, box)) is not None:
            texture: Texture = getattr(self.textures, name)
            visible = amount > texture.rank.take(index)
            np.copyto(stains, texture.stains.take(index), where=visible)

    def _add_glands(self, stains: NDArray[np.uint16], box: Box) -> None:
        """Draw the glands that overlap a block, each with its own rotation, in place."""
        left, top = self.corners[0] - box.x, self.corners[1] - box.y
        overlaps = (left + self.sides > 0) & (left < box.width)
        overlaps &= (top + self.sides > 0) & (top < box.height)
        for which in np.flatnonzero(overlaps):
            x, y, side = left[which], top[which], self.sides[which]
            target = np.s_[max(0, y) : y + side, max(0, x) : x + side]
            source = np.s_[max(0, -y) : box.height - y, max(0, -x) : box.width - x]
            variant, turn = self.glands[which, 2:].astype(int)
            gland = self.textures.glands[variant]
            drawn, rank = (np.rot90(part, turn)[source] for part in (gland.stains, gland.rank))
            np.copyto(stains[target], drawn, where=rank == 0)

    def _blurred(self, box: Box) -> Pixels:
        """Return a block out of focus, rendered with a margin to avoid seams."""
        radius = BLUR_UM / self.mpp
        margin = int(np.ceil(3 * radius))
        left, top = max(0, box.x - margin), max(0, box.y - margin)
        # The grid covers the section, plus less than one grid point.
        columns, rows = (int(side * TRUTH_UM / self.mpp) for side in self.images["blur"].size)
        right = min(columns, box.x + box.width + margin)
        bottom = min(rows, box.y + box.height + margin)
        image = Image.fromarray(self._stained(Box(left, top, right - left, bottom - top)))
        blurred = np.asarray(image.filter(ImageFilter.GaussianBlur(radius)))
        return blurred[box.y - top :, box.x - left :][: box.height, : box.width]


def _on_grid(box: Box, mpp: float) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a block on the grid of the fields."""
    scale = mpp / TRUTH_UM
    right, bottom = box.x + box.width, box.y + box.height
    return scale * box.x, scale * box.y, scale * right, scale * bottom


def _zoom(image: Image.Image, box: Box, mpp: float) -> NDArray[Any]:
    """Return the values of a field image at every pixel of a block."""
    left, top, right, bottom = _on_grid(box, mpp)
    inside = (left, top, min(right, image.width), min(bottom, image.height))
    size = (box.width, box.height)
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR, box=inside))


def _mix(pixels: NDArray[Any], others: NDArray[Any], amount: Pixels) -> Pixels:
    share = amount[..., None] / np.float32(255)
    return (pixels + (others - pixels.astype(np.float32)) * share).astype(np.uint8)


def _colours(rng: Generator, glass: NDArray[Any]) -> Pixels:
    """Return the colour of every pair of stains, with hue and strength of this slide."""
    stains = np.array([HAEMATOXYLIN, EOSIN]) + rng.normal(0, 0.035, (2, 3))
    stains *= np.exp(rng.normal(0, 0.14, (2, 1)))
    amounts = np.stack(np.divmod(np.arange(2**16), 256), axis=1) / 255
    return np.clip(glass * 10 ** -(amounts @ stains), 0, 255).astype(np.uint8)


def _artefacts(rng: Generator, anatomy: Anatomy) -> dict[str, Pixels]:
    """Return fields of pen, fold and blur."""
    shape = anatomy.kinds.shape
    grid, tissue = grid_um(shape), np.argwhere(anatomy.kinds > 0)
    wavy, span = noise(rng, shape, 400), TRUTH_UM * min(shape)

    def offsets() -> FLOATS:
        centre = TRUTH_UM * (tissue[rng.integers(len(tissue))] + 0.5)
        return (grid - centre[:, None, None]).astype(np.float32)

    y, x = offsets()
    ring = np.abs(np.hypot(y, 1.3 * x) - span * rng.uniform(0.15, 0.3) + 30 * wavy)
    drawn = np.arctan2(y, x) < rng.uniform(1.5, 3)  # most rings are open
    pen = np.where(drawn, rng.uniform(30, 45) - ring, -1000) / 16
    y, x = offsets()
    angle = rng.uniform(0, np.pi)
    across = y * np.cos(angle) - x * np.sin(angle) + 60 * wavy
    along = y * np.sin(angle) + x * np.cos(angle)
    fold = 255 * np.exp(-((across / 40) ** 2) - (along / (0.3 * span)) ** 4)
    blur = (0.3 * span - np.hypot(*offsets()) + 100 * wavy) / 100
    return {
        "pen": np.minimum(field(pen), 225),  # ink is translucent
        "fold": fold.astype(np.uint8),
        "blur": field(blur),
    }
