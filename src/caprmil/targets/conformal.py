"""Sets and intervals that hold the label with a stated probability: split conformal prediction.

V. Vovk et al., "Algorithmic Learning in a Random World", 2005; A. Angelopoulos and S. Bates, "A
Gentle Introduction to Conformal Prediction", 2023. A target says how badly a label fits an answer
(its nonconformity); a set has all labels whose nonconformity is at most a threshold.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.recalibration import both

if TYPE_CHECKING:
    from caprmil.targets.target import Answers, Labels

Scores: TypeAlias = NDArray[np.float64]
Sets: TypeAlias = NDArray[Any]
"""(n, C), whether each class is in the set; or (n, 2), the ends of an interval."""

YES, NO = "yes", "no"


class Conformal(ABC):
    """The sets of a target."""

    size_name: ClassVar[str]
    """What `size` measures, in words."""

    @abstractmethod
    def nonconformity(self, labels: "Labels", answers: "Answers") -> Scores:
        """Return how badly each label fits its answer: higher is worse."""

    @abstractmethod
    def sets(self, answers: "Answers", threshold: float) -> Sets:
        """Return for each answer the set of the labels whose nonconformity is at most this."""

    @abstractmethod
    def majority(self, votes: Sequence[Sets]) -> Sets:
        """Return the labels that are in the sets of more than half of several models."""

    @abstractmethod
    def holds(self, sets: Sets, labels: "Labels") -> NDArray[np.bool_]:
        """Return whether each set holds its label."""

    @abstractmethod
    def size(self, sets: Sets) -> Scores:
        """Return how large each set is."""

    def abstains(self, sets: Sets) -> NDArray[np.bool_] | None:
        """Return where a set does not say enough; None if that is not known.

        A set of classes does if it has exactly one.
        """
        return None

    @abstractmethod
    def columns(self, sets: Sets) -> dict[str, tuple[str, ...]]:
        """Return the columns of a table that show the sets."""


@dataclass(frozen=True)
class ClassSets(Conformal):
    """Sets of classes: those whose probability is high enough. A set may be empty."""

    classes: tuple[str, ...]
    size_name: ClassVar[str] = "classes in a set"

    def _each(self, answers: "Answers") -> Scores:
        """Return the nonconformity of every class (n, C): what its probability lacks to 1."""
        return 1 - np.asarray(answers, dtype=np.float64)

    def nonconformity(self, labels: "Labels", answers: "Answers") -> Scores:
        return np.asarray(self._each(answers)[np.arange(len(labels)), labels])

    def sets(self, answers: "Answers", threshold: float) -> Sets:
        return np.asarray(self._each(answers) <= threshold)

    def majority(self, votes: Sequence[Sets]) -> Sets:
        return np.asarray(np.sum(votes, axis=0) > len(votes) / 2)

    def holds(self, sets: Sets, labels: "Labels") -> NDArray[np.bool_]:
        return np.asarray(sets[np.arange(len(labels)), labels])

    def size(self, sets: Sets) -> Scores:
        return np.asarray(sets.sum(axis=1), dtype=np.float64)

    def abstains(self, sets: Sets) -> NDArray[np.bool_]:
        return np.asarray(sets.sum(axis=1) != 1)

    def columns(self, sets: Sets) -> dict[str, tuple[str, ...]]:
        """Return the classes of each set, and whether the models abstain."""
        named = [" | ".join(np.array(self.classes)[row]) for row in sets]
        return {
            "set": tuple(named),
            "abstain": tuple(YES if each else NO for each in self.abstains(sets)),
        }


@dataclass(frozen=True)
class LabelSets(ClassSets):
    """Sets for one label that is negative or positive, from the probability (n, 1) of positive."""

    classes: tuple[str, ...] = ("0", "1")
    size_name: ClassVar[str] = "answers in a set"

    def _each(self, answers: "Answers") -> Scores:
        return super()._each(both(answers))


@dataclass(frozen=True)
class GradeSets(ClassSets):
    """Sets of neighbouring grades around the likeliest: all grades in between are likely enough."""

    size_name: ClassVar[str] = "grades in a set"

    def _each(self, answers: "Answers") -> Scores:
        """Return what the least likely grade lacks to 1, from the likeliest grade to each."""
        lacks = super()._each(answers)
        best = lacks.argmin(axis=1)
        found = np.empty_like(lacks)
        for row, start in enumerate(best.tolist()):
            found[row, start:] = np.maximum.accumulate(lacks[row, start:])
            found[row, : start + 1] = np.maximum.accumulate(lacks[row, start::-1])[::-1]
        return found


@dataclass(frozen=True)
class IntervalSets(Conformal):
    """Intervals around a number, or around the interval that a model predicts.

    The models abstain where an interval is wider than `widest`, infinite or empty.

    The latter is conformalized quantile regression (Romano, Patterson and Candès, 2019): a
    predicted interval becomes wider, or narrower, by the same on both sides.
    """

    size_name: ClassVar[str] = "width of an interval"
    widest: float | None = None

    def nonconformity(self, labels: "Labels", answers: "Answers") -> Scores:
        low, high = self._ends(answers)
        return np.asarray(np.maximum(low - labels, labels - high), dtype=np.float64)

    def sets(self, answers: "Answers", threshold: float) -> Sets:
        low, high = self._ends(answers)
        ends = np.stack([low - threshold, high + threshold], axis=1)
        crossed = ends[:, 0] > ends[:, 1]  # narrowed by more than the width: an empty interval
        ends[crossed] = np.nan
        return ends

    def majority(self, votes: Sequence[Sets]) -> Sets:
        """Return the smallest interval with all numbers that more than half of the votes have.

        Where there is none, it holds all votes: a larger interval only covers more.
        """
        ends = np.stack(votes)  # K n 2
        found = np.empty(ends.shape[1:])
        for row in range(ends.shape[1]):
            (low, high), points = ends[:, row].T[..., None], ends[:, row].ravel()
            points = points[~np.isnan(points)]  # of intervals that are not empty
            enough = points[((low <= points) & (points <= high)).sum(axis=0) > len(votes) / 2]
            chosen = enough if len(enough) else points
            found[row] = (chosen.min(), chosen.max()) if len(chosen) else (np.nan, np.nan)
        return found

    def holds(self, sets: Sets, labels: "Labels") -> NDArray[np.bool_]:
        return np.asarray((sets[:, 0] <= labels) & (labels <= sets[:, 1]))

    def size(self, sets: Sets) -> Scores:
        return np.asarray(np.nan_to_num(sets[:, 1] - sets[:, 0], nan=0.0, posinf=np.inf))

    def abstains(self, sets: Sets) -> NDArray[np.bool_]:
        widths = sets[:, 1] - sets[:, 0]
        too_wide = widths > (np.inf if self.widest is None else self.widest)
        return np.asarray(too_wide | ~np.isfinite(widths))

    def columns(self, sets: Sets) -> dict[str, tuple[str, ...]]:
        names = ("interval_low", "interval_high")
        ends = {
            name: tuple("" if np.isnan(end) else repr(float(end)) for end in column)
            for name, column in zip(names, sets.T, strict=True)
        }
        return ends | {"abstain": tuple(YES if each else NO for each in self.abstains(sets))}

    @staticmethod
    def _ends(answers: "Answers") -> tuple[Scores, Scores]:
        """Return the ends that a model predicts; without an interval, both are the number."""
        ends = np.asarray(answers, dtype=np.float64)
        return ends[:, -2 if ends.shape[1] > 1 else 0], ends[:, -1]
