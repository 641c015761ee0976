"""The figure of an atlas: maps of the tokens of a head with typical patches, usage and effects."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.canvas import (
    Canvas,
    Gallery,
    colour_bar,
    draw_gallery,
    draw_map,
    scale_bar,
)
from caprmil.figures.style import COLOURS, GREY, Values, caption, new_figure, tidy
from caprmil.figures.token_maps import COLOUR_MAP, COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELLED = 40  # tokens up to which each has a label


class Points(NamedTuple):
    """A mean for each token, with the ends of its interval."""

    mean: Values
    low: Values
    high: Values


class TokenPanel(NamedTuple):
    """A panel with the points of each group over all tokens."""

    title: str
    ylabel: str
    groups: Mapping[str, Points]


def token_atlas(
    weights: NDArray[Any],
    canvas: Canvas,
    *,
    galleries: Sequence[Gallery] = (),
    panels: Sequence[TokenPanel] = (),
    names: Sequence[str],
    per_head: int,
    title: str = "",
    remarks: Sequence[str] = (),
) -> "Figure":
    """Draw the map of each token of one head on one slide, with typical patches of the cohort.

    `weights` are (N, M), of that head. The panels below have a point per group for each token of
    all heads; `names` are their labels, and heads have `per_head` tokens each.
    """
    tokens = weights.shape[1]
    bands = ceil(tokens / COLUMNS)
    columns = ceil(tokens / bands)
    wide = 3.4 if columns < 3 else 2.7
    rows = ceil(max((len(part.patches) for part in galleries), default=0) / COLUMNS)
    map_height = wide * float(np.clip(canvas.aspect, 0.3, 1.5)) + 0.3
    gallery_height = wide * rows / COLUMNS + 0.1
    heights = ([map_height, gallery_height] if rows else [map_height]) * bands
    each = len(heights) // bands
    heights += [2.1] * len(panels)
    figure = new_figure(max(wide * columns + 0.9, 8.5), sum(heights) + 0.9)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    maps = []
    for token in range(tokens):
        row, column = token // columns * each, token % columns
        maps.append(figure.add_subplot(grid[row, column]))
        values = weights[:, token]
        name = f"Token {token + 1}   {values.mean():.1%}"
        shown = draw_map(maps[-1], canvas, values, colours=COLOUR_MAP, limits=(0, 1), title=name)
        if rows:
            below = figure.add_subplot(grid[row + 1, column])
            draw_gallery(below, galleries[token], columns=COLUMNS, rows=rows)
    scale_bar(maps[0], canvas)
    colour_bar(maps, shown, "weight", aspect=30)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(grid[bands * each + number, :])
        _draw_panel(axes, panel, names, per_head, legend=number == 0)
    figure.suptitle(title, fontsize=11)
    caption(figure, *remarks)
    return figure


def _draw_panel(
    axes: "Axes", panel: TokenPanel, names: Sequence[str], per_head: int, *, legend: bool
) -> None:
    tidy(axes, title=panel.title, ylabel=panel.ylabel)
    axes.grid(visible=False, axis="x")
    places, groups = np.arange(len(names)), len(panel.groups)
    for head in range(per_head, len(names), per_head):
        axes.axvline(head - 0.5, color="#CCCCCC", lw=0.6)
    axes.axhline(0, color=GREY, lw=0.8)
    for number, (name, points) in enumerate(panel.groups.items()):
        across = places + (number - (groups - 1) / 2) * 0.6 / max(groups, 2)
        colour = COLOURS[number % len(COLOURS)]
        axes.vlines(across, points.low, points.high, color=colour, lw=1.6, alpha=0.6)
        axes.plot(across, points.mean, "o", color=colour, ms=3.6, mew=0, label=name)
    if legend and groups > 1:
        axes.legend(
            frameon=False,
            fontsize=8,
            loc="lower right",
            bbox_to_anchor=(1.0, 0.98),
            ncols=groups,
            handletextpad=0.2,
            columnspacing=1.2,
        )
    shown = places if len(names) <= LABELLED else places[::per_head]
    axes.set_xticks(shown, [names[n] for n in shown], fontsize=7.5)
    axes.set_xlim(-0.6, len(names) - 0.4)
