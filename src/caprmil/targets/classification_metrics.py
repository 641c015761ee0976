"""Classification metrics: numbers from class labels and probabilities.

`labels` (n,) are class numbers and `probabilities` (n, C) sum to one over the classes; a prediction
is the likeliest class, the first of equals. A metric without a meaning on its input (the AUC of
one class) is NaN. To add a metric, write its function and register its record at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError
from caprmil.targets import weighted_metrics as weighted
from caprmil.targets.delong import auc_influence
from caprmil.targets.metric import (
    Metric,
    Values,
    Weights,
    draw_by_draw,
    mean_and_spread,
    register_metric,
)
from caprmil.targets.weighted_metrics import BINS

Labels: TypeAlias = NDArray[np.integer]
Probabilities: TypeAlias = NDArray[np.floating]

FEW = 20  # classes, up to which the AUC of each draw takes less time than all pairs of slides
SUM_TOLERANCE = 1e-3  # probabilities printed with three decimals still pass


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


def _auc_draws(labels: Labels, probabilities: Probabilities, weights: Weights) -> Values:
    """Return the AUC of each draw: of many classes, from the pairs of slides that draws share."""
    if probabilities.shape[1] > FEW:
        return weighted.auc(labels, probabilities, weights)
    return draw_by_draw(auc, labels, probabilities, weights)


def ace(labels: Labels, probabilities: Probabilities) -> float:
    """Return the adaptive calibration error (Nixon et al. 2019): mean over classes, 10 equal bins.

    Equal in number of slides, that is. Probabilities of exactly 0 are left out. It is biased
    upwards in small samples: see `ace_floor`.
    """
    labels, probabilities = _checked(labels, probabilities)
    errors = [_adaptive_error(labels == c, column) for c, column in enumerate(probabilities.T)]
    return float(np.mean(errors))


def ace_floor(probabilities: Probabilities, draws: int = 200, seed: int = 0) -> tuple[float, float]:
    """Return mean and spread of the ACE that a perfectly calibrated model would read."""
    check_probabilities(probabilities)
    slides, classes = probabilities.shape
    # The bins depend on the probabilities alone: they are the same in every draw.
    cells = np.stack([BINS * c + _adaptive_bins(p) for c, p in enumerate(probabilities.T)], axis=1)
    counted = probabilities > 0
    expected = np.bincount(cells[counted], probabilities[counted], BINS * classes)
    sizes = np.maximum(counted.sum(axis=0), 1)
    values = []
    for truth in _draw_truths(probabilities, draws, seed):
        own = (np.arange(slides), truth)
        found = np.bincount(cells[own][counted[own]], minlength=BINS * classes)
        errors = np.abs(found - expected).reshape(classes, BINS).sum(axis=1) / sizes
        values.append(float(errors.mean()))
    mean, std, _ = mean_and_spread(values)
    return mean, std


def _draw_truths(
    probabilities: Probabilities, draws: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Yield labels that are drawn from the probabilities themselves: all that is left is chance."""
    rng = np.random.default_rng(seed)
    ladder = np.cumsum(probabilities, axis=1, dtype=np.float64)
    ladder /= ladder[:, -1:]
    for _ in range(draws):
        yield (rng.random((len(ladder), 1)) >= ladder[:, :-1]).sum(axis=1)


def _floor(
    error: Callable[[Labels, Probabilities], float],
    probabilities: Probabilities,
    seed: int,
    draws: int = 200,
) -> tuple[float, float]:
    """Return mean and spread of an error of calibration, if these probabilities were right."""
    check_probabilities(probabilities)
    truths = _draw_truths(probabilities, draws, seed)
    mean, std, _ = mean_and_spread([error(truth, probabilities) for truth in truths])
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


def _area(hits: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Return how often a hit scores above a miss, by ranks; ties count half."""
    from scipy.stats import rankdata

    positives = int(np.count_nonzero(hits))
    negatives = len(hits) - positives
    if not positives or not negatives:
        return float("nan")
    above = rankdata(scores)[hits].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def _adaptive_error(hits: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Return ACE for one class. Bins hold equally many; a score equal to an edge goes up."""
    hits, scores = hits[scores > 0], scores[scores > 0]
    return _binned_error(hits, scores, _adaptive_edges(scores)) if len(scores) else 0.0


def _adaptive_edges(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the edges between bins of equally many scores."""
    places = np.rint(np.arange(1, BINS) * len(scores) / BINS).astype(int)  # half to even
    return np.sort(scores)[np.minimum(places, len(scores) - 1)].astype(np.float64)


def _adaptive_bins(scores: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the bin of each score; those of exactly 0 do not count for the edges."""
    above = scores[scores > 0]
    if not len(above):
        return np.zeros(len(scores), dtype=np.int64)
    return np.searchsorted(_adaptive_edges(above), scores, side="right")


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


for _metric in (
    Metric(
        name="auc",
        title="AUC",
        function=auc,
        chance=0.5,
        weighted=_auc_draws,
        influence=auc_influence,
    ),
    Metric(
        name="accuracy",
        title="Accuracy",
        function=accuracy,
        printed=False,
        weighted=weighted.accuracy,
    ),
    Metric(
        name="balanced_accuracy",
        title="Balanced accuracy",
        function=balanced_accuracy,
        weighted=weighted.balanced_accuracy,
    ),
    Metric(name="f1", title="F1", function=f1, printed=False, weighted=weighted.f1),
    Metric(
        name="kappa", title="Quadratic kappa", function=kappa, chance=0.0, weighted=weighted.kappa
    ),
    Metric(
        name="ace",
        title="ACE",
        function=ace,
        higher_is_better=False,
        biased=True,
        weighted=weighted.ace,
        floor=lambda probabilities, seed: ace_floor(probabilities, seed=seed),
    ),
    Metric(
        name="ece",
        title="ECE",
        function=ece,
        higher_is_better=False,
        biased=True,
        printed=False,
        weighted=weighted.ece,
        floor=partial(_floor, ece),
    ),
    Metric(
        name="ece_positive",
        title="ECE of class 1",
        function=ece_positive,
        higher_is_better=False,
        biased=True,
        applies=lambda target: len(target.columns) == 2,
        printed=False,
        weighted=weighted.ece_positive,
        floor=partial(_floor, ece_positive),
    ),
    Metric(
        name="brier",
        title="Brier score",
        function=brier,
        higher_is_better=False,
        weighted=weighted.brier,
    ),
):
    register_metric("classification", _metric)
