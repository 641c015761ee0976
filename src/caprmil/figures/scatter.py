"""Scatter plot of predicted against true numbers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from caprmil.figures.style import BLUE, GREY, Values, new_figure, tidy
from caprmil.figures.svg import add_tooltip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def predicted_against_true(folds: Mapping[str, tuple[Values, Values]]) -> "Figure":
    """Draw the predicted number of each test slide against the true one, with the identity line.

    `folds` are the true and the predicted numbers of each fold.
    """
    if not folds:
        raise ValueError("There are no folds to draw.")
    figure = new_figure(4.2, 4.2)
    axes = figure.subplots()
    tidy(axes, title="Test slides", xlabel="True value", ylabel="Predicted value")
    true = np.concatenate([np.asarray(true, dtype=float) for true, _ in folds.values()])
    predicted = np.concatenate([np.asarray(found, dtype=float) for _, found in folds.values()])
    ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]
    axes.plot(ends, ends, color=GREY, lw=1, ls="--", label="predicted = true")
    for name, (own, found) in folds.items():
        (points,) = axes.plot(own, found, "o", color=BLUE, ms=4, alpha=0.6, mec="none")
        add_tooltip(points, name)
    axes.legend(frameon=False, fontsize=9)
    return figure
