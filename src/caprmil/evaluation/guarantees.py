"""Guarantees: sets that hold the label with a stated probability, and what it costs to abstain.

Each fold is calibrated on its validation part, and measured on its test part. Patients are the
units: the guarantee is for a slide of a new patient, however many slides the patients have (R.
Dunn, L. Wasserman and A. Ramdas, "Distribution-free prediction sets for two-layer hierarchical
models", 2022).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, RecipeError, count, shorten
from caprmil.evaluation.predictions import Predictions
from caprmil.io import tables
from caprmil.targets import Target
from caprmil.targets.conformal import Scores, Sets

COVERAGE = 0.9  # of the report of a run
ROUNDING = 1e-9
STEPS = 20  # points of a curve of risk


def check_coverage(coverage: float) -> None:
    """Raise unless a coverage is a share between 0 and 1."""
    if not 0 < coverage < 1:
        raise RecipeError(f"Coverage is a share between 0 and 1, such as 0.9, not {coverage:g}.")


def threshold(scores: Scores, patients: Sequence[str], coverage: float) -> float:
    """Return the nonconformity that a slide of a new patient does not exceed, with this coverage.

    Each of m patients has the weight 1 / (m + 1), which its slides share, and the new patient the
    rest, at infinity. With one slide each it is the ceil((m + 1) coverage)-th smallest score.
    Infinite if there are too few patients.
    """
    _, owner, sizes = np.unique(np.asarray(patients), return_inverse=True, return_counts=True)
    weights = 1 / sizes[owner] / (len(sizes) + 1)
    order = np.argsort(scores, kind="stable")
    reached = np.cumsum(weights[order]) >= coverage - ROUNDING
    return float(scores[order][reached.argmax()]) if reached.any() else math.inf


def thresholds(validation: Mapping[str, Predictions], coverage: float) -> dict[str, float]:
    """Return the threshold of each fold, from the validation slides with a label.

    It is infinite without any: sets then hold everything.
    """
    check_coverage(coverage)
    found = {}
    for fold, table in validation.items():
        found[fold] = math.inf
        if table.has_labels:
            own = table.labelled()
            scores = own.target.conformal.nonconformity(*own.truth)
            found[fold] = threshold(scores, own.patients or own.slides, coverage)
    return found


def has_sets(target: Target) -> bool:
    """Return whether a target has sets of its own."""
    try:
        return target.conformal is not None
    except CohortError:
        return False


def guaranteed(coverage: float, models: int) -> float:
    """Return the coverage that a majority of several models cannot fall below.

    A label is missed if at least half of the models miss it; by Markov's inequality this has at
    most the probability of a miss times models / ceil(models / 2).
    """
    return max(0.0, 1 - (1 - coverage) * models / math.ceil(models / 2))


class Share(NamedTuple):
    """A share with Wilson's interval at 95 %, in which every patient counts once."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class CoverageRow:
    """How the sets of some test slides turned out."""

    group: str
    """all slides, a class (or a quarter of the labels), or a site."""
    slides: int
    patients: int
    covered: float
    low: float
    high: float
    size: float | None
    """The mean size of a set; None where it is infinite."""
    abstained: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.covered <= 1 or min(self.slides, self.patients) < 1:
            raise RecipeError(f"the coverage of {self.group} cannot be {self.covered}")
        ends = (0, self.low, self.covered, self.high, 1)
        if not all(low <= high + ROUNDING for low, high in pairwise(ends)):
            raise RecipeError(
                f"{self.low} to {self.high} is no interval of {self.covered} ({self.group})"
            )
        if self.size is not None and not 0 <= self.size < math.inf:
            raise RecipeError(f"a set of {self.group} cannot have the size {self.size}")
        if self.abstained is not None and not 0 <= self.abstained <= 1:
            raise RecipeError(f"{self.abstained} of {self.group} cannot be abstained")


@dataclass(frozen=True, kw_only=True)
class RiskPoint:
    """The risk of the answers that are kept, if the least certain are not given."""

    kept: float
    risk: float

    def __post_init__(self) -> None:
        if not (0 < self.kept <= 1 and 0 <= self.risk < math.inf):
            raise RecipeError(f"a risk cannot be {self.risk} of {self.kept}")


@dataclass(frozen=True, kw_only=True)
class Guarantees:
    """What was promised and what was measured on the test slides of a run.

    Without validation slides there are no sets, and only the risk is measured.
    """

    coverage: float
    size_name: str
    risk_title: str
    rows: tuple[CoverageRow, ...]
    risks: tuple[RiskPoint, ...]
    notes: tuple[str, ...]
    unit: str = "slide"
    """What a set is of: a slide or a patient."""

    def __post_init__(self) -> None:
        if not 0 < self.coverage < 1 or not (self.rows or self.risks):
            raise RecipeError("there is no coverage, or no slide")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of a table, ready to print."""
        slides = self.unit == "slide"
        head = [f"test {self.unit}s", *(["slides"] if slides else []), "patients", "covered"]
        head += ["95 % interval", self.size_name]
        decided = any(row.abstained is not None for row in self.rows)
        cells = [
            [
                row.group,
                *([f"{row.slides:,}"] if slides else []),
                f"{row.patients:,}",
                f"{row.covered:.3f}",
                f"{row.low:.3f} to {row.high:.3f}",
                "-" if row.size is None else f"{row.size:.3g}",
                *([f"{row.abstained:.3f}"] if row.abstained is not None else []),
            ]
            for row in self.rows
        ]
        return [*head, *(["abstained"] if decided else [])], cells

    def as_markdown(self) -> str:
        return tables.markdown_table(*self.as_rows(), self.notes)


def measure_guarantees(
    test: Predictions,
    validation: Mapping[str, Predictions],
    *,
    coverage: float = COVERAGE,
    sites: Mapping[str, str] | None = None,
) -> Guarantees:
    """Calibrate each fold on its validation part, and measure its sets on its test part.

    The risk of what is kept needs no sets: it is measured wherever answers say how sure they are.
    """
    target = test.target
    if not has_sets(target) or not validation:
        return _risk_alone(test, coverage)
    limits = thresholds(validation, coverage)
    parts = {fold: part for fold, part in test.labelled().by_fold().items() if fold in limits}
    if not parts:
        return _risk_alone(test, coverage)
    table = Predictions.concatenate(list(parts.values()))
    each = [target.conformal.sets(part.answers, limits[fold]) for fold, part in parts.items()]
    rows = _rows(table, np.concatenate(each), sites or {})
    return Guarantees(
        coverage=coverage,
        size_name=f"mean {target.conformal.size_name}",
        risk_title=target.risk_title,
        rows=tuple(rows),
        risks=tuple(selective_risk(table)),
        notes=tuple(_notes(coverage, limits, table.unit)),
        unit=table.unit,
    )


def measure_each(
    test: Predictions,
    validation: Mapping[str, Predictions],
    *,
    coverage: float = COVERAGE,
    sites: Mapping[str, str] | None = None,
) -> dict[str, Guarantees]:
    """Measure each of several targets that has sets or a risk; "" is the only one."""
    held = {fold: table.leaves() for fold, table in validation.items()}
    found = {}
    for name, own in test.leaves().items():
        parts = {fold: tables[name] for fold, tables in held.items()}
        if own.has_labels:
            with suppress(CohortError):  # neither sets nor a risk
                found[name] = measure_guarantees(own, parts, coverage=coverage, sites=sites)
    return found


def _risk_alone(test: Predictions, coverage: float) -> Guarantees:
    """Return the risk of what is kept; raise if there is none."""
    risks = tuple(selective_risk(test.labelled()))
    if not risks:
        raise CohortError(
            "Sets are calibrated on the validation slides of a fold, and there are none. Train "
            "with splits.validation above 0."
        )
    return Guarantees(
        coverage=coverage,
        size_name="",
        risk_title=test.target.risk_title,
        rows=(),
        risks=risks,
        notes=("There are no sets: they are calibrated on validation slides.",),
        unit=test.unit,
    )


def _rows(table: Predictions, sets: Sets, sites: Mapping[str, str]) -> Iterator[CoverageRow]:
    """Yield coverage of all slides, of each class, and of each site."""
    labels, _ = table.truth
    strata, names = table.target.strata({str(n): label for n, label in enumerate(labels.tolist())})
    codes = np.array(list(strata.values()))
    groups = {f"all {table.unit}s": np.ones(len(table), dtype=np.bool_)}
    groups |= {str(name): codes == code for code, name in enumerate(names)}
    own = np.array([sites.get(slide, "") for slide in table.slides])
    groups |= {f"site {site}": own == site for site in sorted({*own.tolist()} - {""})}
    for group, inside in groups.items():
        if inside.any():
            yield _row(group, table.take(np.flatnonzero(inside).tolist()), sets[inside])


def _row(group: str, table: Predictions, sets: Sets) -> CoverageRow:
    conformal, (labels, _) = table.target.conformal, table.truth
    patients = len(set(table.patients or table.slides))
    share = wilson(float(conformal.holds(sets, labels).mean()), patients)
    abstains, size = conformal.abstains(sets), float(conformal.size(sets).mean())
    return CoverageRow(
        group=group,
        slides=len(table),
        patients=patients,
        covered=share.value,
        low=share.low,
        high=share.high,
        size=size if math.isfinite(size) else None,
        abstained=None if abstains is None else float(abstains.mean()),
    )


def wilson(share: float, n: int) -> Share:
    """Return a share of n with its interval at 95 %."""
    z = NormalDist().inv_cdf(0.975)
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return Share(share, middle - reach, middle + reach)


def selective_risk(table: Predictions) -> Iterator[RiskPoint]:
    """Yield the mean loss of the most certain answers, from the surest twentieth to all of them."""
    labels, answers = table.truth
    confidence = table.target.confidence(answers)
    if confidence is None:
        return
    order = np.argsort(-confidence, kind="stable")
    losses = table.target.losses(labels, answers)[order]
    means = np.cumsum(losses) / np.arange(1, len(losses) + 1)
    for n in np.unique(np.ceil(np.arange(1, STEPS + 1) * len(losses) / STEPS).astype(int)):
        yield RiskPoint(kept=float(n / len(losses)), risk=float(means[n - 1]))


def _notes(coverage: float, limits: Mapping[str, float], unit: str) -> Iterator[str]:
    of = "a new patient" if unit == "patient" else "a slide of a new patient"
    yield (
        f"A set holds the label of {of} with a probability of {coverage:g}, if patients are "
        f"exchangeable: on average over all {unit}s, not for each class or site."
    )
    if unlimited := [fold for fold, limit in limits.items() if math.isinf(limit)]:
        least = math.ceil(1 / (1 - coverage) - 1 - ROUNDING)
        yield (
            f"{shorten(unlimited)}: the validation part has fewer than {count(least, 'patient')}, "
            "so sets hold everything there."
        )


def combined_sets(
    target: Target, answers: Mapping[str, NDArray[np.float64]], limits: Mapping[str, float]
) -> Sets:
    """Return the set of one slide, from its answer by each fold's model: that of the majority."""
    conformal = target.conformal
    return conformal.majority(
        [conformal.sets(answer[None], limits[fold]) for fold, answer in answers.items()]
    )
