"""Curves of a training: losses over epochs, and ROC."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError
from caprmil.figures.style import (
    BLUE,
    COLOURS,
    GREY,
    VERMILLION,
    Slides,
    Values,
    new_figure,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """A column of a history, and how it is drawn."""

    column: str
    name: str
    colour: str


PANELS = {
    "Loss": (Curve("train_loss", "training", BLUE), Curve("val_loss", "validation", VERMILLION)),
    "Validation AUC": (Curve("val_auc", "validation", VERMILLION),),
    "Learning rate": (Curve("lr", "learning rate", GREY),),
}


def learning_curves(
    histories: Mapping[str, Mapping[str, Values]],
    *,
    kept: Mapping[str, int] | None = None,
) -> "Figure":
    """Draw losses, validation AUC and learning rate over epochs, a thin line for each fold.

    A history holds, epoch by epoch, any of train_loss, val_loss, val_auc and lr; `epoch` if they
    do not simply run from 0. `kept` says, by fold, at which epoch the weights were kept. NaN is
    an epoch without a value.
    """
    columns = set().union(*histories.values())
    panels = {t: cs for t, cs in PANELS.items() if any(c.column in columns for c in cs)}
    if not panels:
        known = ", ".join(curve.column for curves in PANELS.values() for curve in curves)
        raise ValueError(f"A history holds some of {known}. {sorted(columns)=}")
    widths = [2 if title == "Learning rate" else 3 for title in panels]
    figure = new_figure(1.4 * sum(widths), 3.4)
    row = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        tidy(axes, title=title, across="Epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        for curve in curves:
            _draw_folds(axes, histories, curve, kept or {})
        if title == "Learning rate":
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
    name, dots = curve.name, []
    for fold, history in histories.items():
        values = np.asarray(history.get(curve.column, ()), dtype=float)
        epochs = np.asarray(history.get("epoch", np.arange(len(values))), dtype=float)
        epochs, values = epochs[: len(values)][~np.isnan(values)], values[~np.isnan(values)]
        if len(values):
            axes.plot(epochs, values, color=curve.colour, lw=1, alpha=0.7, label=name)
            name = "_"  # one entry in the legend for all folds
        if fold in kept and curve.column.startswith("val_"):
            dots += [(e, v) for e, v in zip(epochs, values, strict=True) if e == kept[fold]]
    if dots:
        across, up = zip(*dots, strict=True)
        axes.plot(across, up, "o", color=curve.colour, mec="white", ms=6, label="weights kept")


def roc_curves(folds: Mapping[str, Slides], classes: Sequence[str]) -> "Figure":
    """Draw ROC curves from the labels and probabilities of each fold.

    Of two classes: the second, a thin line for each fold, and their mean with a band of one
    standard deviation. Of more: one line for each class against the rest, the folds pooled.
    """
    figure = new_figure(4.8, 4.8)
    axes = figure.subplots()
    tidy(axes, across="False positive rate", up="True positive rate")
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 4)))
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    if len(classes) == 2:
        axes.set_title(f"{classes[1]} against {classes[0]}", fontsize=11, loc="left")
        drawn = _draw_mean_roc(axes, folds)
    else:
        axes.set_title("Each class against the rest, folds pooled", fontsize=11, loc="left")
        drawn = _draw_class_rocs(axes, folds, classes)
    if not drawn:
        raise CohortError("A ROC curve needs slides of two classes at the least in one fold.")
    title = "class (AUC)" if len(classes) > 2 else None
    axes.legend(frameon=False, fontsize=9, loc="lower right", title=title)
    return figure


def _draw_mean_roc(axes: "Axes", folds: Mapping[str, Slides]) -> bool:
    grid = np.linspace(0, 1, 201)
    heights, areas = [], []
    for labels, probabilities in folds.values():
        if 0 < (labels == 1).sum() < len(labels):
            false, true = _roc(labels == 1, probabilities[:, 1])
            axes.plot(false, true, color=BLUE, lw=0.8, alpha=0.4)
            heights.append(np.interp(grid, false, true))
            areas.append(_area(false, true))
    if not areas:
        return False
    mean = np.mean(heights, axis=0)
    name = f"AUC {areas[0]:.3f}"
    if len(areas) > 1:
        spread = np.std(heights, axis=0, ddof=1)
        low, high = np.clip(mean - spread, 0, 1), np.clip(mean + spread, 0, 1)
        axes.fill_between(grid, low, high, color=BLUE, alpha=0.15, lw=0, label="± 1 std")
        deviation = np.std(areas, ddof=1)
        name = f"mean of {len(areas)} folds\nAUC {np.mean(areas):.3f} ± {deviation:.3f}"
    axes.plot(np.r_[0, grid], np.r_[0, mean], color=BLUE, lw=2.2, label=name)
    return True


def _draw_class_rocs(
    axes: "Axes",
    folds: Mapping[str, Slides],
    classes: Sequence[str],
) -> bool:
    labels = np.concatenate([labels for labels, _ in folds.values()])
    probabilities = np.concatenate([probabilities for _, probabilities in folds.values()])
    present = [code for code in range(len(classes)) if 0 < (labels == code).sum() < len(labels)]
    for code in present:
        false, true = _roc(labels == code, probabilities[:, code])
        name = f"{classes[code]} ({_area(false, true):.3f})"
        style = "-" if code < len(COLOURS) else "--"
        axes.plot(false, true, color=COLOURS[code % len(COLOURS)], ls=style, lw=1.8, label=name)
    return bool(present)


def _roc(
    hits: NDArray[np.bool_], scores: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return false and true positive rates from the highest threshold down; a tie is one step."""
    order = np.argsort(-scores, kind="stable")
    hits, scores = hits[order], scores[order]
    last = np.r_[np.flatnonzero(np.diff(scores)), len(scores) - 1]
    true, false = np.cumsum(hits)[last], np.cumsum(~hits)[last]
    return np.r_[0, false / false[-1]], np.r_[0, true / true[-1]]


def _area(false: NDArray[np.float64], true: NDArray[np.float64]) -> float:
    return float((np.diff(false) * (true[1:] + true[:-1]) / 2).sum())
