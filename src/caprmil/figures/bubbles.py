"""Models as bubbles: two measures, and the number of parameters as area."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, isnan, nan, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.style import BLUE, GREY, VERMILLION, log_scale, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

LOG_SPAN = 12  # an axis that spans a larger factor is logarithmic
DIRECTIONS = np.array([(1, 0), (0, 1), (0, -1), (-1, 0), *product((0.7, -0.7), (0.7, -0.7))])
LARGEST = 34  # diameter of the largest bubble, in points
SIZES = tuple(size * 10**zeros for zeros in range(2, 9) for size in (1, 3))  # parameters


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """One model. The area of its bubble is the number of parameters."""

    name: str
    x: float
    y: float
    parameters: int
    spread: float = nan  # standard deviation of `y`


def bubbles(
    models: Sequence[Bubble], *, xlabel: str, ylabel: str, title: str = "", ours: str = "caprmil"
) -> "Figure":
    """Draw models by two measures; names that begin with `ours` have another colour.

    An axis that spans more than a factor of twelve is logarithmic. NaN is left out.
    """
    models = [model for model in models if not isnan(model.x + model.y)]
    figure = new_figure(7.2, 5.0)
    axes = figure.subplots()
    tidy(axes, title=title, xlabel=xlabel, ylabel=ylabel)
    _scale(axes, "x", [model.x for model in models])
    _scale(axes, "y", [model.y for model in models if isnan(model.spread)])
    diameter = LARGEST / sqrt(max((model.parameters for model in models), default=1))
    for model in sorted(models, key=lambda model: -model.parameters):  # the small ones on top
        colour = VERMILLION if model.name.startswith(ours) else BLUE
        if not isnan(model.spread):
            axes.errorbar(
                model.x, model.y, yerr=model.spread, color=colour, lw=1, alpha=0.6, zorder=2
            )
        style: dict[str, Any] = {"mfc": colour, "mec": "white", "mew": 0.8, "alpha": 0.75}
        axes.plot(model.x, model.y, "o", ms=diameter * sqrt(model.parameters), zorder=3, **style)
    axes.margins(0.14)
    _size_key(axes, diameter)
    _name(axes, models, diameter)
    return figure


def _scale(axes: "Axes", which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic if its values span a large factor."""
    if values and min(values) > 0 and max(values) / min(values) > LOG_SPAN:
        log_scale(axes, which)


def _size_key(axes: "Axes", diameter: float) -> None:
    """Add a legend of sizes with three round numbers; `diameter` is that of one parameter."""
    from matplotlib.lines import Line2D

    sizes = [size for size in SIZES if diameter * sqrt(size) <= 1.1 * LARGEST][-3:]
    style: dict[str, Any] = {"mfc": "none", "mec": GREY, "ls": "", "marker": "o"}
    marks = [Line2D([], [], ms=diameter * sqrt(size), **style) for size in sizes]
    widest = LARGEST / 8  # in units of the font size
    key = axes.legend(
        marks,
        [f"{size / 1e6:g} M" for size in sizes],
        title="parameters",
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        handlelength=widest,
        handleheight=widest,
        borderpad=1,
    )
    key.set_alignment("left")
    for text in key.get_texts():
        text.set_y(8)  # at the middle of its bubble


def _name(axes: "Axes", models: Sequence[Bubble], diameter: float) -> None:
    """Write each name next to its bubble, where it covers no other name or bubble."""
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()  # to compute the layout
    scale = axes.figure.dpi / 72  # pixels per point
    inside = axes.get_window_extent()
    bubble_boxes, taken = [], []
    for model in models:
        x, y = axes.transData.transform((model.x, model.y))
        radius = scale * diameter * sqrt(model.parameters) / 2
        bubble_boxes.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
        if not isnan(model.spread):
            top = axes.transData.transform((model.x, model.y + model.spread))[1]
            taken.append(Bbox.from_extents(x - scale, 2 * y - top, x + scale, top))
    taken += bubble_boxes
    for model, bubble in zip(models, bubble_boxes, strict=True):
        text = axes.text(0, 0, model.name, fontsize=9)
        size = text.get_window_extent()
        text.remove()
        others = [box for box in taken if box is not bubble]
        near, step = _free_position(bubble, size, others, inside, scale)
        taken.append(Bbox(bubble.get_points().mean(axis=0) + step + _centred(size)))
        axes.annotate(
            model.name,
            (model.x, model.y),
            xytext=(step[0] / scale, step[1] / scale),
            textcoords="offset points",
            fontsize=9,
            ha="center",
            va="center",
            # A thin line leads to the bubble if the name is not next to it.
            arrowprops=None if near else {"arrowstyle": "-", "color": GREY, "lw": 0.7},
            zorder=4,
        )


def _free_position(
    bubble: "Bbox", size: "Bbox", others: "list[Bbox]", inside: "Bbox", scale: float
) -> tuple[bool, NDArray[np.float64]]:
    """Return whether the name is next to its bubble, and the offset from the bubble to it.

    The position is the one around the bubble where the name covers least, of equals the nearest.
    """
    from matplotlib.transforms import Bbox

    best, least = (True, np.zeros(2)), inf
    for away, side in product((2, 8, 16, 26, 38), DIRECTIONS):
        reach = (
            np.array([bubble.width + size.width, bubble.height + size.height]) / 2 + away * scale
        )
        step = side * reach
        box = Bbox(bubble.get_points().mean(axis=0) + step + _centred(size))
        outside = box.width * box.height - _overlap(box, inside)
        cover = round(outside + sum(_overlap(box, other) for other in others))
        if cover < least:
            best, least = (away == 2, step), cover
    return best


def _centred(size: "Bbox") -> NDArray[np.float64]:
    """Return the corners of a box of that size around zero."""
    half = np.array([size.width, size.height]) / 2
    return np.stack([-half, half])


def _overlap(one: "Bbox", other: "Bbox") -> float:
    """Return the area of the intersection of two boxes."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0.0) * max(height, 0.0)
