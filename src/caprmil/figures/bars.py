"""Models side by side: the mean and every fold of each metric."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.style import (
    BLUE,
    GREY,
    VERMILLION,
    Metric,
    Values,
    caption,
    new_figure,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def model_bars(
    scores: Mapping[str, Mapping[str, Values]], *, metrics: Sequence[Metric]
) -> "Figure":
    """Draw models in rows; `scores[model][name of a metric]` has a value for each fold.

    A dot is a fold, the bar is the mean, with mean and standard deviation as text. NaN is left out.
    Chance is a dashed line.
    """
    figure = new_figure(0.8 + 3.9 * len(metrics), 1.3 + 0.46 * len(scores))
    row = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(row, metrics, strict=True):
        tidy(axes, title=metric.long_title)
        axes.grid(visible=False, axis="y")
        if metric.chance is not None:
            axes.axvline(metric.chance, color=GREY, lw=1, ls=(0, (4, 4)))
            axes.text(metric.chance, len(scores) - 0.45, " chance", color=GREY, fontsize=8)
        for number, model in enumerate(scores):
            values = np.asarray(scores[model].get(metric.name, ()), dtype=float)
            values = values[~np.isnan(values)]
            if len(values):
                _draw_model(axes, number, values)
        if not metric.higher_is_better:  # an error starts at 0
            axes.set_xlim(left=0)
    row[0].set_yticks(range(len(scores)), labels=list(scores), fontsize=10)
    row[0].set_ylim(len(scores) - 0.4, -0.6)  # the first model on top
    caption(figure, "dot: one fold", "bar: mean of the folds")
    return figure


def _draw_model(axes: "Axes", number: int, values: NDArray[np.float64]) -> None:
    mean, spread = values.mean(), ""
    axes.plot([mean, mean], [number - 0.3, number + 0.3], color=VERMILLION, lw=2.5)
    heights = np.full(len(values), float(number))
    if len(values) > 1:
        heights += np.linspace(-0.16, 0.16, len(values))
        spread = f" ± {values.std(ddof=1):.3f}"
    axes.plot(values, heights, "o", color=BLUE, ms=5.5, mec="white", mew=0.6, clip_on=False)
    right = axes.get_yaxis_transform()
    axes.text(1.02, number, f"{mean:.3f}{spread}", transform=right, va="center", fontsize=9)
