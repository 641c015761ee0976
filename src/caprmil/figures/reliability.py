"""Reliability: predicted probability against observed frequency, before and after calibration."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.style import BLUE, GREY, VERMILLION, caption, new_figure, tidy
from caprmil.figures.svg import add_tooltip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Bin(NamedTuple):
    """Slides with predictions of about the same probability."""

    forecast: float  # mean probability
    share: float  # of slides in which the event occurred
    low: float  # of an interval of that share
    high: float
    slides: int


class Reliability(NamedTuple):
    """The bins of one set of predictions, the probability of each slide, and the ACE."""

    bins: tuple[Bin, ...]
    scores: NDArray[np.float64]
    ace: float


def reliability(
    before: Reliability,
    after: Reliability | None = None,
    *,
    event: str,
    folds: Mapping[str, Reliability] | None = None,
    how: str = "temperature scaling",
    unit: str = "slide",
) -> "Figure":
    """Draw the share of slides in which `event` occurred against its predicted probability.

    A dot is a bin with its interval, the diagonal is perfect calibration, and the bars below count
    the slides. Predictions before calibration are on the left, those after it, if given, on the
    right. `folds` are thin lines behind those before; `how` is the method of calibration,
    and `unit` what is predicted.
    """
    sides = {"": (before, BLUE)}
    if after is not None:
        sides = {"Before": (before, VERMILLION), f"After {how}": (after, BLUE)}
    figure = new_figure(4.2 * len(sides) + 0.6 * (after is None), 5.4)
    grid = figure.subplots(
        2, len(sides), sharex=True, sharey="row", height_ratios=(3.6, 1), squeeze=False
    )
    for column, (title, (side, colour)) in enumerate(sides.items()):
        ace = "" if np.isnan(side.ace) else f"ACE {side.ace:.3f}"
        tidy(grid[0, column], title="   ".join(filter(None, (title, ace))))
        if column == 0:
            for fold, own in (folds or {}).items():
                across, up = [b.forecast for b in own.bins], [b.share for b in own.bins]
                (line,) = grid[0, 0].plot(across, up, color=colour, lw=0.8, alpha=0.4)
                add_tooltip(line, fold)
        _draw_bins(grid[0, column], side, colour, unit)
        tidy(grid[1, column], xlabel=f"Probability of {event}")
        edges = np.linspace(0, 1, 21)
        grid[1, column].hist(side.scores, edges, color=colour, alpha=0.75, ec="white", lw=0.6)
    grid[0, 0].set_ylabel(f"Share of {unit}s", fontsize=10)
    grid[1, 0].set_ylabel(f"{unit.capitalize()}s", fontsize=10)
    grid[1, 0].yaxis.get_major_locator().set_params(integer=True)
    thin = "thin lines: single folds" if folds else ""
    meaning = f"dot: a bin of equally many {unit}s, with its 95 % interval"
    caption(figure, meaning, "dashes: perfect calibration", thin)
    return figure


def _draw_bins(axes: "Axes", side: Reliability, colour: str, unit: str) -> None:
    across, up, low, high, slides = np.array(side.bins).T
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 4)))
    # Wilson's interval may end on the share itself. Rounding must not move its end beyond that.
    reach = np.clip([up - low, high - up], 0, None)
    axes.errorbar(across, up, yerr=reach, fmt="none", ecolor=colour, elinewidth=1.2, alpha=0.55)
    for x, y, n in zip(across, up, slides, strict=True):
        (dot,) = axes.plot(x, y, "o", color=colour, ms=6, mec="white", mew=0.8, zorder=3)
        add_tooltip(dot, f"{n:.0f} {unit}s, mean probability {x:.3f}: observed in {y:.0%}")
    axes.plot(across, up, color=colour, lw=1.6)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
