"""Pictures of numbers: learning curves, ROC curves, and models side by side.

Figures are objects (no pyplot, no global state), so they can be made in threads and on servers
without a display. Matplotlib loads inside the functions. Colours are those of Okabe and Ito, which
people with any colour vision can tell apart.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil import files
from caprmil.errors import CohortError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values: TypeAlias = Sequence[float | int] | NDArray[Any]
Slides: TypeAlias = tuple[NDArray[np.integer], NDArray[np.floating]]  # labels and probabilities

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK, YELLOW = "#CC79A7", "#56B4E9", "#000000", "#F0E442"
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, YELLOW)
GREY = "#777777"

TITLES = {
    "auc": "AUC",
    "accuracy": "Accuracy",
    "balanced_accuracy": "Balanced accuracy",
    "f1": "F1",
    "kappa": "Quadratic kappa",
    "ace": "ACE (lower is better)",
    "ece": "ECE (lower is better)",
    "ece_positive": "ECE of class 1 (lower is better)",
    "brier": "Brier score (lower is better)",
}
CHANCE = {"auc": 0.5, "kappa": 0.0}
FROM_ZERO = frozenset({"ace", "ece", "ece_positive", "brier"})


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
    figure = _figure(1.4 * sum(widths), 3.4)
    row = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        _tidy(axes, title=title, across="Epoch")
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
    figure = _figure(4.8, 4.8)
    axes = figure.subplots()
    _tidy(axes, across="False positive rate", up="True positive rate")
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


def model_bars(
    scores: Mapping[str, Mapping[str, Values]], *, metrics: Sequence[str] = ("auc", "ace")
) -> "Figure":
    """Draw models side by side: `scores[model][metric]` holds a value for each fold.

    A dot is a fold, the bar is the mean (with the standard deviation in numbers beside it), and
    NaN is left out. Chance is a dashed line.
    """
    figure = _figure(0.8 + 3.9 * len(metrics), 1.3 + 0.46 * len(scores))
    row = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(row, metrics, strict=True):
        _tidy(axes, title=TITLES.get(metric, metric))
        axes.grid(visible=False, axis="y")
        if metric in CHANCE:
            axes.axvline(CHANCE[metric], color=GREY, lw=1, ls=(0, (4, 4)))
            axes.text(CHANCE[metric], len(scores) - 0.45, " chance", color=GREY, fontsize=8)
        for place, model in enumerate(scores):
            values = np.asarray(scores[model].get(metric, ()), dtype=float)
            values = values[~np.isnan(values)]
            if len(values):
                _draw_model(axes, place, values)
        if metric in FROM_ZERO:
            axes.set_xlim(left=0)
    row[0].set_yticks(range(len(scores)), labels=list(scores), fontsize=10)
    row[0].set_ylim(len(scores) - 0.4, -0.6)  # the first model on top
    figure.supxlabel("dot: one fold    bar: mean of the folds", fontsize=8, color=GREY)
    return figure


def _draw_model(axes: "Axes", place: int, values: NDArray[np.float64]) -> None:
    mean, spread = values.mean(), ""
    axes.plot([mean, mean], [place - 0.3, place + 0.3], color=VERMILLION, lw=2.5)
    aside = np.full(len(values), float(place))
    if len(values) > 1:
        aside += np.linspace(-0.16, 0.16, len(values))
        spread = f" ± {values.std(ddof=1):.3f}"
    axes.plot(values, aside, "o", color=BLUE, ms=5.5, mec="white", mew=0.6, clip_on=False)
    beside = axes.get_yaxis_transform()
    axes.text(1.02, place, f"{mean:.3f}{spread}", transform=beside, va="center", fontsize=9)


def save(figure: "Figure", path: Path | str, dpi: int = 150, *, replace: bool = False) -> Path:
    """Write the figure; the ending of the name says the format (png, pdf, svg)."""
    with files.beside(path, replace=replace) as passing:
        figure.savefig(passing, dpi=dpi)
    return Path(path)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: "Axes", *, title: str = "", across: str = "", up: str = "") -> None:
    """Leave only the lines that carry something."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=3)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(across, fontsize=10)
    axes.set_ylabel(up, fontsize=10)
