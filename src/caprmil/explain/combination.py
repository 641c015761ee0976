"""The combination of the answers of a patient's slides: the weight of each slide, and its share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.evaluation.patient_answers import How
from caprmil.targets import Target


class SlideShareOfAnswer(NamedTuple):
    """One slide in the answer of its patient, for one contrast: e.g. a class."""

    answer: str
    """Its own answer in words."""
    weight: float
    adds: float | None
    """What it adds to the number that goes with the contrast, e.g. a probability."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Combination:
    """How the answers of a patient's slides became one. Row n of every array is slide n."""

    how: How
    target: Target
    slides: tuple[str, ...]
    answers: NDArray[np.float64]
    """(S, A), of each slide: the mean over the models."""
    weights: NDArray[np.float64]
    """(S, A), of each slide for each number of the answer: the mean over the models."""
    adds: NDArray[np.float64]
    """(S, A), what each slide adds to the answer of the patient. They add up to it."""

    @property
    def mixes(self) -> bool:
        """Whether several slides count. If not, the answer is that of one slide."""
        return bool(((self.weights > 0) & (self.weights < 1)).any())

    def in_words(self) -> str:
        """Return how the answers were combined, in a sentence."""
        return {
            "mean": "The answer of the patient is the mean of the answers of the slides.",
            "max": "The answer of the patient is that of the slide with the highest answer. The "
            "others do not count, so maps are empty there.",
            "learned": "The answer of the patient is the mean of the answers of the slides with "
            "weights that were learned from other patients.",
        }[self.how]

    def share(self, slide: str, contrast: int) -> SlideShareOfAnswer:
        """Return the answer of a slide, and its part in that of the patient."""
        row, target = self.slides.index(slide), self.target
        weights = per_part(target, self.weights, lambda each: len(each.contrasts))
        numbers = np.asarray(target.followed(self.adds[row]))
        return SlideShareOfAnswer(
            answer=target.show(self.answers[row]),
            weight=float(weights[row, contrast]),
            adds=float(numbers[contrast]) if contrast < len(numbers) else None,
        )


def per_part(
    target: Target, weights: NDArray[np.float64], numbers: Callable[[Target], int]
) -> NDArray[np.float64]:
    """Return weights (S, A) for other numbers of a target: its outputs, or its contrasts.

    A target has one weight per slide, and each of several targets or labels has its own.
    """
    if not target.parts:
        return np.repeat(weights[:, :1], numbers(target), axis=1)
    own = [per_part(p.target, weights[:, p.answers], numbers) for p in target.parts.values()]
    return np.concatenate(own, axis=1)
