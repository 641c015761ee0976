"""Scatter plots of predicted against true numbers, and of their errors."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from caprmil.figures.reliability import Bin
from caprmil.figures.style import BLUE, GREY, VERMILLION, Values, caption, new_figure, tidy
from caprmil.figures.svg import add_tooltip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def predicted_against_true(
    folds: Mapping[str, tuple[Values, Values]], *, title: str = "Test parts"
) -> "Figure":
    """Draw the predicted number of each test slide against the true one, with the identity line.

    `folds` are the true and the predicted numbers of each fold.
    """
    if not folds:
        raise ValueError("There are no folds to draw.")
    figure = new_figure(4.2, 4.2)
    axes = figure.subplots()
    tidy(axes, title=title, xlabel="True value", ylabel="Predicted value")
    true = np.concatenate([np.asarray(true, dtype=float) for true, _ in folds.values()])
    predicted = np.concatenate([np.asarray(found, dtype=float) for _, found in folds.values()])
    ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]
    axes.plot(ends, ends, color=GREY, lw=1, ls="--", label="predicted = true")
    for name, (own, found) in folds.items():
        (points,) = axes.plot(own, found, "o", color=BLUE, ms=4, alpha=0.6, mec="none")
        add_tooltip(points, name)
    axes.legend(frameon=False, fontsize=9)
    return figure


def residuals(folds: Mapping[str, tuple[Values, Values]], *, title: str = "Test parts") -> "Figure":
    """Draw the error of each test slide (predicted minus true) against the true number."""
    if not folds:
        raise ValueError("There are no folds to draw.")
    figure = new_figure(4.2, 4.2)
    axes = figure.subplots()
    tidy(axes, title=title, xlabel="True value", ylabel="Predicted minus true value")
    axes.axhline(0, color=GREY, lw=1, ls="--")
    for name, (own, found) in folds.items():
        errors = np.asarray(found, dtype=float) - np.asarray(own, dtype=float)
        (points,) = axes.plot(own, errors, "o", color=BLUE, ms=4, alpha=0.6, mec="none")
        add_tooltip(points, name)
    return figure


def value_calibration(
    before: Sequence[Bin], after: Sequence[Bin] | None = None, *, how: str = "", unit: str = "slide"
) -> "Figure":
    """Draw the mean label against the mean predicted number, in bins of equally many slides.

    Bins after a correction, if given, are in another colour; `how` is its method.
    """
    figure = new_figure(4.6, 4.6)
    axes = figure.subplots()
    tidy(axes, xlabel="Mean predicted value", ylabel="Mean true value")
    sides = [(before, VERMILLION if after else BLUE, "before"), (after or (), BLUE, f"after {how}")]
    every = np.array([(b.forecast, b.share) for bins, _, _ in sides for b in bins])
    ends = [every.min(), every.max()]
    axes.plot(ends, ends, color=GREY, lw=1, ls="--")
    for bins, colour, label in sides:
        if not bins:
            continue
        across, up, low, high, _ = np.array(bins).T
        reach = np.nan_to_num([up - low, high - up])
        axes.errorbar(across, up, yerr=reach, fmt="none", ecolor=colour, alpha=0.55)
        axes.plot(across, up, "o-", color=colour, ms=5, lw=1.2, label=label)
        for b in bins:
            (dot,) = axes.plot(b.forecast, b.share, "o", color=colour, ms=5)
            add_tooltip(dot, f"{b.slides} {unit}s, mean {b.forecast:.4g}: observed {b.share:.4g}")
    if after:
        axes.legend(frameon=False, fontsize=9)
    caption(
        figure,
        f"dot: a bin of equally many {unit}s, with the 95 % interval of its mean",
        "dashes: perfect calibration",
    )
    return figure
