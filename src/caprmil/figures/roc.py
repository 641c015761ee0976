"""ROC curves, by fold or by class."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, plural
from caprmil.figures.style import BLUE, COLOURS, GREY, Slides, new_figure, tidy
from caprmil.figures.svg import add_tooltip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Curve: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]  # false and true positive rates

MOST_LINES = 20  # classes with a line of their own


def roc_curves(
    folds: Mapping[str, Slides], classes: Sequence[str], *, name: str = "class"
) -> "Figure":
    """Draw ROC curves from the labels and probabilities of each fold.

    With two classes, the second is the positive one: a thin line for each fold, and their mean
    with a band of one standard deviation. With more, one line for each class against the rest,
    the folds pooled; of many classes, only their mean and its band. The dashed line is chance.
    `name` is what a class is called: e.g. grade.
    """
    figure = new_figure(4.8, 4.8)
    axes = figure.subplots()
    tidy(axes, xlabel="False positive rate", ylabel="True positive rate")
    (chance,) = axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 4)))
    add_tooltip(chance, "chance, AUC 0.5")
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    if len(classes) == 2:
        axes.set_title(f"{classes[1]} against {classes[0]}", fontsize=11, loc="left")
        drawn = _draw_mean_roc(axes, folds)
    elif len(classes) <= MOST_LINES:
        axes.set_title(f"Each {name} against the rest, folds pooled", fontsize=11, loc="left")
        drawn = _draw_class_rocs(axes, folds, classes)
    else:
        axes.set_title(
            f"{plural(name).capitalize()} against the rest, folds pooled", fontsize=11, loc="left"
        )
        drawn = _draw_mean_of_classes(axes, folds, classes)
    if not drawn:
        raise CohortError("A ROC curve needs slides of at least two classes in one fold.")
    title = f"{name} (AUC)" if 2 < len(classes) <= MOST_LINES else None
    axes.legend(frameon=False, fontsize=9, loc="lower right", title=title)
    return figure


def _draw_mean_roc(axes: "Axes", folds: Mapping[str, Slides]) -> bool:
    curves = []
    for fold, (labels, probabilities) in folds.items():
        if 0 < (labels == 1).sum() < len(labels):
            false, true = _roc(labels == 1, probabilities[:, 1])
            (line,) = axes.plot(false, true, color=BLUE, lw=0.8, alpha=0.4)
            curves.append((false, true))
            add_tooltip(line, f"{fold}: AUC {_area(false, true):.3f}")
    _draw_mean(axes, curves, "folds")
    return bool(curves)


def _draw_mean_of_classes(
    axes: "Axes", folds: Mapping[str, Slides], classes: Sequence[str]
) -> bool:
    labels, probabilities, present = _pool(folds, classes)
    _draw_mean(axes, [_roc(labels == c, probabilities[:, c]) for c in present], "classes")
    return bool(present)


def _draw_mean(axes: "Axes", curves: Sequence[Curve], what: str) -> None:
    """Draw the mean of curves, and a band of one standard deviation."""
    if not curves:
        return
    grid = np.linspace(0, 1, 201)
    heights = [np.interp(grid, false, true) for false, true in curves]
    areas = [_area(false, true) for false, true in curves]
    mean = np.mean(heights, axis=0)
    name = f"AUC {areas[0]:.3f}"
    if len(areas) > 1:
        spread = np.std(heights, axis=0, ddof=1)
        low, high = np.clip(mean - spread, 0, 1), np.clip(mean + spread, 0, 1)
        axes.fill_between(grid, low, high, color=BLUE, alpha=0.15, lw=0, label="± 1 std")
        deviation = np.std(areas, ddof=1)
        name = f"mean of {len(areas):,} {what}\nAUC {np.mean(areas):.3f} ± {deviation:.3f}"
    (line,) = axes.plot(np.r_[0, grid], np.r_[0, mean], color=BLUE, lw=2.2, label=name)
    add_tooltip(line, name.replace("\n", ", "))


def _draw_class_rocs(
    axes: "Axes",
    folds: Mapping[str, Slides],
    classes: Sequence[str],
) -> bool:
    labels, probabilities, present = _pool(folds, classes)
    for code in present:
        false, true = _roc(labels == code, probabilities[:, code])
        name = f"{classes[code]} ({_area(false, true):.3f})"
        style = "-" if code < len(COLOURS) else "--"
        colour = COLOURS[code % len(COLOURS)]
        (line,) = axes.plot(false, true, color=colour, ls=style, lw=1.8, label=name)
        add_tooltip(line, name)
    return bool(present)


def _pool(
    folds: Mapping[str, Slides], classes: Sequence[str]
) -> tuple[NDArray[np.integer], NDArray[np.floating], list[int]]:
    """Return labels and probabilities of all folds, and the classes that have a curve."""
    labels = np.concatenate([labels for labels, _ in folds.values()])
    probabilities = np.concatenate([probabilities for _, probabilities in folds.values()])
    present = [code for code in range(len(classes)) if 0 < (labels == code).sum() < len(labels)]
    return labels, probabilities, present


def _roc(hits: NDArray[np.bool_], scores: NDArray[np.floating]) -> Curve:
    """Return false and true positive rates from the highest threshold down; a tie is one step."""
    order = np.argsort(-scores, kind="stable")
    hits, scores = hits[order], scores[order]
    last = np.r_[np.flatnonzero(np.diff(scores)), len(scores) - 1]
    true, false = np.cumsum(hits)[last], np.cumsum(~hits)[last]
    return np.r_[0, false / false[-1]], np.r_[0, true / true[-1]]


def _area(false: NDArray[np.float64], true: NDArray[np.float64]) -> float:
    return float((np.diff(false) * (true[1:] + true[:-1]) / 2).sum())
