"""A small cohort for any target: in each slide, a share of the patches carries the signal."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from caprmil.features import bags
from caprmil.targets import Task

SHARES = (0.0, 0.1, 0.3, 0.4, 0.6, 0.7, 0.9, 1.0)

Cells: TypeAlias = Callable[[float], str | Mapping[str, str]]
"""The cell of the label of a slide, or those of its columns."""

CELLS: dict[str, Cells] = {
    "classification": lambda share: "many" if share > 0.5 else "few",
    "ordinal": lambda share: str(min(int(3 * share), 2)),
    "regression": lambda share: f"{10 + 40 * share:g}",
    "survival": lambda share: {
        "months": f"{40 - 30 * share:g}",
        "event": str(int(0.05 < share < 0.85 or share == 1)),
    },
    "multilabel": lambda share: {
        "many": str(int(share > 0.5)),
        "most": "" if share == 0.3 else ("mut" if share > 0.65 else "wt"),
    },
    "several": lambda share: {
        "grade": "" if share == 0.3 else ("high" if share > 0.5 else "low"),
        "size in mm": "" if share == 0.6 else f"{10 + 40 * share:g}",
        "EGFR": "mut" if share > 0.65 else "wt",
        "KRAS": "NA" if share == 0.1 else str(int(share > 0.35)),
    },
}
"""For each kind of target: the label of a slide, given its share of patches with the signal."""

SETTINGS: dict[str, dict[str, Any]] = {
    "multilabel": {"labels": ("many", "most")},
    "several": {
        "tasks": {
            "grade": Task(),
            "size": Task(kind="regression", label="size in mm", weight=0.5),
            "genes": Task(kind="multilabel", settings={"labels": ["EGFR", "KRAS"]}),
        },
        "weighting": "uncertainty",
    },
}
"""The settings that a target needs to find these labels."""


def write_cohort(
    folder: Path,
    cell: Cells,
    *,
    slides: int = 16,
    patches: int = 20,
    width: int = 8,
    seed: int = 0,
    prefix: str = "",
    per_patient: int = 1,
    everything: bool = False,
) -> Path:
    """Write bags and a table of labels, and return the path of the table.

    All slides of a patient have the same share. With `everything` there is a column `age`, which
    says nothing, and a second source of features on the same grid, in the folder `more`.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, str]] = []
    side = int(np.ceil(np.sqrt(patches)))
    coords = 224 * np.stack([np.arange(patches) % side, np.arange(patches) // side], axis=1)
    for number in range(slides):
        patient = number // per_patient
        share = SHARES[patient % len(SHARES)]
        features = rng.normal(size=(patches, width)).astype(np.float32)
        features[: round(share * patches), 0] += 4
        file = f"{prefix}slide_{number:03d}.h5"
        _write(folder / "features" / file, features, coords)
        label = cell(share)
        cells = {"label": label} if isinstance(label, str) else label
        names = {
            "slide": f"{prefix}slide_{number:03d}",
            "patient": f"{prefix}patient_{patient:03d}",
        }
        if everything:
            noise = np.random.default_rng([seed, number]).normal(size=(patches, 3))
            _write(folder / "more" / file, noise.astype(np.float32), coords)
            names["age"] = str(40 + patient % 5)
        rows.append({**names, **cells})
    table = folder / "labels.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return table


def _write(path: Path, features: Any, coords: Any) -> None:
    facts = {"mpp": 1.0, "patch_px": 224, "patch_level0": 224.0, "step": 224.0}
    bags.write(path, features, coords, encoder="synthetic", **facts)
