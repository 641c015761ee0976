"""Synthetic slides with several labels: each is a share of patches that carry its signal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caprmil.synthetic.cohort_folder import square_grid, write_cohort

PARTS = ("train",) * 3 + ("val",) + ("test",) * 2  # in turn
RAISED = 0.3  # share of the patches of a slide with a positive label


@dataclass(frozen=True, kw_only=True)
class PlantedShares:
    """Slides with a burden, a grade that follows from it, and independent yes-or-no labels.

    The burden is the share of patches that are shifted along a direction; the grade is high above a
    half. A positive label shifts 30 % of the patches along a direction of its own. Few slides for
    training have a grade, so that a model can learn it from the burden; some labels are missing.
    """

    slides: int = 180
    patches: int = 40
    width: int = 48
    strength: float = 1.5  # shift of a patch by the burden, in standard deviations of the noise
    label_strength: float = 4.0  # and by a positive label
    labels: Mapping[str, float] = field(
        default_factory=lambda: {"EGFR": 0.5, "KRAS": 0.3, "ALK": 0.12}
    )  # how many of the slides are positive
    graded: int = 20  # slides for training with a grade
    missing: float = 0.1  # share of the other labels that are missing
    permuted: bool = False  # the labels are those of other slides: nothing can be learnt
    seed: int = 0

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of the table, with the true labels of each slide."""
        rng = np.random.default_rng([self.seed, 1])
        burdens = rng.permutation((np.arange(self.slides) + 0.5) / self.slides)
        positive = {
            name: rng.permutation(self.slides) < round(share * self.slides)
            for name, share in self.labels.items()
        }
        return [
            {
                "slide": f"slide_{number:03d}",
                "patient": f"patient_{number:03d}",
                "split": PARTS[number % len(PARTS)],
                "burden": f"{100 * burdens[number]:.1f}",
                "grade": "high" if burdens[number] > 0.5 else "low",
                **{name: str(int(own[number])) for name, own in positive.items()},
            }
            for number in range(self.slides)
        ]

    def directions(self) -> NDArray[np.float64]:
        """Return the directions of the burden and of each label, which are orthogonal."""
        shared = np.random.default_rng([self.seed, 0])
        found: NDArray[np.float64] = np.linalg.qr(shared.normal(size=(self.width, self.width)))[0]
        return found

    def oracle(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return for each label the log-likelihood ratio of a positive one, of known directions.

        Patches are taken as independent: how many of them are shifted is known, not which.
        """
        along = features @ self.directions()[1 : 1 + len(self.labels)].T
        ratio = np.exp(self.label_strength * along - self.label_strength**2 / 2)
        found: NDArray[np.float64] = np.log1p(RAISED * (ratio - 1)).sum(axis=0)
        return found

    def bag(self, row: Mapping[str, str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return features and coordinates of a slide with these labels."""
        directions = self.directions()
        rng = np.random.default_rng([self.seed, 2, int(row["slide"].split("_")[1])])
        features = rng.normal(size=(self.patches, self.width))
        shares = [float(row["burden"]) / 100, *(RAISED * int(row[name]) for name in self.labels)]
        strengths = [self.strength, *[self.label_strength] * len(self.labels)]
        for direction, share, strength in zip(directions, shares, strengths, strict=False):
            shifted = rng.permutation(self.patches) < round(share * self.patches)
            features[shifted] += strength * direction
        return features.astype(np.float32), square_grid(self.patches)

    def table(self) -> list[dict[str, str]]:
        """Return the rows as they are written: with permuted and missing labels."""
        rows, rng = self.rows(), np.random.default_rng([self.seed, 3])
        names = ["burden", "grade", *self.labels]
        if self.permuted:
            order = rng.permutation(len(rows))
            cells = [{name: rows[other][name] for name in names} for other in order]
            rows = [row | own for row, own in zip(rows, cells, strict=True)]
        train = [row for row in rows if row["split"] == "train"]
        for number in rng.permutation(len(train))[self.graded :]:
            train[number]["grade"] = ""
        for name in self.labels:
            for row in rows:
                row[name] = "" if rng.random() < self.missing else row[name]
        return rows

    def write(self, folder: str | Path) -> Path:
        """Write bags and table into a folder, and return the table's path."""
        rows, table = self.rows(), self.table()
        cells = [list(table[0]), *(list(row.values()) for row in table)]
        return write_cohort(folder, self, cells, lambda number: self.bag(rows[number]))
