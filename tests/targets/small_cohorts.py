"""A small cohort for any target: in each slide, a share of the patches carries the signal."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from caprmil.features import bags

SHARES = (0.0, 0.1, 0.3, 0.4, 0.6, 0.7, 0.9, 1.0)

CELLS: dict[str, Callable[[float], str]] = {
    "classification": lambda share: "many" if share > 0.5 else "few",
    "ordinal": lambda share: str(min(int(3 * share), 2)),
    "regression": lambda share: f"{10 + 40 * share:g}",
    "survival": lambda share: f"{40 - 30 * share:g},{int(0.05 < share < 0.85 or share == 1)}",
}
"""For each kind of target: the label of a slide, given its share of patches with the signal."""

COLUMNS = {"survival": "months,event"}
"""The columns of a label, where it is not in one column."""


def write_cohort(
    folder: Path,
    cell: Callable[[float], str],
    *,
    columns: str = "label",
    slides: int = 16,
    patches: int = 20,
    width: int = 8,
    seed: int = 0,
) -> Path:
    """Write bags and a table of labels, and return the path of the table."""
    rng = np.random.default_rng(seed)
    rows = [f"slide,patient,{columns}"]
    side = int(np.ceil(np.sqrt(patches)))
    coords = 224 * np.stack([np.arange(patches) % side, np.arange(patches) // side], axis=1)
    for number in range(slides):
        share = SHARES[number % len(SHARES)]
        features = rng.normal(size=(patches, width)).astype(np.float32)
        features[: round(share * patches), 0] += 4
        bags.write(
            folder / "features" / f"slide_{number:03d}.h5",
            features,
            coords,
            encoder="synthetic",
            mpp=1.0,
            patch_px=224,
            patch_level0=224.0,
            step=224.0,
        )
        rows.append(f"slide_{number:03d},patient_{number:03d},{cell(share)}")
    table = folder / "labels.csv"
    table.write_text("\n".join(rows) + "\n")
    return table
