"""Survival curves of groups with the numbers at risk, and calibration at horizons."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.style import BLUE, COLOURS, GREY, VERMILLION, caption, new_figure, tidy
from caprmil.figures.svg import add_tooltip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TICKS = 6  # of time, with the numbers at risk


class GroupCurve(NamedTuple):
    """The survival curve of a group: a step at each time, with an interval."""

    title: str
    times: NDArray[np.float64]
    survival: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    follow_up: NDArray[np.float64]
    """The time of every member of the group."""
    censored: NDArray[np.float64]
    """The times at which members were censored."""


class HorizonGroups(NamedTuple):
    """Predicted and observed survival at a horizon, for groups of similar prediction."""

    title: str
    predicted: Sequence[float]
    observed: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def survival_curves(curves: Sequence[GroupCurve], *, xlabel: str, title: str = "") -> "Figure":
    """Draw the survival curve of each group, with the numbers at risk below."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(5.6, 4.0 + 0.26 * len(curves))
    axes, below = figure.subplots(2, 1, height_ratios=(9, 0.5 + 0.75 * len(curves)))
    tidy(axes, title=title, xlabel=xlabel, ylabel="Survival")
    colours = [BLUE, VERMILLION, *COLOURS[2:]]
    longest = max(float(curve.follow_up.max()) for curve in curves)
    for curve, colour in zip(curves, colours, strict=False):
        end = float(curve.follow_up.max())
        across = np.concatenate([[0.0], curve.times, [end]])

        def steps(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.concatenate([[1.0], values, values[-1:]])

        low, high = steps(curve.low), steps(curve.high)
        axes.fill_between(across, low, high, step="post", color=colour, alpha=0.12, lw=0)
        name = f"{curve.title} ({len(curve.follow_up):,})"
        (line,) = axes.plot(
            across, steps(curve.survival), drawstyle="steps-post", color=colour, lw=2, label=name
        )
        add_tooltip(line, name)
        place = np.searchsorted(curve.times, curve.censored, side="right")
        at = np.concatenate([[1.0], curve.survival])[place]
        axes.plot(curve.censored, at, "|", color=colour, ms=6, mew=1)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, longest * 1.02)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    ticks = [float(tick) for tick in MaxNLocator(TICKS).tick_values(0, longest)]
    ticks = [tick for tick in ticks if 0 <= tick <= longest]
    axes.set_xticks(ticks)
    below.set_title("Number at risk", fontsize=9, loc="left", color=GREY)
    below.spines[:].set_visible(False)
    below.set_xlim(axes.get_xlim())
    below.set_ylim(len(curves) - 0.5, -0.5)
    below.set_xticks([])
    below.set_yticks(range(len(curves)), labels=[curve.title for curve in curves], fontsize=9)
    below.tick_params(length=0, pad=14)
    for row, (curve, colour) in enumerate(zip(curves, colours, strict=False)):
        for tick in ticks:
            number = f"{int((curve.follow_up >= tick).sum()):,}"
            below.text(tick, row, number, fontsize=9, color=colour, ha="center", va="center")
    caption(figure, "bands: 95 % intervals; marks: censored")
    return figure


def survival_calibration(
    panels: Sequence[HorizonGroups], after: Sequence[HorizonGroups] = (), *, how: str = ""
) -> "Figure":
    """Draw observed against predicted survival at each horizon. A dot is a group of patients.

    `after` are the same after a correction, and `how` is its method.
    """
    corrected = {panel.title: panel for panel in after}
    figure = new_figure(2.7 * len(panels) + 0.5, 3.2)
    for number, (axes, panel) in enumerate(
        zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True)
    ):
        first = number == 0
        tidy(
            axes,
            title=panel.title,
            xlabel="Predicted survival",
            ylabel="Observed survival" if first else "",
        )
        axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--")
        sides = [(panel, VERMILLION if after else BLUE, "before")]
        if panel.title in corrected:
            sides.append((corrected[panel.title], BLUE, f"after {how}"))
        for side, colour, label in sides:
            observed = np.array(side.observed)
            reach = np.abs(np.array([side.low, side.high]) - observed)
            axes.errorbar(
                side.predicted,
                observed,
                yerr=reach,
                fmt="o-",
                color=colour,
                ms=5,
                lw=1.2,
                capsize=2,
                label=label,
            )
        if first and after:
            axes.legend(frameon=False, fontsize=8)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_aspect("equal")
    caption(figure, "observed: Kaplan-Meier with 95 % intervals")
    return figure
