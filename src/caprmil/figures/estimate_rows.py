"""Estimates with their intervals, each in a row: e.g. a score in several cohorts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from caprmil.figures.style import BLUE, GREY, new_figure, tidy
from caprmil.figures.svg import add_tooltip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class EstimateRow(NamedTuple):
    """A value and the ends of its interval, NaN if it has none."""

    name: str
    value: float
    low: float
    high: float
    is_reference: bool = False


def estimate_rows(
    rows: Sequence[EstimateRow], *, title: str, chance: float | None = None
) -> "Figure":
    """Draw each row as a dot with its interval. The grey one is the reference, as is its line."""
    figure = new_figure(5.2, 0.9 + 0.34 * len(rows))
    axes = figure.subplots()
    tidy(axes, xlabel=title)
    for at, row in enumerate(rows):
        colour = GREY if row.is_reference else BLUE
        if not np.isnan(row.low):
            axes.plot([row.low, row.high], [at, at], color=colour, lw=2)
        (dot,) = axes.plot([row.value], [at], "o", color=colour, ms=6)
        add_tooltip(dot, f"{row.name}: {row.value:.3f}")
        if row.is_reference:
            axes.axvline(row.value, color=GREY, lw=0.9, ls=(0, (2, 3)))
    if chance is not None and any(row.low <= chance + 0.1 for row in rows):
        axes.axvline(chance, color=GREY, lw=0.9, ls=(0, (4, 4)))
        axes.text(chance, -0.75, " chance", fontsize=8, color=GREY, va="center")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.95)
    axes.grid(visible=False, axis="y")
    return figure
