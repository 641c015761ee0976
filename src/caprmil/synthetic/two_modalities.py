"""Synthetic slides whose label depends on the patches and on a covariate, by known amounts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caprmil.synthetic.cohort_folder import square_grid, write_cohort


@dataclass(frozen=True, kw_only=True)
class TwoModalities:
    """A label with two causes of equal size: a shift of all patches, and the covariate `marker`.

    The table has three more columns: `age`, a number that says nothing and is sometimes empty;
    `ward`, a category that says nothing; and `stage`, a category that is the marker in three parts.
    """

    slides: int = 80
    width: int = 16
    patches: tuple[int, int] = (20, 40)  # minimum, and maximum (exclusive)
    noise: float = 0.3  # of the label, relative to each cause
    of_image: float = 1.0  # size of the cause in the patches
    of_marker: float = 1.0
    seed: int = 0

    def causes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Return the cause in the patches and the marker of each slide, and its label."""
        rng = np.random.default_rng([self.seed, 0])
        image, marker, noise = rng.normal(size=(3, self.slides))
        total = self.of_image * image + self.of_marker * marker + self.noise * noise
        return image, marker, total > np.median(total)

    def bag(self, number: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return features and coordinates of a slide."""
        rng = np.random.default_rng([self.seed, 1, number])
        n = int(rng.integers(*self.patches))
        features = rng.normal(size=(n, self.width))
        features[:, 0] += self.causes()[0][number]
        return features.astype(np.float32), square_grid(n)

    def rows(self) -> list[list[str]]:
        """Return the table, with its header."""
        rng = np.random.default_rng([self.seed, 2])
        _, marker, labels = self.causes()
        ages, wards = rng.normal(60, 10, size=self.slides), rng.integers(0, 3, size=self.slides)
        stages = np.digitize(marker, [-0.5, 0.5])
        table = [["slide", "patient", "label", "marker", "age", "ward", "stage"]]
        for number in range(self.slides):
            age = "" if number % 10 == 3 else f"{ages[number]:.0f}"
            cells = [f"{marker[number]:.4f}", age, "ABC"[wards[number]], "I" * (stages[number] + 1)]
            label = "high" if labels[number] else "low"
            table.append([f"slide_{number:03d}", f"patient_{number:03d}", label, *cells])
        return table

    def write(self, folder: str | Path) -> Path:
        """Write bags and table into a folder, and return the table's path."""
        return write_cohort(folder, self, self.rows(), self.bag)
