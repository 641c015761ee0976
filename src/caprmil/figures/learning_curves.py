"""Learning curves: losses, validation metric and learning rate over epochs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from caprmil.figures.style import BLUE, GREY, VERMILLION, Values, new_figure, tidy
from caprmil.figures.svg import add_tooltip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """A column of a history, and how it is drawn."""

    column: str
    name: str
    colour: str


LOSS, RATE = "Loss", "Learning rate"


def panels_of(metric: str, title: str) -> dict[str, tuple[Curve, ...]]:
    """Return the panels of a figure by title, for a validation metric of that name and title."""
    return {
        LOSS: (Curve("train_loss", "training", BLUE), Curve("val_loss", "validation", VERMILLION)),
        f"Validation {title}": (Curve(f"val_{metric}", "validation", VERMILLION),),
        RATE: (Curve("lr", "learning rate", GREY),),
    }


def learning_curves(
    histories: Mapping[str, Mapping[str, Values]],
    *,
    metric: str = "auc",
    title: str = "AUC",
    kept: Mapping[str, int] | None = None,
    panels: Sequence[str] | None = None,
) -> "Figure":
    """Draw losses, a validation metric and the learning rate over epochs, a line for each fold.

    A history holds any of train_loss, val_loss, val_<metric> and lr, with one value per epoch. Its
    column `epoch` is needed only if epochs do not run from 0. `kept` is the epoch of each fold
    whose weights were kept. NaN is an epoch without a value. `panels` are titles of panels.
    """
    columns, known_panels = set().union(*histories.values()), panels_of(metric, title)
    chosen = {name: known_panels[name] for name in panels or known_panels}
    shown = {name: own for name, own in chosen.items() if any(c.column in columns for c in own)}
    if not shown:
        known = ", ".join(curve.column for own in chosen.values() for curve in own)
        raise ValueError(f"A history holds some of {known}. {sorted(columns)=}")
    widths = [2 if name == RATE else 3 for name in shown]
    figure = new_figure(1.4 * sum(widths), 3.4)
    row = figure.subplots(1, len(shown), width_ratios=widths, squeeze=False)[0]
    for axes, (name, curves) in zip(row, shown.items(), strict=True):
        tidy(axes, title=name, xlabel="Epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        for curve in curves:
            _draw_folds(axes, histories, curve, kept or {})
        if name == RATE:
            axes.locator_params(axis="y", nbins=5)
            axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
        else:
            axes.legend(frameon=False, fontsize=9)
    return figure


def _draw_folds(
    axes: "Axes",
    histories: Mapping[str, Mapping[str, Values]],
    curve: Curve,
    kept: Mapping[str, int],
) -> None:
    name, kept_name = curve.name, "weights kept"
    for fold, history in histories.items():
        values = np.asarray(history.get(curve.column, ()), dtype=float)
        epochs = np.asarray(history.get("epoch", np.arange(len(values))), dtype=float)
        epochs, values = epochs[: len(values)][~np.isnan(values)], values[~np.isnan(values)]
        if len(values):
            (line,) = axes.plot(epochs, values, color=curve.colour, lw=1, alpha=0.7, label=name)
            add_tooltip(line, f"{fold}, {curve.name}")
            name = "_"  # one entry in the legend for all folds
        if fold in kept and curve.column.startswith("val_") and kept[fold] in epochs:
            value = values[epochs == kept[fold]]
            style: dict[str, Any] = {"color": curve.colour, "mec": "white", "ms": 6, "zorder": 3}
            (dot,) = axes.plot(kept[fold], value[0], "o", label=kept_name, **style)
            add_tooltip(dot, f"{fold}: weights of epoch {kept[fold]} kept, {value[0]:.3f}")
            kept_name = "_"
