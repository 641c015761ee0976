"""The sections of scores in a run report: headline scores, tables, and baselines."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from caprmil.report.html_page import EMPTY, render
from caprmil.report.report_inputs import RunInputs
from caprmil.report.text_format import number
from caprmil.runs.run import Run
from caprmil.targets import Metric


class Headline(NamedTuple):
    """A score as it is shown first, in large print."""

    title: str
    value: str
    spread: str
    pooled: str


def headline_section(inputs: RunInputs) -> Markup:
    """Return the few scores that a reader looks at first."""
    metrics = inputs.run.scores["metrics"]
    target = inputs.run.target
    names = dict.fromkeys((target.headline, *inputs.parts.headline_metrics))
    shown = [_headline(target.metric(name), metrics[name]) for name in names if name in metrics]
    return render("headline_scores.html", headlines=shown)


def _headline(record: Metric, metric: Mapping[str, Any]) -> Headline:
    mean, std, pooled = (
        metric[key] for key in ("mean_over_folds", "std_over_folds", "all_slides_pooled")
    )
    interval = _interval(metric["interval"])
    return Headline(
        title=record.long_title,
        value=_number(pooled if mean is None else mean),
        spread=f"± {_number(std)} over {metric['folds_counted']} folds"
        if std is not None
        else "one fold",
        pooled=f"pooled {_number(pooled)}" + (f", 95 % interval {interval}" if interval else ""),
    )


def score_section(inputs: RunInputs) -> Markup:
    """Return every metric: over folds, pooled, and its interval."""
    scores = inputs.run.scores
    level, unit = scores["interval_level"], "patient" if scores["patients"] else "slide"
    pooled = f"all {scores.get('unit', 'slide')}s pooled"
    head = ["", "mean over folds", "std", pooled, f"{level:.0%} interval by {unit}"]
    rows = []
    for name, metric in scores["metrics"].items():
        cells = [metric[key] for key in ("mean_over_folds", "std_over_folds", "all_slides_pooled")]
        interval = _interval(metric["interval"]) or "–"
        rows.append([inputs.run.target.metric(name).long_title, *map(_number, cells), interval])
    return render("table_section.html", title="Scores", head=head, rows=rows, notes=scores["notes"])


def fold_section(inputs: RunInputs) -> Markup:
    """Return every metric of every fold, with the fold's sizes and temperature."""
    run = inputs.run
    scores = run.scores["folds"]
    temperatures = (run.scores.get("calibration") or {}).get("temperatures", {})
    names = list(next(iter(scores.values()), ()))
    splits = {fold.name: fold for fold in run.splits}
    rows = []
    for fold, metrics in scores.items():
        split, t = splits.get(fold), temperatures.get(fold)
        sizes = [len(part) for part in (split.train, split.validation, split.test)] if split else []
        temperature = "–" if t is None or t == 1 else f"{t:.2f}"
        values = [_number(metrics[name]) for name in names]
        more = [temperature] if temperatures else []
        rows.append([fold, " / ".join(map(str, sizes)), *values, *more])
    short = [run.target.metric(name).title for name in names]
    more = ["temperature"] if temperatures else []
    head = ["", "train / validation / test", *short, *more]
    if len(head) > len(rows) + 1:  # several targets have more metrics than a page has room for
        head, *rows = [list(column) for column in zip(head, *rows, strict=True)]
    notes = calibration_notes(run)
    return render("table_section.html", title="Scores by fold", head=head, rows=rows, notes=notes)


def calibration_notes(run: Run) -> list[str]:
    """Return what the temperatures change on the test slides."""
    found = run.scores.get("calibration") or {}
    each = {"": found} if found.get("temperatures") else found.get("targets", {})
    return [line for name, own in each.items() for line in _calibration_notes(run, name, own)]


def _calibration_notes(run: Run, name: str, found: Mapping[str, Any]) -> list[str]:
    before, after = found.get("before", {}), found.get("after", {})
    line = (
        f"{f'{name}: temperature' if name else 'Temperature'} scaling changes the mean ACE of the "
        f"test {run.predicts}s from "
        f"{_number(before.get('ace'))} to {_number(after.get('ace'))}. A perfectly calibrated "
        f"model with the same probabilities would have {_number(before.get('ace_floor'))} and "
        f"{_number(after.get('ace_floor'))}. Scores on this page are before "
        "calibration."
    )
    return [line, *found.get("notes", [])]


def comparison_section(inputs: RunInputs) -> Markup:
    """Return predictions against labels, and the comparison with baselines, side by side."""
    found = inputs.run.scores.get("baselines") or {}
    differences = found.get("differences", [])
    metric = inputs.run.target.headline_metric
    sign = 1 if metric.higher_is_better else -1
    better = [d["verdict"] == "real" and sign * (d["difference"] or 0) > 0 for d in differences]
    return render(
        "comparison.html",
        results=inputs.parts.results(inputs.run.predictions),
        metric=metric.title,
        rows=[_difference(d) for d in differences],
        beats_all=all(better),
        notes=found.get("notes", []),
    )


def modality_section(inputs: RunInputs) -> Markup:
    """Return what patches, covariates and sources add to each other, if there are several."""
    found = inputs.run.scores.get("modalities")
    if not found:
        return EMPTY
    title = inputs.run.target.headline_metric.title
    return render(
        "table_section.html",
        title="What each modality adds",
        head=[
            *("model", "compared with", f"its {title}", f"the model's {title}"),
            *("difference", "95 % interval", "the difference is"),
        ],
        rows=[[d.get("first", ""), *_difference(d)] for d in found["differences"]],
        notes=found["notes"],
    )


def _difference(d: Mapping[str, Any]) -> list[str]:
    low, high = d["low"], d["high"]
    return [
        d["second"],
        f"{_number(d['second_mean'])} ± {_number(d['second_std'])}",
        f"{_number(d['first_mean'])} ± {_number(d['first_std'])}",
        _signed(d["difference"]),
        f"{_signed(low)} to {_signed(high)}" if None not in (low, high) else "–",
        d["verdict"],
    ]


def _interval(ends: Sequence[float | None] | None) -> str:
    """Return an interval as text; nothing if it is not known."""
    return "" if ends is None or None in ends else f"{_number(ends[0])} to {_number(ends[1])}"


def _number(value: float | None) -> str:
    """Return three decimals; of a very large or small score, significant digits."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 1000:
        return number(value)
    text = f"{value:.2g}" if 0 < size < 0.001 else f"{value:.3f}"
    return text.replace("-", "−")


def _signed(value: float | None) -> str:
    return f"+{_number(value)}" if value is not None and value > 0 else _number(value)
