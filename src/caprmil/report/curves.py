"""Curves of a run: ROC, reliability, and learning, a line for each fold."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_curve

from caprmil.evaluation import calibration
from caprmil.evaluation.predictions import Predictions
from caprmil.io.json_files import read_json
from caprmil.report.charts import Axes
from caprmil.report.page import Html, fill, join, tag
from caprmil.runs.run import Run

COLOURS = 8  # line.c0 to line.c7 of the style sheet
Line = tuple[str, str]  # a kind of line, and what it means


def section(run: Run) -> Html:
    answers = run.predictions
    return fill(
        "curves.html", roc=roc(answers), reliability=reliability(answers), learning=learning(run)
    )


def roc(answers: Predictions) -> Html:
    """Draw ROC: of two classes a line a fold and their mean; of more, a line a class, pooled."""
    if answers.labels is None:
        return _nothing("Without labels there is no ROC.")
    part, axes = answers.labelled(), Axes()
    lines = [axes.line((0, 1), (0, 1), "diagonal")]
    keys: list[Line] = []
    if len(answers.classes) == 2:
        lines += _by_fold(axes, part)
        keys = [("thin", "one fold"), ("thick", "mean of the folds")]
    else:
        for code, name in enumerate(answers.classes):
            curve = _curve(np.asarray(part.labels) == code, part.probabilities[:, code])
            if curve is not None:
                kind = f"thickish c{code % COLOURS}"
                lines.append(axes.line(*curve, kind))
                keys.append((kind, f"{name} against the rest"))
    if len(lines) == 1:
        return _nothing("A ROC curve needs slides of two classes at the least in one fold.")
    across, up = "False positive rate", "True positive rate"
    return join([axes.draw(*lines, across=across, up=up, alt="ROC curves"), legend(keys)])


def _by_fold(axes: Axes, part: Predictions) -> list[Html]:
    grid, heights, lines = np.linspace(0, 1, 101), [], []
    for fold in (part.by_fold() or {"": part}).values():
        curve = _curve(np.asarray(fold.labels) == 1, fold.probabilities[:, 1])
        if curve is not None:
            lines.append(axes.line(*curve, "thin"))
            heights.append(np.interp(grid, *curve))
    if heights:
        lines.append(axes.line([0, *grid], [0, *np.mean(heights, axis=0)], "thick"))
    return lines


def _curve(
    hits: NDArray[np.bool_], scores: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    if hits.all() or not hits.any():
        return None
    false, true, _ = roc_curve(hits, scores)
    return false, true


def reliability(answers: Predictions) -> Html:
    """Draw how often it was so against how sure the models were: each fold, and all slides."""
    if answers.labels is None:
        return _nothing("Without labels there is no reliability.")
    part, axes = answers.labelled(), Axes()
    two = len(answers.classes) == 2
    event = answers.classes[1] if two else "the predicted class"
    drawn = [axes.line((0, 1), (0, 1), "diagonal")]
    for fold in part.by_fold().values():
        bins = calibration.reliability(fold, 0.0).bins
        drawn.append(axes.line([b.forecast for b in bins], [b.share for b in bins], "thin"))
    bins = calibration.reliability(part, 0.0).bins
    drawn.append(axes.line([b.forecast for b in bins], [b.share for b in bins], "thick"))
    for each in bins:
        x, low, high = axes.x(each.forecast), axes.y(each.low), axes.y(each.high)
        said = f"{each.slides} slides, mean {each.forecast:.3f}: so in {each.share:.0%}"
        drawn.append(tag("line", x1=x, x2=x, y1=low, y2=high, class_="whisker"))
        drawn.append(axes.dot(each.forecast, each.share, "all", said=said))
    across, up = f"Probability of {event}", "Share of slides"
    keys = [("thin", "one fold"), ("thick", "all slides, with 95 % intervals")]
    return join([axes.draw(*drawn, across=across, up=up, alt="Reliability"), legend(keys)])


def learning(run: Run) -> Html:
    """Draw losses and the validation AUC over epochs, a line for each fold."""
    histories, kept = {}, {}
    for fold in run.done:
        folder = run.fold_folder(fold.name)
        if (folder / "history.csv").exists():
            histories[fold.name] = _read_history(folder / "history.csv")
        if (folder / "fold.json").exists():
            kept[fold.name] = int(read_json(folder / "fold.json")["kept_epoch"])
    if not histories:
        return _nothing("There is no history of the training.")
    pictures = [
        _panel(
            "Loss",
            histories,
            kept,
            {"train_loss": ("thin", "training"), "val_loss": ("other", "validation")},
        ),
        _panel("Validation AUC", histories, kept, {"val_auc": ("other", "validation")}),
    ]
    return join(pictures)


def _read_history(path: Path) -> dict[str, list[float]]:
    """Return the columns of a history, without what it takes to train."""
    table = np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))
    return {name: table[name].tolist() for name in table.dtype.names or ()}


def _panel(
    title: str,
    histories: Mapping[str, Mapping[str, Sequence[float]]],
    kept: Mapping[str, int],
    columns: Mapping[str, Line],
) -> Html:
    found = []
    for fold, history in histories.items():
        for column, (kind, _) in columns.items():
            values = np.asarray(history.get(column, ()), dtype=float)
            epochs = np.asarray(history.get("epoch", np.arange(len(values))), dtype=float)
            known = np.isfinite(values)
            if known.any():
                found.append((fold, kind, epochs[: len(values)][known], values[known]))
    if not found:
        return join([])
    ys = np.concatenate([values for *_, values in found])
    last = max(float(epochs.max()) for _, _, epochs, _ in found)
    low = min(float(ys.min()), 0.0 if title == "Loss" else 0.5)
    high = 1.0 if title != "Loss" else max(float(ys.max()), 0.0) * 1.05 or 1.0
    axes = Axes(across=(0, max(last, 1.0)), up=(low, high))
    drawn = [axes.line(epochs, values, kind) for _, kind, epochs, values in found]
    for fold, kind, epochs, values in found:
        if kind == "other" and kept.get(fold) in epochs:
            value = float(values[epochs == kept[fold]][0])
            drawn.append(axes.dot(kept[fold], value, kind, said=f"{fold}: weights kept here"))
    keys = [*columns.values(), *([("dot other", "weights kept")] if kept else [])]
    picture = axes.draw(*drawn, across="Epoch", up=title, alt=f"{title} over epochs, by fold")
    return tag("div", tag("h3", title), picture, legend(keys))


def legend(keys: Sequence[Line]) -> Html:
    items = []
    for kind, words in keys:
        if kind.startswith("dot"):
            mark = tag("circle", cx=11, cy=4, r=3.5, class_=kind)
        else:
            mark = tag("polyline", points="0,4 22,4", class_=f"line {kind}")
        drawn = tag("svg", mark, viewBox="0 0 22 8", aria_hidden="true", class_="key")
        items.append(tag("li", drawn, words))
    return tag("ul", *items, class_="keys")


def _nothing(words: str) -> Html:
    return tag("p", words, class_="quiet")
