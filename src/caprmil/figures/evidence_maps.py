"""Evidence: where a slide speaks for an answer and where against, beside attention."""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.canvas import (
    Canvas,
    Gallery,
    colour_bar,
    diverging,
    draw_gallery,
    draw_ground,
    draw_map,
    limit,
    outline,
    scale_bar,
)
from caprmil.figures.style import BLACK, BLUE, GREY, VERMILLION, caption, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 4  # patches in a row of a gallery


def evidence_maps(
    evidence: NDArray[Any],
    attention: NDArray[Any],
    canvas: Canvas,
    *,
    answer: str,
    pro: Gallery | None = None,
    contra: Gallery | None = None,
    title: str = "",
    remarks: Sequence[str] = (),
) -> "Figure":
    """Draw what each patch adds to an answer, the attention it has, and the slide if there is one.

    Where attention is even, as with a mean, there is evidence above the slide's mean instead.
    Below are the patches that speak most for the answer and most against it or, without pixels,
    all patches in the order of their evidence.
    """
    panels = 2 + (canvas.image is not None)
    wide = canvas.aspect < 0.45  # such maps stand above each other
    columns, lines = (1, panels) if wide else (panels, 1)
    across = 9.0 if wide else 3.6
    high = lines * (across * float(np.clip(canvas.aspect, 0.05, 1.5)) + 0.4)
    galleries = [part for part in (pro, contra) if part is not None]
    deep = ceil(max((len(part.patches) for part in galleries), default=0) / ACROSS)
    width = (across + 0.7) * columns
    below = width / 2 / ACROSS * deep + 0.3 if deep else 2.0
    figure = new_figure(width, high + below + 1.0)
    grid = figure.add_gridspec(2, 1, height_ratios=(high, below))
    above = grid[0].subgridspec(lines, columns)
    row = [figure.add_subplot(above[place]) for place in range(panels)]
    if canvas.image is not None:
        draw_ground(row[0], canvas, title="Slide")
    _draw_evidence(row[-2], canvas, evidence, answer)
    if deep:
        for part, colour in ((pro, BLACK), (contra, BLUE)):
            if part is not None:
                outline(row[-2], canvas, part.rows, colour)
    if np.ptp(attention) > 1e-6 * attention.max():
        _draw_attention(row[-1], canvas, attention)
    else:  # all patches have the same share: what sets them apart says more
        _draw_evidence(row[-1], canvas, evidence - evidence.mean(), answer, " above the mean")
    scale_bar(row[0], canvas)
    if deep:
        under = grid[1].subgridspec(1, 2)
        for place, part in enumerate((pro, contra)):
            axes = figure.add_subplot(under[place])
            axes.set_title(_name(evidence, answer, pro=not place), fontsize=9.5, loc="left")
            shown = part or Gallery(rows=(), patches=())
            draw_gallery(axes, shown, columns=ACROSS, deep=deep)
    else:
        _draw_order(figure.add_subplot(grid[1]), evidence, answer)
    figure.suptitle(title, fontsize=11)
    caption(figure, *remarks)
    return figure


def _name(evidence: NDArray[Any], answer: str, *, pro: bool) -> str:
    """Return what a gallery shows; where no patch takes a side, that of the least for the other."""
    sided = evidence > 0 if pro else evidence < 0
    if sided.any():
        return f"Most {'for' if pro else 'against'} {answer}"
    return f"Least against {answer}: none is for it" if pro else f"Least for {answer}: none against"


def _draw_evidence(
    axes: "Axes", canvas: Canvas, evidence: NDArray[Any], answer: str, kind: str = ""
) -> None:
    reach = limit(evidence)
    name, beyond = f"Evidence for {answer}{kind}", bool((np.abs(evidence) > reach).any())
    span = (-reach, reach)
    shown = draw_map(axes, canvas, evidence, colours=diverging(), limits=span, title=name)
    ends = "both" if beyond else "neither"
    colour_bar([axes], shown, "for or against", extend=ends)


def _draw_attention(axes: "Axes", canvas: Canvas, attention: NDArray[Any]) -> None:
    """Draw attention as a multiple of what each patch would have if all had the same."""
    times = attention * len(attention)
    reach = max(limit(times), 2.0)
    beyond = "max" if times.max() > reach * (1 + 1e-6) else "neither"
    shown = draw_map(axes, canvas, times, colours="viridis", limits=(0, reach), title="Attention")
    colour_bar([axes], shown, "times an even share", extend=beyond)


def _draw_order(axes: "Axes", evidence: NDArray[Any], answer: str) -> None:
    """Draw all patches in the order of their evidence, and what both sides come to."""
    ordered = np.sort(evidence.astype(np.float64))[::-1]
    place = np.arange(len(ordered))
    tidy(axes, title="All patches in order", across="patches", up=f"evidence for {answer}")
    for sign, colour, word in ((1, VERMILLION, "for"), (-1, BLUE, "against")):
        side = np.where(ordered * sign > 0, ordered, 0)
        name = f"{(side != 0).sum():,} {word}, together {side.sum():+.3g}"
        axes.fill_between(place, side, step="mid", color=colour, lw=0, label=name)
    axes.axhline(0, color=GREY, lw=0.8)
    axes.legend(frameon=False, fontsize=9)
