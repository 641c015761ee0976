"""Relevance maps: how patches speak for and against a prediction, and the top patches."""

from collections.abc import Sequence
from math import ceil
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.canvas import (
    Canvas,
    Gallery,
    colour_bar,
    colour_limit,
    diverging,
    draw_gallery,
    draw_map,
    draw_slide,
    outline,
    scale_bar,
)
from caprmil.figures.style import BLACK, BLUE, GREY, VERMILLION, caption, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4  # patches in a row of a gallery


def relevance_maps(
    values: NDArray[Any],
    attention: NDArray[Any],
    canvas: Canvas,
    *,
    contrast: str,
    title_of_map: str = "",
    evidence: NDArray[Any] | None = None,
    negative: str = "",
    ends: tuple[str, str] = ("against", "for"),
    top_for: Gallery | None = None,
    top_against: Gallery | None = None,
    title: str = "",
    remarks: Sequence[str] = (),
) -> "Figure":
    """Draw the relevance of each patch for `contrast`, a second map, and the slide if there is one.

    `contrast` names what the values are for, e.g. a class; `negative` says what negative values
    mean, by default against it; `ends` are the words at the ends of the scale. Without a title, the
    map is the evidence. The second map is the evidence if it is given, or else attention; where
    that is constant, as with a mean, values above the slide's mean. Below are the patches with the
    highest and lowest values or, without pixels, all patches in the order of their values.
    """
    words = (f"for {contrast}", negative or f"against {contrast}")
    panels = 2 + (canvas.image is not None)
    wide = canvas.aspect < 0.45  # wide maps are drawn below each other
    columns, lines = (1, panels) if wide else (panels, 1)
    across = 9.0 if wide else 3.6
    high = lines * (across * float(np.clip(canvas.aspect, 0.05, 1.5)) + 0.4)
    galleries = [part for part in (top_for, top_against) if part is not None]
    rows = ceil(max((len(part.patches) for part in galleries), default=0) / COLUMNS)
    width = (across + 0.7) * columns
    below = width / 2 / COLUMNS * rows + 0.3 if rows else 2.0
    figure = new_figure(width, high + below + 1.0)
    grid = figure.add_gridspec(2, 1, height_ratios=(high, below))
    above = grid[0].subgridspec(lines, columns)
    row = [figure.add_subplot(above[panel]) for panel in range(panels)]
    if canvas.image is not None:
        draw_slide(row[0], canvas, title="Slide")
    unit = f"{ends[1]} or {ends[0]}"
    name = title_of_map or f"Evidence for {contrast}"
    _draw_signed(row[-2], canvas, values, name, unit)
    if rows:
        for part, colour in ((top_for, BLACK), (top_against, BLUE)):
            if part is not None:
                outline(row[-2], canvas, part.rows, colour)
    if evidence is not None:
        _draw_signed(row[-1], canvas, evidence, f"Evidence for {contrast}, after context", unit)
    elif np.ptp(attention) > 1e-6 * attention.max():
        _draw_attention(row[-1], canvas, attention)
    else:  # constant attention shows nothing
        _draw_signed(row[-1], canvas, values - values.mean(), f"{name} above the mean", unit)
    scale_bar(row[0], canvas)
    if rows:
        under = grid[1].subgridspec(1, 2)
        for column, part in enumerate((top_for, top_against)):
            axes = figure.add_subplot(under[column])
            heading = _gallery_title(values, words, supporting=column == 0)
            axes.set_title(heading, fontsize=9.5, loc="left")
            shown = part or Gallery(rows=(), patches=())
            draw_gallery(axes, shown, columns=COLUMNS, rows=rows)
    else:
        _draw_sorted(figure.add_subplot(grid[1]), values, words)
    figure.suptitle(fill(title, int(10 * width)), fontsize=11)  # 10 characters per inch
    caption(figure, *remarks)
    return figure


def _gallery_title(values: NDArray[Any], words: tuple[str, str], *, supporting: bool) -> str:
    """Return the title of a gallery. If no patch has the sign, the weakest are shown."""
    own, other = words if supporting else words[::-1]
    if (values > 0 if supporting else values < 0).any():
        return f"Most {own}"
    return f"Least {other}: none is {own}"


def _draw_signed(axes: "Axes", canvas: Canvas, values: NDArray[Any], name: str, unit: str) -> None:
    reach = colour_limit(values)
    beyond = bool((np.abs(values) > reach).any())
    span = (-reach, reach)
    shown = draw_map(axes, canvas, values, colours=diverging(), limits=span, title=name)
    ends = "both" if beyond else "neither"
    colour_bar([axes], shown, unit, extend=ends)


def _draw_attention(axes: "Axes", canvas: Canvas, attention: NDArray[Any]) -> None:
    """Draw attention as a multiple of uniform attention."""
    times = attention * len(attention)
    reach = max(colour_limit(times), 2.0)
    beyond = "max" if times.max() > reach * (1 + 1e-6) else "neither"
    shown = draw_map(axes, canvas, times, colours="viridis", limits=(0, reach), title="Attention")
    colour_bar([axes], shown, "times uniform attention", extend=beyond)


def _draw_sorted(axes: "Axes", values: NDArray[Any], words: tuple[str, str]) -> None:
    """Draw all patches in the order of their values, with the sums for and against."""
    ordered = np.sort(values.astype(np.float64))[::-1]
    ranks = np.arange(len(ordered))
    tidy(axes, title="All patches in order", xlabel="patches", ylabel=words[0])
    for word, sign, colour in zip(words, (1, -1), (VERMILLION, BLUE), strict=True):
        side = np.where(ordered * sign > 0, ordered, 0)
        name = f"{(side != 0).sum():,} {word}, sum {side.sum():+.3g}"
        axes.fill_between(ranks, side, step="mid", color=colour, lw=0, label=name)
    axes.axhline(0, color=GREY, lw=0.8)
    axes.legend(frameon=False, fontsize=9)
