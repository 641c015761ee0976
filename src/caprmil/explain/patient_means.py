"""Means over slides and over groups of slides, with bootstrap intervals over patients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.evaluation.paired_tests import draw_patients
from caprmil.targets.metric import Interval

BOOTSTRAPS, LEVEL = 2000, 0.95
UNKNOWN = Interval(float("nan"), float("nan"))


class Estimate(NamedTuple):
    """A mean over slides, and its interval: NaN for a single patient."""

    mean: float
    interval: Interval


class Estimates(NamedTuple):
    """A mean over all slides, and over those of each group, e.g. of each class."""

    overall: Estimate
    groups: tuple[Estimate, ...]


class PatientMeans:
    """Means of any numbers of the same slides. Patients are drawn with all their slides."""

    def __init__(
        self, patients: Sequence[str], groups: NDArray[np.int64], n_groups: int, *, seed: int = 0
    ) -> None:
        names, self.owners = np.unique(list(patients), return_inverse=True)
        self.times = draw_patients(len(names), BOOTSTRAPS, seed)[:, self.owners].astype(np.float64)
        everything = np.ones(len(self.owners), dtype=bool)
        self.parts = [everything, *(groups == number for number in range(n_groups))]

    def of(self, values: NDArray[np.floating]) -> list[Estimates]:
        """Return the means of each column of (slides, columns)."""
        overall, *groups = (self._estimate(values, part) for part in self.parts)
        return [
            Estimates(one, tuple(group[column] for group in groups))
            for column, one in enumerate(overall)
        ]

    def _estimate(self, values: NDArray[np.floating], part: NDArray[np.bool_]) -> list[Estimate]:
        if not part.any():
            return [Estimate(float("nan"), UNKNOWN)] * values.shape[1]
        own = values[part].astype(np.float64)
        means = own.mean(axis=0).tolist()
        if len(np.unique(self.owners[part])) < 2:
            return [Estimate(mean, UNKNOWN) for mean in means]
        times = self.times[:, part]
        times = times[times.sum(axis=1) > 0]  # a sample may hold no patient of the group
        drawn = times @ own / times.sum(axis=1, keepdims=True)
        ends = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0).T.tolist()
        return [Estimate(mean, Interval(*end)) for mean, end in zip(means, ends, strict=True)]
