"""Synthetic bags whose grade is the share of planted patches, with the best possible answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from caprmil.synthetic.cohort_folder import square_grid, write_cohort


class GradedBag(NamedTuple):
    """A bag with its ground truth."""

    features: NDArray[np.float32]  # N E
    planted: NDArray[np.bool_]  # N
    share: float  # that planted patches are drawn with
    grade: int


@dataclass(frozen=True, kw_only=True)
class GradedBags:
    """Slides with a share of planted patches, uniform from 0 to 1, and the grade that is its range.

    Each patch is planted with the probability of the share, so the grade is not known for certain
    from the patches of a slide: `oracle` is the best that can be said.
    """

    slides: int = 120
    patches: int = 40
    width: int = 16
    grades: int = 4
    strength: float = 4.0  # shift of a planted patch, in standard deviations of the noise
    per_patient: int = 1  # slides of a patient, which have the same share
    sites: int = 3
    seed: int = 0

    def bag(self, number: int) -> GradedBag:
        """Return a slide by its number."""
        owner = number // self.per_patient
        share = float(np.random.default_rng([self.seed, 1, owner]).random())
        rng = np.random.default_rng([self.seed, 2, number])
        planted = rng.random(self.patches) < share
        features = rng.standard_normal((self.patches, self.width), dtype=np.float32)
        features[planted, 0] += self.strength
        return GradedBag(features, planted, share, int(share * self.grades))

    def oracle(self, planted: int) -> NDArray[np.float64]:
        """Return the probability of each grade, given how many patches of a slide are planted."""
        edges = np.linspace(0, 1, self.grades + 1)
        found: NDArray[np.float64] = np.diff(
            beta.cdf(edges, planted + 1, self.patches - planted + 1)
        )
        return found

    def expected_share(self, planted: int) -> float:
        """Return the mean of the share, given how many patches of a slide are planted."""
        return (planted + 1) / (self.patches + 2)

    def write(self, folder: str | Path, *, progress: Any = None) -> Path:
        """Write the bags and the table of the cohort into a folder, and return the table's path.

        The columns are slide, patient, site, grade and share. Existing bags of the same cohort are
        kept.
        """
        table: list[list[object]] = [["slide", "patient", "site", "grade", "share"]]
        for number in range(self.slides):
            owner, bag = number // self.per_patient, self.bag(number)
            patient, site = f"patient_{owner:03d}", f"site_{owner % self.sites}"
            table.append([f"slide_{number:03d}", patient, site, bag.grade, f"{bag.share:.4f}"])
        coords = square_grid(self.patches)
        return write_cohort(
            *(folder, self, table),
            lambda number: (self.bag(number).features, coords),
            progress=progress,
        )
