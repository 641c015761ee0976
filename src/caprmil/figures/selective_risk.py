"""Selective risk: how wrong the answers are that are kept, if the least certain are not given."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from caprmil.figures.style import BLUE, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def selective_risk(
    points: Sequence[tuple[float, float]], *, title: str, unit: str = "slide"
) -> "Figure":
    """Draw the mean error of the answers that are kept, by their share of all that were tested."""
    kept, risk = zip(*points, strict=True)
    figure = new_figure(4.2, 3.0)
    axes = figure.subplots()
    tidy(axes, title=f"Test {unit}s", xlabel=f"Share of {unit}s that is kept", ylabel=title)
    axes.plot(kept, risk, "o-", color=BLUE, ms=4, lw=1.5)
    axes.set(xlim=(0, 1.03), ylim=(0, 1.1 * max(risk) or 1.0))
    return figure
