"""Synthetic bags with a rare signal, in slides that differ in stain."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.synthetic.cohort_folder import write_cohort


@dataclass(frozen=True, kw_only=True)
class RareSignal:
    """Slides of which half have a few tumour patches, as in CAMELYON16.

    A patch is the centre of one of several tissues, plus a shift of its slide in a subspace (stain,
    scanner), plus noise. Tumour patches are shifted along one direction of that subspace, so the
    mean of a slide depends more on its stain than on them.
    """

    slides: int = 160
    width: int = 256
    patches: tuple[int, int] = (1000, 1500)  # minimum, and maximum (exclusive)
    signal: float = 0.05  # share of tumour patches in a positive slide
    strength: float = 10.0  # shift of a tumour patch, in standard deviations of the noise
    stain: float = 1.0  # standard deviation of slide shifts along each of 16 directions
    tissues: int = 6
    seed: int = 0

    def bag(self, number: int) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
        """Return features and coordinates of a slide, and a mask of tumour patches."""
        shared = np.random.default_rng([self.seed, 0])
        directions = np.linalg.qr(shared.normal(size=(self.width, min(16, self.width))))[0]
        tissues = 0.3 * shared.normal(size=(self.tissues, self.width))
        tumour_direction = directions @ _unit(shared.normal(size=(directions.shape[1],)))

        rng = np.random.default_rng([self.seed, 1, number])
        n = int(rng.integers(*self.patches))
        kinds = rng.choice(self.tissues, n, p=rng.dirichlet(np.full(self.tissues, 5.0)))
        shift = directions @ rng.normal(scale=self.stain, size=directions.shape[1])
        features = rng.normal(size=(n, self.width)) + tissues[kinds] + shift

        side = int(np.ceil(np.sqrt(n)))
        coords = 224 * np.stack([np.arange(n) % side, np.arange(n) // side], axis=1)
        tumour = np.zeros(n, dtype=bool)
        if number % 2:  # one nest of neighbouring patches
            nest = rng.integers(0, side, size=2)
            distance = np.abs(coords / 224 - nest).max(axis=1) + rng.random(n)
            tumour[np.argsort(distance)[: max(1, round(self.signal * n))]] = True
        features[tumour] += self.strength * tumour_direction
        return features.astype(np.float32), coords, tumour

    def write(self, folder: str | Path, *, progress: Any = None) -> Path:
        """Write the bags and the table of the cohort into a folder, and return the table's path.

        Existing bags of the same cohort are kept.
        """
        table: list[list[object]] = [["slide", "patient", "label"]]
        for number in range(self.slides):
            label = "tumour" if number % 2 else "normal"
            table.append([f"slide_{number:03d}", f"patient_{number:03d}", label])
        return write_cohort(
            *(folder, self, table), lambda number: self.bag(number)[:2], progress=progress
        )


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return vector / np.linalg.norm(vector)
