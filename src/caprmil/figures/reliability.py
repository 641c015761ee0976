"""Reliability: how sure a model was against how often it was right, before and after."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.style import BLUE, GREY, VERMILLION, caption, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Bin(NamedTuple):
    """Slides with answers of about the same probability."""

    forecast: float  # mean probability
    share: float  # in which it was so
    low: float  # of an interval of that share
    high: float
    slides: int


class Reliability(NamedTuple):
    """One side of the picture: the bins, the probability given to each slide, and the ACE."""

    bins: tuple[Bin, ...]
    scores: NDArray[np.float64]
    ace: float


def reliability(before: Reliability, after: Reliability, *, event: str) -> "Figure":
    """Draw the share of slides in which `event` was so, against its probability.

    A dot is a bin with its interval, the diagonal is perfect calibration, and the bars below count
    the slides. Before temperature scaling on the left, after it on the right.
    """
    figure = new_figure(8.4, 5.4)
    grid = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3.6, 1))
    sides = (("Before", before, VERMILLION), ("After temperature scaling", after, BLUE))
    for column, (title, side, colour) in enumerate(sides):
        tidy(grid[0, column], title=f"{title}   ACE {side.ace:.3f}")
        _draw_bins(grid[0, column], side, colour)
        tidy(grid[1, column], across=f"Probability of {event}")
        edges = np.linspace(0, 1, 21)
        grid[1, column].hist(side.scores, edges, color=colour, alpha=0.75, ec="white", lw=0.6)
    grid[0, 0].set_ylabel("Share of slides", fontsize=10)
    grid[1, 0].set_ylabel("Slides", fontsize=10)
    grid[1, 0].yaxis.get_major_locator().set_params(integer=True)
    meaning = "dot: equally many slides, with its 95 % interval"
    caption(figure, meaning, "dashes: perfect calibration")
    return figure


def _draw_bins(axes: "Axes", side: Reliability, colour: str) -> None:
    across, up, low, high, _ = np.array(side.bins).T
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 4)))
    # Wilson's interval may end on the share itself, and rounding a hair beyond it.
    reach = np.clip([up - low, high - up], 0, None)
    axes.errorbar(across, up, yerr=reach, fmt="none", ecolor=colour, elinewidth=1.2, alpha=0.55)
    axes.plot(across, up, "o-", color=colour, lw=1.6, ms=6, mec="white", mew=0.8)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
