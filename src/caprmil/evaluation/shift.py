"""Shift: how an external cohort differs from the slides that models were trained on.

Every difference is a number that compares some patients with others. What it is without a shift is
measured on the training patients themselves: a part of them, as many as the external cohort has (at
most half), is compared with the rest, many times. The external cohort is compared with as many of
them. Its shift is larger if hardly any part of the training patients differs as much. With few
training patients these parts vary too little; so hardly any random part of the patients of both
cohorts may differ as much, either, which is a permutation test. The larger p of both is taken, and
corrected after Holm over all rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.stats import ks_2samp, rankdata

from caprmil.errors import CohortError
from caprmil.evaluation.novelty import NEIGHBOURS, UNLIKE, standard_deviations

SPLITS = 400  # of training patients; those that measure a row without a shift
REPEATS = 40  # in which the external cohort is compared with as many training patients
MOST = 600  # slides on each side
COMPONENTS = 10  # of the features, for the classifier
GROUPS = 5  # of patients, for the classifier
RIDGE = 1.0
ALPHA = 0.05
FEWEST = 4  # patients on each side

Rows = NDArray[np.int64]
Matrix = NDArray[np.float64]
Statistic = Callable[[Rows, Rows], float]
"""How far the first rows of a table differ from the others."""


class Quantity(NamedTuple):
    """What is compared: a statistic of rows, in which those of training come first."""

    name: str
    statistic: Statistic
    remark: str
    """What the number is, in a few words."""
    training: str = ""
    """What is usual there, if a number says it: e.g. the median."""
    external: str = ""


@dataclass(frozen=True, kw_only=True)
class Shift:
    """One quantity in which the cohorts may differ."""

    name: str
    remark: str
    value: float
    usual: float
    """The median among parts of the training patients."""
    limit: float
    """What 95 % of such parts do not exceed."""
    p: float
    corrected_p: float
    training: str
    external: str

    @property
    def is_larger(self) -> bool:
        """Whether the shift is larger than those among the training patients."""
        return self.corrected_p < ALPHA

    def sentence(self) -> str:
        """Return the result in a sentence."""
        change = f" ({self.training} in training, {self.external} here)" if self.training else ""
        verdict = (
            "larger than among training patients"
            if self.is_larger
            else "no more than among training patients"
        )
        return (
            f"{self.name}{change}: {verdict}. {self.remark[0].upper()}{self.remark[1:]} "
            f"{self.value:.3g}; among training patients up to {self.limit:.3g} in 95 % of splits."
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_larger": self.is_larger}


@dataclass(frozen=True, eq=False, kw_only=True)
class Sides:
    """The patients of both cohorts. Entry n of a table of both is a slide: training comes first."""

    training: tuple[str, ...]
    """The patient of each training slide."""
    external: tuple[str, ...]
    _splits: list[tuple[Rows, Rows, Rows]] = field(default_factory=list)
    _mixed: list[tuple[Rows, Rows]] = field(default_factory=list)

    @property
    def enough(self) -> bool:
        return min(len(set(self.training)), len(set(self.external))) >= FEWEST

    @property
    def owners(self) -> NDArray[np.int64]:
        """The number of the patient of each entry."""
        names = [f"t{name}" for name in self.training] + [f"e{name}" for name in self.external]
        return np.unique(names, return_inverse=True)[1].astype(np.int64)

    def splits(self) -> list[tuple[Rows, Rows, Rows]]:
        """Return the rows of held-out, other training and external slides of each split."""
        if not self._splits:
            rng = np.random.default_rng(0)
            owners, n = self.owners, len(self.training)
            inside = [np.flatnonzero(owners[:n] == each) for each in np.unique(owners[:n])]
            outside = [n + np.flatnonzero(owners[n:] == each) for each in np.unique(owners[n:])]
            held = min(len(outside), len(inside) // 2)
            for _ in range(SPLITS):
                order, other = rng.permutation(len(inside)), rng.permutation(len(outside))
                parts = (order[:held], inside), (order[held:], inside), (other[:held], outside)
                one, rest, away = (np.concatenate([own[at] for at in c]) for c, own in parts)
                self._splits.append((one, rest, away))
        return self._splits

    def mixed(self) -> list[tuple[Rows, Rows]]:
        """Return the rows of parts of the patients of both cohorts, of the sizes of `splits`."""
        if not self._mixed:
            rng, owners = np.random.default_rng(1), self.owners
            rows = [np.flatnonzero(owners == each) for each in range(owners.max() + 1)]
            n = len(set(self.training))
            held = min(len(rows) - n, n // 2)
            for _ in range(SPLITS):
                order = rng.permutation(len(rows))
                parts = order[:held], order[held:n]
                one, rest = (np.concatenate([rows[at] for at in part]) for part in parts)
                self._mixed.append((one, rest))
        return self._mixed


def measure(quantities: Iterable[Quantity], sides: Sides) -> tuple[Shift, ...]:
    """Return the shift of each quantity, p corrected for their number."""
    if not sides.enough:
        raise CohortError(f"Shifts need {FEWEST} patients in training and outside.")
    found = [_measure(each, sides) for each in quantities]
    order, least = np.argsort([each.p for each in found], kind="stable"), 0.0
    for rank, at in enumerate(order.tolist()):
        least = max(least, min(1.0, (len(found) - rank) * found[at].p))
        found[at] = replace(found[at], corrected_p=least)
    return tuple(found)


def _measure(quantity: Quantity, sides: Sides) -> Shift:
    splits = sides.splits()
    usual = np.array([quantity.statistic(one, rest) for one, rest, _ in splits])
    values = [quantity.statistic(away, rest) for _, rest, away in splits[:REPEATS]]
    value = float(np.mean(values))
    mixed = np.array([quantity.statistic(one, rest) for one, rest in sides.mixed()])
    p = max((1 + int((each >= value - 1e-12).sum())) / (1 + SPLITS) for each in (usual, mixed))
    return Shift(
        name=quantity.name,
        remark=quantity.remark,
        value=value,
        usual=float(np.median(usual)),
        limit=float(np.quantile(usual, 1 - ALPHA)),
        p=p,
        corrected_p=p,
        training=quantity.training,
        external=quantity.external,
    )


def of_features(
    source: str, training: NDArray[Any], external: NDArray[Any], sides: Sides
) -> Iterator[Quantity]:
    """Yield the quantities of the features of slides (rows): mean, classifier and novelty."""
    scaled = _scaled(training.astype(np.float64), external.astype(np.float64))

    def mean_shift(one: Rows, rest: Rows) -> float:
        apart = scaled[one].mean(axis=0) - scaled[rest].mean(axis=0)
        return float(np.sqrt((apart**2).mean()))

    yield Quantity(
        f"{source}: mean",
        mean_shift,
        "distance of the means, in standard deviations within a cohort (root mean square):",
    )
    owners = sides.owners
    scores = _principal(scaled)
    yield Quantity(
        f"{source}: classifier",
        lambda one, rest: _separability(scores, owners, one, rest),
        "AUC of a linear classifier that tells the slides of one side from the other:",
    )
    apart = cdist(scaled, scaled) / np.sqrt(scaled.shape[1])
    apart[owners[:, None] == owners] = np.inf  # the slides of a patient are alike
    yield Quantity(
        f"{source}: novelty",
        lambda one, rest: _novel(apart, one, rest),
        f"share of slides that are farther from the training slides than {100 * UNLIKE:g} % of "
        "these are from each other:",
    )


def _scaled(training: Matrix, external: Matrix) -> Matrix:
    """Return all rows in units of the standard deviation within the cohorts.

    That of the training slides alone would shrink their own outliers, and not those outside.
    """
    centred = np.concatenate([training - training.mean(axis=0), external - external.mean(axis=0)])
    both = np.concatenate([training, external])
    return np.asarray(both / standard_deviations(centred))


def of_numbers(name: str, training: NDArray[Any], external: NDArray[Any]) -> Quantity:
    """Return the quantity of a number of slides: the Kolmogorov-Smirnov distance."""
    both = np.concatenate([training, external]).astype(np.float64)
    known = ~np.isnan(both)

    def distance(one: Rows, rest: Rows) -> float:
        own, other = both[one][known[one]], both[rest][known[rest]]
        if not len(own) or not len(other):
            return 0.0
        with np.errstate(divide="ignore"):  # in the p of two values, which is not used
            return float(ks_2samp(own, other, method="asymp").statistic)

    middle = [f"median {np.nanmedian(each):,.4g}" for each in (training, external)]
    return Quantity(name, distance, "largest distance of the distributions:", *middle)


def of_shares(
    name: str, training: NDArray[Any], external: NDArray[Any], groups: Sequence[str]
) -> Quantity:
    """Return the quantity of groups, numbers below `len(groups)`, or -1 if it is not known."""
    both = np.concatenate([training, external]).astype(np.int64)

    def shares(rows: Rows) -> Matrix:
        own = both[rows][both[rows] >= 0]
        return np.bincount(own, minlength=len(groups)) / max(1, len(own))

    def distance(one: Rows, rest: Rows) -> float:
        return float(np.abs(shares(one) - shares(rest)).sum() / 2)

    n = len(training)
    sides = np.arange(n), np.arange(n, len(both))
    text = [_in_words(shares(rows), groups) for rows in sides]
    return Quantity(name, distance, "share of slides that would have to change:", *text)


def _in_words(shares: Matrix, groups: Sequence[str]) -> str:
    order = np.argsort(-shares, kind="stable")[:4]
    return ", ".join(f"{groups[at]} {shares[at]:.0%}" for at in sorted(order.tolist()))


def _principal(values: Matrix) -> Matrix:
    """Return the first principal components, each with a spread of 1."""
    centred = values - values.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    kept = min(COMPONENTS, int((sizes > 1e-9 * max(sizes[0], 1e-12)).sum()))
    return np.asarray(left[:, :kept] * np.sqrt(len(values)))


def _separability(scores: Matrix, owners: NDArray[np.int64], one: Rows, rest: Rows) -> float:
    """Return the AUC of a ridge classifier on patients that it was not fitted to; at least 0.5."""
    rows = np.concatenate([one, rest])
    truth = np.repeat([1.0, 0.0], [len(one), len(rest)])
    weights = np.where(truth > 0, 0.5 / len(one), 0.5 / len(rest))  # both sides count alike
    group = np.empty(len(rows), dtype=np.int64)
    for side in (truth > 0, truth == 0):  # each group has patients of both sides
        unique, place = np.unique(owners[rows[side]], return_inverse=True)
        group[side] = np.random.default_rng(0).permutation(len(unique))[place] % GROUPS
    values = np.c_[np.ones(len(rows)), scores[rows]]
    found = np.zeros(len(rows))
    penalty = np.diag([0.0, *[RIDGE / len(rows)] * scores.shape[1]])
    for fold in range(GROUPS):
        known, new = group != fold, group == fold
        weighted = values[known] * weights[known, None]
        found[new] = (
            values[new]
            @ np.linalg.lstsq(
                weighted.T @ values[known] + penalty, weighted.T @ truth[known], rcond=None
            )[0]
        )
    # Each part has its own classifier, whose scores are only compared within the part.
    areas = [_area(found[group == fold], truth[group == fold]) for fold in range(GROUPS)]
    known_areas = [area for area in areas if not np.isnan(area)]
    return max(0.5, float(np.mean(known_areas))) if known_areas else 0.5


def _area(scores: Matrix, truth: Matrix) -> float:
    positive = int(truth.sum())
    negative = len(truth) - positive
    if not positive or not negative:
        return float("nan")
    above = rankdata(scores)[truth > 0].sum() - positive * (positive + 1) / 2
    return float(above / (positive * negative))


def _novel(apart: Matrix, one: Rows, rest: Rows) -> float:
    """Return the share of rows farther from the others than nearly all of these are."""
    limit = np.quantile(_nearest(apart[np.ix_(rest, rest)]), UNLIKE)
    return float((_nearest(apart[np.ix_(one, rest)]) > limit).mean())


def _nearest(apart: Matrix) -> Matrix:
    count = min(NEIGHBOURS, apart.shape[1] - 1)
    found: Matrix = np.partition(apart, count - 1, axis=1)[:, :count].mean(axis=1)
    return found
