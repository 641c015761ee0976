"""How good the answers are: numbers from labels and probabilities, whoever made them.

Everywhere, `labels` (n,) are class numbers and `probabilities` (n, C) sum to one over the classes;
a prediction is the likeliest class, the first of equals. A metric that has no meaning on its input
(the AUC of one class) is NaN, never a stand-in.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from caprmil.errors import CohortError, UnknownNameError

Labels: TypeAlias = NDArray[np.integer]
Probabilities: TypeAlias = NDArray[np.floating]
Metric: TypeAlias = Callable[[Labels, Probabilities], float]

BINS = 10
SUM_TOLERANCE = 1e-3  # probabilities printed with three decimals still pass


class Spread(NamedTuple):
    """Mean and sample standard deviation, and how many values counted (the others were NaN)."""

    mean: float
    std: float
    counted: int


class Interval(NamedTuple):
    """The two ends of an interval."""

    low: float
    high: float


def auc(labels: Labels, probabilities: Probabilities) -> float:
    """Return the area under the ROC curve: of class 1 if there are two, else the mean over classes.

    The mean is one-vs-rest, unweighted, over the classes that have an area (see `auc_by_class`).
    """
    areas = auc_by_class(labels, probabilities)
    if len(areas) == 2:
        return float(areas[1])
    areas = areas[~np.isnan(areas)]
    return float(areas.mean()) if len(areas) else float("nan")


def auc_by_class(labels: Labels, probabilities: Probabilities) -> NDArray[np.float64]:
    """Return the area of each class against the rest; NaN for one that is absent, or alone."""
    labels, probabilities = _checked(labels, probabilities)
    return np.array([_area(labels == c, column) for c, column in enumerate(probabilities.T)])


def ace(labels: Labels, probabilities: Probabilities) -> float:
    """Return the adaptive calibration error (Nixon et al. 2019): mean over classes, 10 equal bins.

    Equal in number of slides, that is. Probabilities of exactly 0 are left out. It is biased
    upwards in small samples: see `ace_floor`.
    """
    labels, probabilities = _checked(labels, probabilities)
    errors = [_adaptive_error(labels == c, column) for c, column in enumerate(probabilities.T)]
    return float(np.mean(errors))


def ace_floor(probabilities: Probabilities, draws: int = 200, seed: int = 0) -> tuple[float, float]:
    """Return mean and spread of the ACE that a perfectly calibrated model would read.

    The truth is drawn from the probabilities themselves, so that all that is left is chance.
    """
    check_probabilities(probabilities)
    rng = np.random.default_rng(seed)
    ladder = np.cumsum(probabilities, axis=1, dtype=np.float64)
    ladder /= ladder[:, -1:]
    truths = ((rng.random((len(ladder), 1)) >= ladder[:, :-1]).sum(axis=1) for _ in range(draws))
    mean, std, _ = mean_and_spread([ace(truth, probabilities) for truth in truths])
    return mean, std


def ece(labels: Labels, probabilities: Probabilities) -> float:
    """Return the expected calibration error of the predicted class, in 10 bins of equal width."""
    labels, probabilities = _checked(labels, probabilities)
    right = probabilities.argmax(axis=1) == labels
    return _equal_width_error(right, probabilities.max(axis=1))


def ece_positive(labels: Labels, probabilities: Probabilities) -> float:
    """Return the expected calibration error of class 1 of two: another number than `ece`."""
    labels, probabilities = _checked(labels, probabilities)
    if probabilities.shape[1] != 2:
        raise ValueError(f"ece_positive is for two classes. {probabilities.shape=}")
    return _equal_width_error(labels == 1, probabilities[:, 1])


def brier(labels: Labels, probabilities: Probabilities) -> float:
    """Return the Brier score: of class 1 if there are two (0 to 1), else over all (0 to 2)."""
    labels, probabilities = _checked(labels, probabilities)
    if probabilities.shape[1] == 2:
        return float(np.mean((probabilities[:, 1] - labels) ** 2))
    truth = np.eye(probabilities.shape[1])[labels]
    return float(np.mean(((probabilities - truth) ** 2).sum(axis=1)))


def kappa(labels: Labels, probabilities: Probabilities) -> float:
    """Return Cohen's kappa with quadratic weights; NaN where all is one and the same class."""
    found = _confusion(labels, probabilities)
    expected = np.outer(found.sum(axis=1), found.sum(axis=0)) / found.sum()
    place = np.arange(len(found))
    weights = (place[:, None] - place) ** 2
    worst = float((weights * expected).sum())
    return 1 - float((weights * found).sum()) / worst if worst else float("nan")


def accuracy(labels: Labels, probabilities: Probabilities) -> float:
    """Return the share of right predictions."""
    found = _confusion(labels, probabilities)
    return float(found.trace() / found.sum())


def balanced_accuracy(labels: Labels, probabilities: Probabilities) -> float:
    """Return the mean recall over the classes that occur in the labels."""
    found = _confusion(labels, probabilities)
    size = found.sum(axis=1)
    return float(np.mean(found.diagonal()[size > 0] / size[size > 0]))


def f1(labels: Labels, probabilities: Probabilities) -> float:
    """Return the mean F1 over classes.

    A class that is neither a label nor predicted anywhere is left out; one that is only a label,
    or only predicted, counts 0.
    """
    found = _confusion(labels, probabilities)
    size = found.sum(axis=1) + found.sum(axis=0)
    return float(np.mean(2 * found.diagonal()[size > 0] / size[size > 0]))


METRICS: dict[str, Metric] = {
    "auc": auc,
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "kappa": kappa,
    "ace": ace,
    "ece": ece,
    "ece_positive": ece_positive,
    "brier": brier,
}
TWO_CLASSES_ONLY = frozenset({"ece_positive"})
# Biased upwards in small samples, and again in each draw of a bootstrap.
CALIBRATION_ERRORS = frozenset({"ace", "ece", "ece_positive"})
LOWER_IS_BETTER = CALIBRATION_ERRORS | {"brier"}


def score(labels: Labels, probabilities: Probabilities) -> dict[str, float]:
    """Return every metric that applies, by name."""
    names = _applicable(None, probabilities)
    return {name: METRICS[name](labels, probabilities) for name in names}


def mean_and_spread(values: Iterable[float]) -> Spread:
    """Return mean, sample standard deviation and number of the values that are not NaN.

    The spread of a single value is not known: NaN, not 0.
    """
    array = np.array(list(values), dtype=np.float64)
    array = array[~np.isnan(array)]
    mean = float(array.mean()) if len(array) else float("nan")
    std = float(array.std(ddof=1)) if len(array) > 1 else float("nan")
    return Spread(mean, std, len(array))


def bootstrap(
    labels: Labels,
    probabilities: Probabilities,
    patients: Sequence[str],
    *,
    metrics: Iterable[str] | None = None,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return the percentile interval of each metric when patients are drawn again.

    Patients are drawn with replacement and bring all their slides. Draws on which a metric is NaN
    (one class only) do not count for it; with a single patient there is nothing to draw, and the
    interval is NaN. A draw repeats slides, which looks like miscalibration: the intervals of
    CALIBRATION_ERRORS lie too high, and may miss the value itself. Their yardstick is `ace_floor`.
    """
    labels, probabilities = _checked(labels, probabilities)
    if len(patients) != len(labels):
        raise ValueError(f"Give one patient for each label. {len(patients)=}, {len(labels)=}")
    if not 0 < level < 1 or draws < 1:
        raise ValueError(f"{level=} must lie between 0 and 1, and {draws=} be at least 1.")
    names = _applicable(metrics, probabilities)
    unique, owner = np.unique(np.asarray(patients), return_inverse=True)
    values = np.full((len(names), draws), np.nan)
    rng = np.random.default_rng(seed)
    for draw in range(draws if len(unique) > 1 else 0):
        times = np.bincount(rng.integers(len(unique), size=len(unique)), minlength=len(unique))
        rows = np.repeat(np.arange(len(labels)), times[owner])
        values[:, draw] = [METRICS[name](labels[rows], probabilities[rows]) for name in names]
    ends = [(1 - level) / 2, (1 + level) / 2]
    return {name: _interval(row, ends) for name, row in zip(names, values, strict=True)}


def check_probabilities(probabilities: Probabilities, names: Sequence[str] | None = None) -> None:
    """Raise unless each row holds probabilities; `names` says what a row is called in the error."""
    if probabilities.ndim != 2 or probabilities.shape[1] < 2:
        raise ValueError(f"Probabilities are (slides, classes >= 2). {probabilities.shape=}")
    if not len(probabilities):
        raise CohortError("There are no predictions to score.")
    total = probabilities.sum(axis=1, dtype=np.float64)
    # Written so that NaN, which compares as false, is caught by the same lines.
    fits = (probabilities >= 0).all(axis=1) & (probabilities <= 1 + SUM_TOLERANCE).all(axis=1)
    fits &= np.abs(total - 1) <= SUM_TOLERANCE
    if not fits.all():
        row = int(np.argmin(fits))
        values = ", ".join(f"{value:.4g}" for value in probabilities[row])
        raise CohortError(
            f"{names[row] if names else f'Row {row}'}: {values} are not the probabilities of "
            f"{probabilities.shape[1]} classes. They must lie between 0 and 1 and sum to 1."
        )


def _checked(
    labels: Labels, probabilities: Probabilities
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return labels and probabilities in full precision, or say what is wrong with them."""
    check_probabilities(probabilities)
    if labels.shape != probabilities.shape[:1]:
        raise ValueError(f"Give one label for each row. {labels.shape=}, {probabilities.shape=}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"Labels are class numbers. {labels.dtype=}")
    classes = probabilities.shape[1]
    if labels.min() < 0 or labels.max() >= classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise CohortError(
            f"Label {wrong} is out of range: with {classes} classes, labels are 0 to {classes - 1}."
        )
    return labels.astype(np.int64, copy=False), probabilities.astype(np.float64, copy=False)


def _applicable(names: Iterable[str] | None, probabilities: Probabilities) -> list[str]:
    """Return the metrics asked for, or else all that apply to so many classes."""
    if names is None:
        two = probabilities.shape[1] == 2
        return [name for name in METRICS if two or name not in TWO_CLASSES_ONLY]
    names = list(names)
    for name in names:
        if name not in METRICS:
            raise UnknownNameError("metric", name, METRICS)
    return names


def _area(hits: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Return how often a hit scores above a miss, by ranks; ties count half."""
    positives = int(np.count_nonzero(hits))
    negatives = len(hits) - positives
    if not positives or not negatives:
        return float("nan")
    above = rankdata(scores)[hits].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def _adaptive_error(hits: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Return ACE for one class. Bins hold equally many; a score equal to an edge goes up."""
    hits, scores = hits[scores > 0], scores[scores > 0]
    if not len(scores):
        return 0.0
    places = np.rint(np.arange(1, BINS) * len(scores) / BINS).astype(int)  # half to even
    edges = np.sort(scores)[np.minimum(places, len(scores) - 1)]
    return _binned_error(hits, scores, edges)


def _equal_width_error(hits: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Return ECE. A score on an inner edge goes up, 1 into the last bin."""
    return _binned_error(hits, scores, np.arange(1, BINS) / BINS)


def _binned_error(
    hits: NDArray[np.bool_], scores: NDArray[np.float64], edges: NDArray[np.float64]
) -> float:
    bins = np.searchsorted(edges, scores, side="right")
    gaps = np.bincount(bins, weights=hits - scores, minlength=BINS)
    return float(np.abs(gaps).sum() / len(scores))


def _confusion(labels: Labels, probabilities: Probabilities) -> NDArray[np.int64]:
    """Return how often each class (row) was predicted as each (column)."""
    labels, probabilities = _checked(labels, probabilities)
    classes = probabilities.shape[1]
    cells = labels * classes + probabilities.argmax(axis=1)
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def _interval(values: NDArray[np.float64], ends: list[float]) -> Interval:
    values = values[~np.isnan(values)]
    if not len(values):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(values, ends)
    return Interval(float(low), float(high))
