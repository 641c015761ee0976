"""Synthetic slides with a grade, which is the range of their share of tumour."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from caprmil.synthetic.sections import SlideCohort


@dataclass(frozen=True, kw_only=True)
class GradedSlides(SlideCohort):
    """Slides of one patient each, with grades from 0. Grade 0 has no tumour.

    The shares of tumour of the other grades are ranges of equal width up to `tumour`, the largest
    share. A share is uniform within the range of its grade, so neighbouring grades touch.
    """

    slides: int = 90
    width: int = 2240
    height: int = 1792
    tumour: float = 0.4
    grades: int = 6

    label_column: ClassVar[str] = "grade"

    def __post_init__(self) -> None:
        if self.grades < 2:
            raise ValueError(f"There are two grades at least: {self.grades=}.")

    def grade_of(self, number: int) -> int:
        """Return the grade of a slide: all are equally frequent."""
        return number % self.grades

    def share_of(self, number: int) -> float:
        grade = self.grade_of(number)
        if grade == 0:
            return 0.0
        within = np.random.default_rng([self.seed, number, 1]).random()
        return float(self.tumour * (grade - 1 + within) / (self.grades - 1))

    def label_of(self, number: int) -> str:
        return str(self.grade_of(number))
