"""Scores of a run: tiles, tables, the confusion matrix, and what shortcuts would score."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.evaluation.predictions import Predictions
from caprmil.figures.style import TITLES
from caprmil.report.page import EMPTY, Html, join, tag
from caprmil.report.words import part
from caprmil.runs.run import Run

HEADLINES = ("auc", "balanced_accuracy", "ace")
VERDICTS = {
    "real": "the difference is real",
    "not shown": "no difference is shown",
    "not known": "not known",
}


def tiles(run: Run) -> Html:
    """Return the few numbers that one looks at first."""
    return join(_tile(name, run.scores["metrics"][name]) for name in HEADLINES)


def _tile(name: str, metric: Mapping[str, Any]) -> Html:
    mean, std = metric["mean_over_folds"], metric["std_over_folds"]
    value = metric["all_slides_pooled"] if mean is None else mean
    spread = f"± {std:.3f} over {metric['folds_counted']} folds" if std is not None else "one fold"
    between = metric["interval"]
    more = f"pooled {_show(metric['all_slides_pooled'])}" + (
        f", 95 % interval {between[0]:.3f} to {between[1]:.3f}" if _known(between) else ""
    )
    title = tag("span", TITLES[name])
    return tag(
        "div", title, tag("b", _show(value)), tag("span", spread), tag("span", more), class_="tile"
    )


def table(run: Run) -> Html:
    """Return every metric: over folds, pooled, and its interval."""
    level, unit = run.scores["interval_level"], "patient" if run.scores["patients"] else "slide"
    head = ["", "mean over folds", "std", "all slides pooled", f"{level:.0%} interval by {unit}"]
    rows = []
    for name, metric in run.scores["metrics"].items():
        between = metric["interval"]
        ends = f"{between[0]:.3f} to {between[1]:.3f}" if _known(between) else "–"
        cells = [metric[key] for key in ("mean_over_folds", "std_over_folds", "all_slides_pooled")]
        rows.append([TITLES.get(name, name), *map(_show, cells), ends])
    return join([_grid(head, rows), notes(run.scores["notes"])])


def folds(run: Run) -> Html:
    """Return every metric of every fold, with the fold's sizes and temperature."""
    own = run.scores["folds"]
    if not own:
        return tag("p", "There are no folds.", class_="quiet")
    temperatures = run.scores.get("calibration", {}).get("temperatures", {})
    names = list(next(iter(own.values())))
    short = [TITLES.get(name, name).partition(" (")[0] for name in names]
    sizes = {fold.name: fold for fold in run.splits}
    rows = []
    for fold, metrics in own.items():
        parts = sizes.get(fold)
        counts = (
            f"{len(parts.train)} / {len(parts.validation)} / {len(parts.test)}" if parts else ""
        )
        t = temperatures.get(fold)
        heat = "–" if t is None or t == 1 else f"{t:.2f}"
        rows.append([fold, counts, *(_show(metrics[name]) for name in names), heat])
    head = ["", "train / validation / test", *short, "temperature"]
    return join([_grid(head, rows), calibrated(run)])


def calibrated(run: Run) -> Html:
    """Say what the temperatures do to the test slides."""
    found = run.scores.get("calibration")
    if not found:
        return EMPTY
    before, after = (f"{found[when]['ace']:.3f}" for when in ("before", "after"))
    line = (
        f"Temperature scaling takes the mean ACE of the test parts from {before} to {after} (the "
        f"floor, with these answers: {found['before']['ace_floor']:.3f} and "
        f"{found['after']['ace_floor']:.3f}). Scores on this page are before it."
    )
    return notes([line, *found.get("notes", [])])


def confusion(answers: Predictions) -> Html:
    """Return how often each class was predicted as each: counts, and shares of a row."""
    if answers.labels is None:
        return tag("p", "There are no labels.", class_="quiet")
    counts = confused(answers.labelled())
    names = answers.classes
    head = tag("tr", tag("th"), *(tag("th", name, scope="col") for name in names))
    body = [
        _confusion_row(name, row, n)
        for n, (name, row) in enumerate(zip(names, counts, strict=True))
    ]
    caption = tag("caption", "Rows: label. Columns: predicted.", class_="quiet")
    return tag(
        "div",
        tag("table", caption, tag("thead", head), tag("tbody", *body), class_="confusion"),
        class_="wide",
    )


def confused(answers: Predictions) -> NDArray[np.int64]:
    """Return the counts of label (row) and prediction (column), all folds pooled."""
    size = len(answers.classes)
    counts = np.zeros((size, size), dtype=np.int64)
    np.add.at(counts, (np.asarray(answers.labels), answers.probabilities.argmax(axis=1)), 1)
    return counts


def _confusion_row(name: str, row: NDArray[np.int64], own: int) -> Html:
    whole, cells = int(row.sum()), []
    for column, n in enumerate(row.tolist()):
        share = n / whole if whole else 0.0
        shade = tag("rect", width="100%", height="100%", fill_opacity=round(0.08 + 0.92 * share, 3))
        kind = "off" if column != own else "strong" if share > 0.8 else None
        words = tag("span", tag("b", f"{n:,}"), tag("br"), tag("small", part(share)))
        back = tag("svg", shade, aria_hidden="true") if n else None
        cells.append(tag("td", back, words, class_=kind, data_count=n))
    return tag("tr", tag("th", name, scope="row"), *cells)


def shortcuts(run: Run) -> Html:
    """Return what answers without a model score on the same slides."""
    found = run.scores.get("shortcuts")
    if not found or not found.get("differences"):
        return tag("p", "This run has not been set beside shortcuts.", class_="quiet")
    rows, beaten = [], True
    for d in found["differences"]:
        low, high = d["low"], d["high"]
        between = f"{_signed(low)} to {_signed(high)}" if None not in (low, high) else "–"
        verdict = VERDICTS.get(d["verdict"], d["verdict"])
        beaten &= d["verdict"] == "real" and (d["difference"] or 0) > 0
        rows.append(
            [
                d["second"],
                f"{_show(d['second_mean'])} ± {_show(d['second_std'])}",
                f"{_show(d['first_mean'])} ± {_show(d['first_std'])}",
                _signed(d["difference"]),
                between,
                verdict,
            ]
        )
    line = (
        "The model beats every shortcut."
        if beaten
        else "The model does not clearly beat every shortcut: what it learnt may be no more."
    )
    head = ["shortcut", "its AUC", "the model's AUC", "difference", "95 % interval", "verdict"]
    kind = "pill good" if beaten else "pill bad"
    said = tag("p", tag("span", line, class_=kind))
    return join([said, _grid(head, rows), notes(found.get("notes", []))])


def notes(lines: Iterable[str]) -> Html:
    items = [tag("li", line) for line in lines]
    return tag("ul", *items, class_="notes") if items else EMPTY


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    first = tag("tr", *(tag("th", name, scope="col") for name in head))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    ]
    whole = tag("table", tag("thead", first), tag("tbody", *body), class_="grid-table")
    return tag("div", whole, class_="wide")


def _known(interval: Sequence[float | None] | None) -> bool:
    return interval is not None and None not in interval


def _show(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")
