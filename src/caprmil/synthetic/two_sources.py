"""Synthetic slides with two sources of features, of which one has the signal."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caprmil.synthetic.cohort_folder import square_grid, write_bag, write_cohort

Patches = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class TwoSources:
    """Slides at a fine and at a coarse scale. The label is a shift of some fine patches.

    The coarse patches are twice as wide, so that there are fewer, and say nothing. With `one_grid`
    they are at the same places as the fine ones, in another order.
    """

    slides: int = 60
    widths: tuple[int, int] = (16, 24)  # of fine and coarse features
    patches: int = 36
    share: float = 0.3  # of the fine patches of a positive slide, which are shifted
    shift: float = 3.0
    one_grid: bool = False
    seed: int = 0

    def fine(self, number: int) -> Patches:
        """Return features and coordinates of a slide at the fine scale."""
        rng = np.random.default_rng([self.seed, 0, number])
        features = rng.normal(size=(self.patches, self.widths[0]))
        if number % 2:
            features[: max(1, round(self.share * self.patches)), 0] += self.shift
        return features.astype(np.float32), square_grid(self.patches)

    def coarse(self, number: int) -> Patches:
        """Return features and coordinates of a slide at the coarse scale."""
        rng = np.random.default_rng([self.seed, 1, number])
        if self.one_grid:
            coords = square_grid(self.patches)[rng.permutation(self.patches)]
        else:
            coords = 2 * square_grid(max(1, self.patches // 4))
        features = rng.normal(size=(len(coords), self.widths[1]))
        return features.astype(np.float32), coords

    def write(self, folder: str | Path) -> Path:
        """Write table, `fine` and `coarse` into a folder, and return the table's path."""
        rows = [["slide", "patient", "label"]]
        for number in range(self.slides):
            label = "positive" if number % 2 else "negative"
            patient = f"patient_{number // 4 * 2 + number % 2:03d}"  # two slides of one label
            rows.append([f"slide_{number:03d}", patient, label])
        table = write_cohort(folder, self, rows, self.fine, features="fine")
        for number, (slide, *_) in enumerate(rows[1:]):
            path = Path(folder) / "coarse" / f"{slide}.h5"
            if not path.exists():
                write_bag(path, *self.coarse(number), mpp=1.0 if self.one_grid else 2.0)
        return table
