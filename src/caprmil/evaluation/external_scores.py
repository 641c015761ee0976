"""Scores on an external cohort beside those of cross-validation: two independent samples.

On both sides a score is the mean over the models of the folds: in cross-validation each is scored
on the test part of its fold, outside on the whole external cohort. Patients of each side are drawn
with replacement, independently of the other side.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.evaluation.alignment import WHOLE, Part
from caprmil.evaluation.paired_tests import draw_patients, sample
from caprmil.evaluation.predictions import Predictions
from caprmil.targets.metric import Metric, ratio

LEVEL = 0.95
DRAWS = 1000
NAN = float("nan")
SAME = 1e-9  # a change is only rounding

Values = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value with its interval at 95 %, by patient. The ends are NaN where it has none."""

    value: float
    low: float = NAN
    high: float = NAN

    @property
    def side(self) -> int:
        """1 if the interval is above 0, -1 if it is below, else 0."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True, kw_only=True)
class ExternalScore:
    """A metric in cross-validation and on an external cohort."""

    metric: str
    title: str
    higher_is_better: bool
    biased: bool
    printed: bool
    internal: Estimate
    external: Estimate
    """Of single models, as in cross-validation: comparable with it."""
    difference: Estimate
    """External minus internal."""
    together: Estimate
    """Of the mean answer of all models, which is what `caprmil predict` gives."""

    @property
    def verdict(self) -> str:
        """Whether the cohorts differ: worse, better, not shown or not known."""
        if np.isnan(self.difference.low):
            return "not known"
        if not self.difference.side:
            return "not shown"
        return "better" if (self.difference.side > 0) == self.higher_is_better else "worse"

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("internal", "external", "difference", "together"):
            found[name] = getattr(self, name)._asdict()
        return found | {"verdict": self.verdict}


def mean_over_models(table: Predictions) -> Predictions:
    """Return one answer for each slide: the mean over the models of the folds."""
    rows: dict[str, list[int]] = {}
    for row, slide in enumerate(table.slides):
        rows.setdefault(slide, []).append(row)
    first = replace(table.take(own[0] for own in rows.values()), folds=None)
    return replace(first, answers=np.stack([table.answers[own].mean(0) for own in rows.values()]))


def score_external(
    internal: Predictions,
    external: Predictions,
    together: Predictions,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[ExternalScore, ...]:
    """Score single models on both sides, and their mean answer on the external cohort."""
    metrics = external.target.metrics
    inside = _Side(internal, metrics.values(), draws, seed)
    outside = _Side(external, metrics.values(), draws, seed + 1)
    whole = _Side(together, metrics.values(), draws, seed + 1)
    return tuple(
        ExternalScore(
            metric=name,
            title=metric.title,
            higher_is_better=metric.higher_is_better,
            biased=metric.biased,
            printed=metric.printed,
            internal=inside.estimate(metric),
            external=outside.estimate(metric),
            difference=estimate(
                outside.values[name] - inside.values[name],
                outside.drawn[name] - inside.drawn[name],
                biased=metric.biased,  # cohorts of different sizes are biased differently
            ),
            together=whole.estimate(metric),
        )
        for name, metric in metrics.items()
    )


class _Side:
    """The values of metrics on one side, and on draws of its patients."""

    def __init__(self, table: Predictions, metrics: Any, draws: int, seed: int) -> None:
        parts, patients = parts_of(table)
        once = np.ones((1, patients), dtype=np.int64)
        own = list(metrics)
        values = sample(parts, once, own)
        self.values = {name: float(mean_of_folds(each)[0]) for name, each in values.items()}
        self.drawn = {name: np.full(draws, NAN) for name in values}
        if patients > 1:
            drawn = sample(
                parts,
                draw_patients(patients, draws, seed),
                [metric for metric in own if metric.has_interval],
            )
            by_name = {metric.name: metric for metric in own}
            self.drawn |= {
                name: by_name[name].around(self.values[name], mean_of_folds(each))
                for name, each in drawn.items()
            }

    def estimate(self, metric: Metric) -> Estimate:
        return estimate_of(metric, self.values[metric.name], self.drawn[metric.name])


def parts_of(table: Predictions) -> tuple[list[Part], int]:
    """Return the answers of each model, and the number of patients."""
    scored = table.scored()
    owners = scored.patients or scored.slides
    number = {name: at for at, name in enumerate(sorted(set(owners)))}
    parts = [
        Part(*part.truth, np.array([number[name] for name in part.patients or part.slides]))
        for part in (scored.by_fold() or {WHOLE: scored}).values()
    ]
    return parts, len(number)


def mean_of_folds(values: Values) -> Values:
    """Return the mean of each draw (column) over the folds in which it has a value."""
    known = ~np.isnan(values)
    return ratio(np.where(known, values, 0).sum(axis=0), known.sum(axis=0))


def estimate(value: float, drawn: Values, *, biased: bool = False) -> Estimate:
    """Return a value with the percentile interval of its draws.

    It has none if more draws have no value than the interval leaves out: with so few patients, the
    others are all alike.
    """
    known = ~np.isnan(drawn)
    if biased or np.isnan(value) or known.sum() < max(2.0, LEVEL * len(drawn)):
        return Estimate(value)
    drawn = drawn[known]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return Estimate(value, low, high)


def estimate_of(metric: Metric, value: float, drawn: Values) -> Estimate:
    """Return the value of a metric with its interval; the ends of an error are not negative."""
    found = estimate(value, drawn, biased=not metric.has_interval)
    return found._replace(low=np.maximum(found.low, 0)) if metric.centred else found


def headline_sentence(score: ExternalScore, unit: str) -> str:
    """Return the result for one metric in a sentence."""
    inside, outside, apart = score.internal, score.external, score.difference
    if np.isnan(outside.value):
        return (
            f"{score.title} has no value on the external {unit}s: they are too few, or too much "
            f"alike. In cross-validation it is {show(inside)}."
        )
    text = (
        f"{score.title}: {outside.value:.3f} on the external {unit}s{_between(outside)}, "
        f"{inside.value:.3f} in cross-validation{_between(inside)}. "
    )
    ends = f"{apart.value:+.3f}{_between(apart)}"
    if score.verdict == "not known":
        return f"{text}Whether they differ is not known."
    if score.verdict == "not shown":
        return f"{text}No difference is shown: {ends}."
    return f"{text}It is {score.verdict} outside: {ends}."


def _between(found: Estimate) -> str:
    return "" if np.isnan(found.low) else f" ({found.low:.3f} to {found.high:.3f})"


def score_rows(scores: Sequence[ExternalScore]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table, ready to print."""
    head = ["metric", "cross-validation", "external, single models", "difference"]
    rows = [
        [
            f"{each.title}{'' if each.higher_is_better else ' (lower is better)'}",
            show(each.internal),
            show(each.external),
            show(each.difference, signed=True),
            show(each.together),
        ]
        for each in scores
    ]
    return [*head, "external, all models together"], rows


def show(found: Estimate, *, signed: bool = False) -> str:
    """Return a value with its interval as text."""
    if np.isnan(found.value):
        return "–"
    if signed and np.nan_to_num(np.abs(found)).max() < SAME:
        return "0"
    form = "+.3f" if signed else ".3f"
    if np.isnan(found.low):
        return f"{found.value:{form}}"
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"
