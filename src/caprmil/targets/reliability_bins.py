"""Bins of slides with similar answers, as figures of calibration show them."""

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.metric import Answers, Labels
from caprmil.targets.weighted_metrics import BINS

if TYPE_CHECKING:
    from caprmil.figures import Bin, Reliability

SLIDES_PER_BIN = 10
Z = NormalDist().inv_cdf(0.975)


def owners(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of each slide: of equally many slides, with equal scores in one bin."""
    number = int(np.clip(len(scores) // SLIDES_PER_BIN, 1, BINS))
    edges = np.rint(np.arange(1, number) * len(scores) / number).astype(int)
    return np.searchsorted(np.unique(np.sort(scores)[edges]), scores, side="right")


def reliability(labels: Labels, answers: Answers, ace: float = float("nan")) -> "Reliability":
    """Return bins of equally many slides: mean confidence, and the share that is right.

    Confidence is that in the second of two classes; of more, in the predicted one. Intervals are
    Wilson's at 95 %, as if every slide were a patient of its own.
    """
    from caprmil.figures import Reliability

    two = answers.shape[1] == 2
    scores = np.asarray(answers[:, 1] if two else answers.max(axis=1), dtype=np.float64)
    hits = labels == (1 if two else answers.argmax(axis=1))
    owner = owners(scores)
    bins = [_bin(scores[owner == b], hits[owner == b]) for b in np.unique(owner)]
    return Reliability(bins=tuple(bins), scores=scores, ace=ace)


def _bin(scores: NDArray[np.float64], hits: NDArray[np.bool_]) -> "Bin":
    from caprmil.figures import Bin

    n, share = len(hits), float(hits.mean())
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    reach = Z * np.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    return Bin(float(scores.mean()), share, float(middle - reach), float(middle + reach), n)


def value_bins(labels: Labels, answers: Answers) -> "list[Bin]":
    """Return bins of equally many slides by predicted number: mean prediction and mean label.

    Intervals of the mean label are normal at 95 %, as if every slide were a patient of its own.
    """
    from caprmil.figures import Bin

    values, found = np.asarray(answers[:, 0], dtype=np.float64), []
    owner = owners(values)
    for number in np.unique(owner):
        own = labels[owner == number]
        mean = float(own.mean())
        reach = Z * float(own.std(ddof=1)) / np.sqrt(len(own)) if len(own) > 1 else float("nan")
        forecast = float(values[owner == number].mean())
        found.append(Bin(forecast, mean, mean - reach, mean + reach, len(own)))
    return found
