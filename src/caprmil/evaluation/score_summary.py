"""The scores of predictions, over folds and pooled, as JSON, Markdown and rows."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from caprmil.errors import count
from caprmil.evaluation.patient_scores import patient_parts
from caprmil.evaluation.predictions import Predictions
from caprmil.io import tables
from caprmil.targets.metric import Interval, mean_and_spread


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """One metric in two forms that need not agree: fold by fold, and all slides pooled."""

    mean_over_folds: float
    std_over_folds: float
    folds_counted: int
    all_slides_pooled: float
    interval: Interval | None
    """Of the pooled value. None for metrics without one: see `Metric.has_interval`."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The scores of a table of predictions, with what is needed to judge them."""

    slides: int
    patients: int | None
    metrics: Mapping[str, MetricSummary]
    folds: Mapping[str, Mapping[str, float]]
    interval_level: float
    more: Mapping[str, Any]
    """What the target adds: for a classification, the floor of the ACE."""
    notes: tuple[str, ...]
    unit: Literal["slide", "patient"] = "slide"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it: in full precision, None for NaN."""
        metrics = {name: vars(metric) for name, metric in self.metrics.items()}
        return {
            **({"slides": self.slides} if self.unit == "slide" else {"unit": self.unit}),
            "patients": self.patients,
            "metrics": _plain(metrics),
            "folds": _plain(self.folds),
            "interval_level": self.interval_level,
            **_plain(self.more),
            "notes": list(self.notes),
        }

    def as_rows(self) -> list[dict[str, str]]:
        """Return one row per metric, rounded, ready to print."""
        unit = self.unit if self.patients is None else "patient"
        rows = []
        for name, metric in self.metrics.items():
            row = {"metric": name}
            if self.folds:
                row["mean over folds"] = _show(metric.mean_over_folds)
                row["std over folds"] = _show(metric.std_over_folds)
                row["folds counted"] = str(metric.folds_counted)
            row[f"all {self.unit}s pooled"] = _show(metric.all_slides_pooled)
            low, high = metric.interval or (math.nan, math.nan)
            between = "-" if math.isnan(low) else f"{_show(low)} to {_show(high)}"
            row[f"{100 * self.interval_level:g} % interval by {unit}"] = between
            rows.append(row)
        return rows

    def as_markdown(self) -> str:
        """Return the table, with what was scored above it and notes below."""
        rows = self.as_rows()
        numbers = {"slide": self.slides, "patient": self.patients, "fold": len(self.folds)}
        if self.unit == "patient":
            numbers |= {"slide": None, "patient": self.slides}
        sizes = ", ".join(count(n, what) for what, n in numbers.items() if n)
        cells = [list(row.values()) for row in rows]
        return f"{sizes}.\n\n{tables.markdown_table(list(rows[0]), cells, self.notes)}"


def summary(
    predictions: Predictions, *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> Summary:
    """Score a table: over folds and pooled, with intervals by patient."""
    part, scored = predictions.labelled(), predictions.scored()
    target, slides = part.target, len(set(part.slides))
    by_fold, folds, pooled = part.fold_scores(), part.by_fold(), part.scores()
    sampled = [name for name in pooled if target.metric(name).has_interval]
    intervals = part.intervals(names=sampled, draws=draws, level=level, seed=seed)
    table = {}
    for name, value in pooled.items():
        mean, std, counted = mean_and_spread(scores[name] for scores in by_fold.values())
        table[name] = MetricSummary(
            mean_over_folds=mean,
            std_over_folds=std,
            folds_counted=counted,
            all_slides_pooled=value,
            interval=intervals.get(name),
        )
    once = slides == len(part)  # several answers on a slide share its label
    more = target.summary(
        [fold.answers for fold in folds.values()], part.answers if once else None, seed
    )
    return Summary(
        slides=slides,
        patients=len(set(part.patients)) if part.patients else None,
        metrics=table,
        folds=by_fold,
        interval_level=level,
        more={name: value for name, value in more.items() if name != "notes"},
        notes=(*more.get("notes", ()), *_notes(predictions, part, scored)),
        unit=part.unit,
    )


def _notes(whole: Predictions, part: Predictions, scored: Predictions) -> Iterator[str]:
    """Yield what a reader of the scores should know about them."""
    if len(part) < len(whole):
        yield f"{len(whole) - len(part)} of {len(whole)} rows have no label and are not scored."
    if len(set(part.slides)) < len(part):
        units = f"{part.unit.capitalize()}s"
        yield f"{units} are in several folds: pooled scores are over {len(part)} answers."
    if merged := _merged(part, scored):
        yield f"{merged}, with the mean of the answers for the patient's slides."
    for fold, members in scored.by_fold().items():
        yield from part.target.notes(fold, *members.truth)


def _merged(part: Predictions, scored: Predictions) -> str:
    """Return which targets score a patient once that has several slides; nothing if none does."""

    def known(table: Predictions, name: str) -> int:
        own = part.target.parts[name]
        return int(own.target.known(own.labels_of(np.asarray(table.labels))).sum())

    parts = patient_parts(part.target)
    if names := [name for name in parts if known(scored, name) < known(part, name)]:
        return f"{' and '.join(names)}: each patient is scored once"
    return "Each patient is scored once" if len(scored) < len(part) else ""


def _show(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _plain(value: Any) -> Any:
    """Return the value with lists for tuples, and None for NaN."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
