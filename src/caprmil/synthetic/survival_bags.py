"""Synthetic bags with survival times whose hazard depends on the share of planted patches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.synthetic.cohort_folder import square_grid, write_cohort


class SurvivalBag(NamedTuple):
    """A bag with its ground truth."""

    features: NDArray[np.float32]  # N E
    planted: NDArray[np.bool_]  # N
    share: float  # that planted patches are drawn with
    months: float  # until the event or the end of follow-up
    event: bool


@dataclass(frozen=True, kw_only=True)
class SurvivalBags:
    """Slides with a share of planted patches, uniform from 0 to 1, and a hazard that rises with it.

    The log hazard of a patient is `effect` times the share. Times are exponential, and censored by
    a follow-up that ends at random. Each patch is planted with the probability of the share. So the
    best that can be predicted from a slide follows from its number of planted patches: `oracle`.
    """

    slides: int = 120
    patches: int = 40
    width: int = 16
    strength: float = 4.0  # shift of a planted patch, in standard deviations of the noise
    effect: float = 4.0  # log hazard ratio of a slide of planted patches only
    median: float = 24.0  # months until the event of a patient with half of the patches planted
    follow_up: float = 60.0  # months, at most
    per_patient: int = 1  # slides of a patient, which have the same share
    sites: int = 3
    seed: int = 0

    def bag(self, number: int) -> SurvivalBag:
        """Return a slide by its number."""
        patient = np.random.default_rng([self.seed, 1, number // self.per_patient])
        share = float(patient.random())
        scale = self.median / np.log(2) * np.exp(-self.effect * (share - 0.5))
        died, left = float(patient.exponential(scale)), float(patient.uniform(0, self.follow_up))
        rng = np.random.default_rng([self.seed, 2, number])
        planted = rng.random(self.patches) < share
        features = rng.standard_normal((self.patches, self.width), dtype=np.float32)
        features[planted, 0] += self.strength
        months = round(max(min(died, left), 0.01), 2)
        return SurvivalBag(features, planted, share, months, died <= left)

    def oracle(self, planted: int) -> float:
        """Return the expected log hazard, given how many patches of a slide are planted."""
        return self.effect * (planted + 1) / (self.patches + 2)

    def write(self, folder: str | Path, *, progress: Any = None) -> Path:
        """Write the bags and the table of the cohort into a folder, and return the table's path.

        The columns are slide, patient, site, months and event. Existing bags of the same cohort are
        kept.
        """
        table: list[list[object]] = [["slide", "patient", "site", "months", "event"]]
        for number in range(self.slides):
            owner, bag = number // self.per_patient, self.bag(number)
            patient, site = f"patient_{owner:03d}", f"site_{owner % self.sites}"
            table.append([f"slide_{number:03d}", patient, site, bag.months, int(bag.event)])
        coords = square_grid(self.patches)
        return write_cohort(
            *(folder, self, table),
            lambda number: (self.bag(number).features, coords),
            progress=progress,
        )
