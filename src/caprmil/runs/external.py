"""External validation of a run: scores, shifts and recalibration on another cohort."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.sources import Folders
from caprmil.errors import BagError, RunError, count, shorten
from caprmil.evaluation.baselines import find_sites
from caprmil.evaluation.external_scores import (
    DRAWS,
    LEVEL,
    Estimate,
    ExternalScore,
    headline_sentence,
    score_external,
)
from caprmil.evaluation.novelty import UNLIKE
from caprmil.evaluation.predictions import Predictions
from caprmil.evaluation.recalibration import Recalibrated, recalibrate
from caprmil.evaluation.shift import Shift
from caprmil.io.progress import Step
from caprmil.io.tables import TableLike, table_name
from caprmil.runs.cohort_shift import Means, measure_shifts
from caprmil.runs.conformal_sets import mean_feature
from caprmil.runs.external_cohort import answer_cohort, combine_answers, read_external
from caprmil.runs.run import Run
from caprmil.targets import Target


class SiteRow(NamedTuple):
    """One site of the external cohort."""

    site: str
    slides: int
    patients: int
    labels: str
    score: Estimate
    """The headline metric of all models together."""
    unlike: float | None
    """The share of slides unlike the training slides."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExternalValidation:
    """What was found on an external cohort."""

    run: str
    cohort: str
    model: str
    unit: str
    slides: int
    patients: int
    folds: int
    headline: str
    scores: tuple[ExternalScore, ...]
    shifts: tuple[Shift, ...]
    unlike: tuple[int, int] | None
    """How many bags are unlike those of training, and of how many; None if not known."""
    bag_unit: Literal["slide", "patient"]
    """What a bag is of. Where answers of slides are combined, a slide, and `unit` a patient."""
    sites: tuple[SiteRow, ...]
    recalibrated: Recalibrated | None
    notes: tuple[str, ...]
    predictions: Predictions
    """The answers of each fold's model."""

    @property
    def first(self) -> ExternalScore:
        """The score of the headline metric."""
        return next(each for each in self.scores if each.metric == self.headline)

    def size(self) -> str:
        """Return how much was scored, as the scores of a run say it."""
        units = [count(self.slides, "slide")] if self.unit == "slide" else []
        return ", ".join([*units, count(self.patients, "patient"), count(self.folds, "fold")]) + "."

    def sentences(self) -> Iterator[str]:
        """Yield what was found, the most important first."""
        yield headline_sentence(self.first, self.unit)
        if self.shifts:
            larger = [each for each in self.shifts if each.is_larger]
            yield from (each.sentence() for each in larger)
            if not larger:
                yield (
                    f"No shift is larger than those among the training patients, in "
                    f"{count(len(self.shifts), 'comparison')}."
                )
        if self.unlike is not None:
            found, of = self.unlike
            yield (
                f"{found:,} of {count(of, self.bag_unit)} are unlike the training "
                f"{self.bag_unit}s "
                f"({found / of:.0%}; of the same kind, about {1 - UNLIKE:.0%} would be)."
            )
        if self.recalibrated is not None:
            yield from self.recalibrated.sentences()

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the answers themselves."""
        unlike = (
            None if self.unlike is None else dict(zip(("unlike", "of"), self.unlike, strict=True))
        )
        return {
            "run": self.run,
            "cohort": self.cohort,
            "unit": self.unit,
            **({"slides": self.slides} if self.unit == "slide" else {}),
            "patients": self.patients,
            "folds": self.folds,
            "interval_level": LEVEL,
            "headline": self.headline,
            "scores": [each.as_dict() for each in self.scores],
            "shifts": [each.as_dict() for each in self.shifts],
            "unlike_training": unlike,
            "sites": [each._asdict() | {"score": each.score._asdict()} for each in self.sites],
            "recalibration": None if self.recalibrated is None else self.recalibrated.as_dict(),
            "findings": list(self.sentences()),
            "notes": list(self.notes),
        }


def validate_external(
    run: Run,
    table: TableLike,
    features: Folders | None = None,
    *,
    label: str | None = None,
    vectors: str | Path | None = None,
    recalibrate_on: int | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    force: bool = False,
    device: str = "auto",
    progress: Step | None = None,
    failed: dict[str, BagError] | None = None,
) -> ExternalValidation:
    """Score a run on another cohort, beside its cross-validation, and measure how that differs.

    `recalibrate_on` is a number of slides, drawn with the seed, to recalibrate on: they are never
    scored before or after.
    """
    if not any(fold.test for fold in run.done):
        raise RunError(
            f"{run.folder} has no test slides to compare with, as a run from the hub. Score the "
            "cohort alone: caprmil predict, then caprmil evaluate PREDICTIONS.csv with labels."
        )
    reading: dict[str, Any] = {"label": label, "vectors": vectors, "force": force}
    cohort = read_external(run, table, features, **reading, failed=failed)
    answers = answer_cohort(run, cohort, device=device, progress=progress, failed=failed)
    own, together = combine_answers(run, answers)
    inside = run.predictions if run.finished else run.all_tested
    scores = score_external(inside, own, together, draws=draws, seed=seed)
    corrected = None
    if recalibrate_on is not None:
        corrected = recalibrate(together, recalibrate_on, draws=draws, seed=seed)
    means, unread = _means(cohort)
    shares = _unlike(run, means)
    shifts, notes = measure_shifts(run, cohort, means)
    scored = together.scored()
    return ExternalValidation(
        run=str(run.folder),
        cohort=table_name(table),
        model=run.facts.model,
        unit=own.unit,
        slides=len(set(together.labelled().slides)),
        patients=len(set(scored.patients or scored.slides)),
        folds=len(run.done),
        headline=run.target.headline,
        scores=scores,
        shifts=shifts,
        unlike=(sum(share > UNLIKE for share in shares.values()), len(shares)) if shares else None,
        bag_unit=run.unit,
        sites=tuple(_sites(run, cohort, together, shares, draws, seed)),
        recalibrated=corrected,
        notes=(*_notes(scores, together, cohort), *notes, *unread),
        predictions=own,
    )


def _notes(scores: Sequence[ExternalScore], together: Predictions, cohort: Cohort) -> Iterator[str]:
    yield (
        "Scores of single models are means over folds on both sides. Intervals are at 95 %, by "
        "patient; those of differences draw patients of both cohorts independently. They describe "
        "other patients, not another training, and are not corrected for the number of metrics."
    )
    if biased := [each.title for each in scores if each.biased and each.printed]:
        yield (
            f"{', '.join(biased)}: too high on few {together.unit}s, so cohorts of different sizes "
            "cannot be compared, and the difference has no interval."
        )
    if missing := len(together) - len(together.labelled()):
        yield f"{count(missing, together.unit)} without a label are not scored."
    yield from cohort.notes


def _means(cohort: Cohort) -> tuple[dict[str, NDArray[np.float32]], list[str]]:
    """Return the mean feature of each slide or patient of a cohort, and notes."""
    found, bad = {}, []
    for entry in cohort.entries:
        try:
            found[entry.name] = mean_feature(entry.path)
        except BagError:
            bad.append(entry.name)
    return found, [f"Bags that cannot be read are left out: {shorten(bad)}."] if bad else []


def _unlike(run: Run, means: Means) -> dict[str, float]:
    if run.novelty is None:
        return {}
    return {name: run.novelty.share_below(mean) for name, mean in means.items()}


def _sites(
    run: Run,
    cohort: Cohort,
    together: Predictions,
    shares: Mapping[str, float],
    draws: int,
    seed: int,
) -> Iterator[SiteRow]:
    """Yield each site of a cohort that has several."""
    sites = find_sites(cohort).of
    owners = {entry.patient: sites.get(entry.name, "") for entry in cohort.entries}
    of = [sites.get(name, owners.get(name, "")) for name in together.slides]
    known = together.target.known(np.asarray(together.labels))
    for site in sorted(set(of) - {""}):
        rows = [row for row, name in enumerate(of) if name == site]
        table = together.take(rows)
        labelled = [row for row in rows if known[row]]
        metric, score = run.target.headline, Estimate(float("nan"))
        if labelled and run.target.can_score(together.take(labelled).truth[0]):
            value = table.scores()[metric]
            low, high = table.intervals(names=[metric], draws=draws, seed=seed)[metric]
            score = Estimate(value, low, high)
        own = [
            shares[e.name] > UNLIKE
            for e in cohort.entries
            if e.name in shares and sites.get(e.name) == site
        ]
        yield SiteRow(
            site=site,
            slides=len(rows),
            patients=len(set(table.patients or table.slides)),
            labels=_counted(run.target, cohort, site, sites),
            score=score,
            unlike=float(np.mean(own)) if own else None,
        )


def _counted(target: Target, cohort: Cohort, site: str, sites: Mapping[str, str]) -> str:
    """Return how often each stratum of labels occurs at a site."""
    if target.parts:
        return ""
    labels = cohort.labels
    strata, names = target.strata(labels) if labels else ({}, ())
    times = Counter(strata[name] for name in labels if sites.get(name) == site)
    return ", ".join(f"{names[code]} {times[code]}" for code in sorted(times))
