"""Recalibration on a few slides of an external cohort, scored on the others.

The slides that a correction is fitted to are drawn with their patients. No slide of such a patient
is scored, before or after. The draw is repeated, since that of a few slides is a matter of chance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, count
from caprmil.evaluation.external_scores import (
    DRAWS,
    Estimate,
    estimate,
    estimate_of,
    parts_of,
    show,
)
from caprmil.evaluation.paired_tests import draw_patients, sample
from caprmil.evaluation.predictions import Predictions
from caprmil.targets.metric import Metric

REPEATS = 20  # draws of slides
FEWEST = 2  # slides of a draw


class Draw(NamedTuple):
    """The rows of a table that a correction is fitted to, and those that are scored."""

    fitted: list[int]
    scored: list[int]


@dataclass(frozen=True, kw_only=True)
class RecalibratedScore:
    """A metric of the same slides before and after recalibration."""

    metric: str
    title: str
    higher_is_better: bool
    before: Estimate
    """Of the first draw, as are `after` and `change`."""
    after: Estimate
    change: Estimate
    changes: tuple[float, float, float]
    """The mean over draws, the lowest and the highest change."""
    improved: int
    """Draws in which the metric is better after recalibration."""
    draws: int
    """Draws in which it has a value."""

    def as_dict(self) -> dict[str, Any]:
        found = dict(vars(self))
        for name in ("before", "after", "change"):
            found[name] = getattr(self, name)._asdict()
        mean, lowest, highest = self.changes
        return found | {"changes": {"mean": mean, "lowest": lowest, "highest": highest}}


@dataclass(frozen=True, eq=False, kw_only=True)
class Recalibrated:
    """What recalibration does to the scores of an external cohort."""

    unit: str
    words: str
    """What was fitted in the first draw."""
    fitted: tuple[str, ...]
    """The slides of the first draw."""
    scored: int
    scores: tuple[RecalibratedScore, ...]
    before: Predictions
    after: Predictions
    """The scored slides of the first draw."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "slides": len(self.fitted),
            "unit": self.unit,
            "fitted": self.words,
            "fitted_slides": list(self.fitted),
            "scored": self.scored,
            "repeats": REPEATS,
            "metrics": [each.as_dict() for each in self.scores],
        }

    def as_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of a table, ready to print."""
        head = ["metric", "before", "after", "change", f"change in {REPEATS} draws", "better in"]
        rows = []
        for each in self.scores:
            mean, low, high = each.changes
            rows.append(
                [
                    f"{each.title}{'' if each.higher_is_better else ' (lower is better)'}",
                    show(each.before),
                    show(each.after),
                    show(each.change, signed=True),
                    show(Estimate(mean, low, high), signed=True),
                    f"{each.improved} of {each.draws}",
                ]
            )
        return head, rows

    def sentences(self) -> Iterator[str]:
        """Yield what was fitted, and what it changes."""
        yield self.notes[0]
        target = self.before.target
        names = [*target.calibration_metrics] or [target.second]
        found = [each for each in self.scores if each.metric in names and each.draws]
        if first := min(found, key=lambda each: names.index(each.metric), default=None):
            change = show(first.change, signed=True)
            yield (
                f"{first.title} goes from {first.before.value:.3f} to {first.after.value:.3f}: "
                f"{change}. It is better in {first.improved} of {first.draws} draws."
            )

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"Fitted to {count(len(self.fitted), self.unit)}, scored on the other {self.scored:,}: "
            f"no patient is on both sides. First draw: {self.words}.",
            "Answers are those of all models together. Intervals are those of the first draw, by "
            f"patient; the change in {REPEATS} draws has its mean, lowest and highest value.",
        )


def recalibrate(
    table: Predictions, slides: int, *, draws: int = DRAWS, seed: int = 0
) -> Recalibrated:
    """Fit a correction to a number of slides, and score the others before and after."""
    known = table.labelled()
    chosen = draw_slides(known, slides, seed)
    metrics = {
        name: metric
        for name, metric in {**known.target.metrics, **known.target.calibration_metrics}.items()
        if metric.printed
    }
    changes: dict[str, list[float]] = {name: [] for name in metrics}
    for draw in chosen:
        before, after, _ = correct(known, draw)
        one, other = before.scored().truth, after.scored().truth
        for name, metric in metrics.items():
            changes[name].append(metric.function(*other) - metric.function(*one))
    before, after, words = correct(known, chosen[0])
    return Recalibrated(
        unit=known.unit,
        words=words,
        fitted=tuple(known.slides[row] for row in chosen[0].fitted),
        scored=len(before),
        scores=_scores(before, after, metrics, changes, draws, seed),
        before=before,
        after=after,
    )


def draw_slides(table: Predictions, slides: int, seed: int) -> list[Draw]:
    """Return draws of so many slides: patient by patient, in a random order.

    The slides of the last patient that are too many are left out of both sides.
    """
    names = np.asarray(table.patients or table.slides)
    patients = np.unique(names)
    if len(table) < 2 * FEWEST:
        raise CohortError(
            f"--recalibrate takes at most half of the {table.unit}s with a label, and at least "
            f"{FEWEST}. There {'is' if len(table) == 1 else 'are'} {len(table)}. Leave it out."
        )
    if slides < FEWEST or 2 * slides > len(table):
        raise CohortError(
            f"--recalibrate takes {FEWEST} to {len(table) // 2} of these "
            f"{count(len(table), table.unit)} with a label (at most half), not {slides}."
        )
    rng, found = np.random.default_rng(seed), []
    rows = {name: np.flatnonzero(names == name) for name in patients.tolist()}
    for _ in range(REPEATS):
        fitted: list[int] = []
        used = set()
        for name in rng.permutation(patients).tolist():
            if len(fitted) >= slides:
                break
            used.add(name)
            fitted += rng.permutation(rows[name])[: slides - len(fitted)].tolist()
        rest = [row for row in range(len(table)) if names[row] not in used]
        found.append(Draw(sorted(fitted), rest))
    if any(not table.target.can_score(table.truth[0][draw.scored]) for draw in found):
        raise CohortError(
            f"With {slides} of these {count(len(table), table.unit)} for recalibration, the others "
            "are too few, or too much alike, to be scored. Pass a smaller --recalibrate."
        )
    return found


def correct(table: Predictions, draw: Draw) -> tuple[Predictions, Predictions, str]:
    """Return the scored slides of a draw, before and after, and what was fitted to the others."""
    labels, answers = table.truth
    found = table.target.recalibrate(labels[draw.fitted], answers[draw.fitted])
    before = table.take(draw.scored)
    return before, replace(before, answers=found.apply(before.answers)), found.words


def _scores(
    before: Predictions,
    after: Predictions,
    metrics: dict[str, Metric],
    changes: dict[str, list[float]],
    draws: int,
    seed: int,
) -> tuple[RecalibratedScore, ...]:
    (one, patients), (other, _) = parts_of(before), parts_of(after)
    once = np.ones((1, patients), dtype=np.int64)
    times = draw_patients(patients, draws, seed)
    sides = []
    for parts in (one, other):
        values = sample(parts, once, metrics.values())
        drawn = sample(parts, times, [each for each in metrics.values() if each.has_interval])
        nothing = np.full(draws if patients > 1 else 0, np.nan)
        sides.append(
            {
                name: _around(metric, float(values[name][0, 0]), drawn.get(name, [nothing])[0])
                for name, metric in metrics.items()
            }
        )
    return tuple(
        _score(metric, *sides[0][name], *sides[1][name], changes[name])
        for name, metric in metrics.items()
    )


def _around(
    metric: Metric, value: float, drawn: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    return value, metric.around(value, drawn)


def _score(
    metric: Metric,
    before: float,
    drawn_before: NDArray[np.float64],
    after: float,
    drawn_after: NDArray[np.float64],
    changes: Sequence[float],
) -> RecalibratedScore:
    known = np.array([each for each in changes if not np.isnan(each)])
    sign = 1 if metric.higher_is_better else -1
    nan = float("nan")
    spread = (float(known.mean()), float(known.min()), float(known.max())) if len(known) else None
    return RecalibratedScore(
        metric=metric.name,
        title=metric.title,
        higher_is_better=metric.higher_is_better,
        before=estimate_of(metric, before, drawn_before),
        after=estimate_of(metric, after, drawn_after),
        change=estimate(after - before, drawn_after - drawn_before, biased=not metric.has_interval),
        changes=spread or (nan, nan, nan),
        improved=int((sign * known > 1e-9).sum()),
        draws=len(known),
    )
