"""A canvas: the boxes of patches in an image, and maps drawn into them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.style import BLUE, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap

Pixels: TypeAlias = NDArray[np.uint8]
MAX_SIDE = 2000  # pixels of a canvas without a slide, so that odd coordinates fit into memory
EMPTY = 241  # grey where there is no patch, unlike any colour of a map


@dataclass(frozen=True, eq=False, kw_only=True)
class Canvas:
    """An image with a box for each patch. Pixels of several patches show their mean.

    Made by `on_grid` from a bag alone, or by `on_slide` over a thumbnail.
    """

    boxes: NDArray[np.int64]  # (N, 4): left, top, right and bottom edge in pixels
    shape: tuple[int, int]  # height and width
    image: Pixels | None = None
    mpp: float | None = None  # of the image, for a scale bar

    @classmethod
    def on_grid(cls, cells: NDArray[np.integer], *, max_side: int = MAX_SIDE) -> Self:
        """Return a canvas of one pixel per cell (column and row), or fewer for a large grid."""
        cells = cells.astype(np.int64) - cells.min(axis=0)
        cells //= ceil((int(cells.max()) + 1) / max_side)
        width, height = (int(last) + 1 for last in cells.max(axis=0))
        return cls(boxes=np.concatenate([cells, cells + 1], axis=1), shape=(height, width))

    @classmethod
    def on_slide(
        cls,
        corners: NDArray[np.floating],
        side: float,
        image: Pixels,
        scale: float,
        *,
        mpp: float | None = None,
    ) -> Self:
        """Return a canvas over a thumbnail, cropped to the patches.

        Corners and side are in level-0 pixels; `scale` is their number per pixel of the image.
        """
        first = np.rint(corners / scale).astype(np.int64)
        last = np.maximum(np.rint((corners + side) / scale).astype(np.int64), first + 1)
        size = np.array(image.shape[1::-1])
        margin = max(ceil(side / scale), ceil(0.02 * size.max()))
        low = (first.min(axis=0) - margin).clip(0, size)
        high = (last.max(axis=0) + margin).clip(0, size)
        if (high <= low).any():  # all patches are outside: another slide
            low, high = np.zeros_like(size), size
        (left, top), (right, bottom) = low.tolist(), high.tolist()
        boxes = np.concatenate([(edge - low).clip(0, high - low) for edge in (first, last)], axis=1)
        part = image[top:bottom, left:right]
        return cls(boxes=boxes, shape=(bottom - top, right - left), image=part, mpp=mpp)

    def coarser(self, max_side: int) -> "Canvas":
        """Return the canvas with at most `max_side` pixels on a side."""
        step = ceil(max(self.shape) / max_side)
        boxes = self.boxes // step
        boxes[:, 2:] = np.maximum(
            boxes[:, 2:], boxes[:, :2] + (self.boxes[:, 2:] > self.boxes[:, :2])
        )
        height, width = (ceil(side / step) for side in self.shape)
        return Canvas(
            boxes=boxes.clip(0, (width, height, width, height)),
            shape=(height, width),
            image=None if self.image is None else self.image[::step, ::step],
            mpp=None if self.mpp is None else self.mpp * step,
        )

    @property
    def aspect(self) -> float:
        """Height over width."""
        return self.shape[0] / self.shape[1]

    def paint(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return an image of one number per patch, NaN where there is none."""
        total, count = (
            self._sum_boxes(values.astype(np.float64)),
            self._sum_boxes(np.ones(len(values))),
        )
        covered = count > 0.5
        return np.divide(total, count, out=np.full(self.shape, np.nan), where=covered)

    def _sum_boxes(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of boxes at each pixel, from a cumulative sum over their corners."""
        height, width = self.shape
        sums = np.zeros((height + 1, width + 1))
        left, top, right, bottom = self.boxes.T
        for x, y, sign in (
            (left, top, 1),
            (right, top, -1),
            (left, bottom, -1),
            (right, bottom, 1),
        ):
            np.add.at(sums, (y, x), sign * values)
        return sums.cumsum(axis=0).cumsum(axis=1)[:height, :width]


def draw_map(
    axes: "Axes", canvas: Canvas, values: NDArray[Any], **options: Any
) -> "ScalarMappable":
    """Draw one number per patch over the slide. For `options` see `draw_painted`."""
    return draw_painted(axes, canvas, canvas.paint(values), **options)


def draw_painted(
    axes: "Axes",
    canvas: Canvas,
    painted: NDArray[np.float64],
    *,
    colours: "Colormap | str",
    limits: tuple[float, float],
    title: str = "",
) -> "ScalarMappable":
    """Draw a map over the faded slide, or without one; return its colours, for a colour bar.

    Background and map are one image, since Matplotlib takes twice as long for two.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(*limits), colours)
    covered, image = ~np.isnan(painted), _faded(canvas)
    image[covered] = scale.to_rgba(painted[covered], bytes=True)[:, :3]
    _frame(axes, canvas, title)
    axes.imshow(image)
    return scale


def colour_bar(axes: "Sequence[Axes]", shown: Any, label: str, **options: Any) -> None:
    """Draw a colour bar to the right of maps, with few and plain numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = axes[0].figure
    bar = figure.colorbar(shown, ax=list(axes), **{"shrink": 0.8, "pad": 0.02, **options})
    bar.set_label(label, fontsize=8.5)
    bar.locator = MaxNLocator(5)
    bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
    bar.update_ticks()
    bar.ax.tick_params(labelsize=8)


def draw_slide(axes: "Axes", canvas: Canvas, *, title: str = "") -> None:
    """Draw the slide without a map."""
    _frame(axes, canvas, title)
    axes.imshow(_faded(canvas) if canvas.image is None else canvas.image)


def _faded(canvas: Canvas) -> Pixels:
    """Return the slide in pale grey, so that every colour belongs to the map."""
    if canvas.image is None:
        return np.full((*canvas.shape, 3), EMPTY, dtype=np.uint8)
    grey = 255 - 0.45 * (255 - canvas.image.mean(axis=2, dtype=np.float32))
    return grey.astype(np.uint8)[..., None].repeat(3, axis=2)


def _frame(axes: "Axes", canvas: Canvas, title: str) -> None:
    """Set up axes for an image, without ticks."""
    height, width = canvas.shape
    axes.set(xticks=[], yticks=[], xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    axes.set_title(title, fontsize=9.5, loc="left")
    for spine in axes.spines.values():
        spine.set(color="#BBBBBB", linewidth=0.6)


def outline(axes: "Axes", canvas: Canvas, rows: Sequence[int] | NDArray[Any], colour: str) -> None:
    """Draw the edges of some patches, enlarged where they would be too small to see."""
    from matplotlib.patches import Rectangle

    smallest = 0.012 * max(canvas.shape)
    for left, top, right, bottom in canvas.boxes[np.asarray(rows, dtype=int)].tolist():
        x, y = (left + right - 1) / 2, (top + bottom - 1) / 2
        wide, high = max(right - left, smallest), max(bottom - top, smallest)
        corner = (x - wide / 2, y - high / 2)
        axes.add_patch(Rectangle(corner, wide, high, fill=False, ec=colour, lw=0.9))


def scale_bar(axes: "Axes", canvas: Canvas) -> None:
    """Draw a bar of a round length under a map, if its scale is known."""
    if canvas.mpp is None:
        return
    width = canvas.shape[1]
    wanted = 0.3 * width * canvas.mpp
    step = 10.0 ** floor(log10(wanted))
    length = max(n * step for n in (1, 2, 5) if n * step <= wanted)
    text = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
    share, below = length / canvas.mpp / width, -0.04 / max(canvas.aspect, 0.3)
    options: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    axes.plot([0, share], [below, below], color="black", lw=2, solid_capstyle="butt", **options)
    axes.text(share + 0.02, below, text, va="center", fontsize=8, **options)


@dataclass(frozen=True, eq=False, kw_only=True)
class Gallery:
    """Images of patches, all of one size, in order of rank."""

    rows: Sequence[int]  # in the bag
    patches: Sequence[Pixels]
    captions: Sequence[str] = ()


def draw_gallery(axes: "Axes", gallery: Gallery, *, columns: int, rows: int) -> None:
    """Draw patches as one image, the first at the top left."""
    side = max((len(patch) for patch in gallery.patches), default=1)
    gap = max(2, side // 24)
    step = side + gap
    mosaic = np.full((rows * step - gap, columns * step - gap, 3), 255, dtype=np.uint8)
    box = {"facecolor": "white", "alpha": 0.85, "pad": 0.8, "edgecolor": "none"}
    for number, patch in enumerate(gallery.patches[: rows * columns]):
        y, x = (step * index for index in divmod(number, columns))
        mosaic[y : y + len(patch), x : x + len(patch)] = patch
        if number < len(gallery.captions):
            corner = (x + 0.05 * side, y + 0.95 * side)
            axes.text(*corner, gallery.captions[number], fontsize=6, va="bottom", bbox=box)
    axes.imshow(mosaic)
    axes.set_axis_off()


def diverging() -> "Colormap":
    """Return a colour map from blue over white to vermillion, distinct with any colour vision."""
    from matplotlib.colors import LinearSegmentedColormap

    ends = ("#00395A", BLUE, "#9CCBE3", "#FFFFFF", "#F6B78C", VERMILLION, "#6E2F00")
    return LinearSegmentedColormap.from_list("blue-vermillion", ends)


def text_colour(colour: str) -> str:
    """Return black or white, whichever is readable on a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def colour_limit(values: NDArray[Any]) -> float:
    """Return where a colour scale ends: the 99.5th percentile of absolute values."""
    sizes = np.abs(values)
    return float(np.quantile(sizes, 0.995)) or float(sizes.max()) or 1.0
