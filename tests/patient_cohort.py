"""A cohort of patients with several slides, of which one slide has the signal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.folds import SplitConfig
from caprmil.features import bags
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig

WIDTH, SIDE = 16, 224


def write_patients(
    folder: Path, patients: int = 24, *, seed: int = 0, prefix: str = "p", **metadata: Any
) -> Path:
    """Write a table of patients with one to four slides, next to their bags in `features`.

    Every second patient is positive, and one of the slides has patches with a shift.
    """
    rng = np.random.default_rng(seed)
    shift = np.random.default_rng(0).normal(size=WIDTH)
    shift *= 8 / np.linalg.norm(shift)
    lines = ["slide,patient,label,site"]
    for patient in range(patients):
        slides = int(rng.integers(2, 5)) if patient % 3 else 1 + patient % 2
        chosen = int(rng.integers(slides))
        for number in range(slides):
            name = f"{prefix}{patient:02d}_{number}"
            n = int(rng.integers(15, 30))
            features = rng.normal(size=(n, WIDTH))
            if patient % 2 and number == chosen:
                features[: n // 2] += shift
            coords = SIDE * np.stack([np.arange(n) % 5, np.arange(n) // 5], axis=1)
            write_bag(folder / "features" / f"{name}.h5", features, coords, **metadata)
            label = "tumour" if patient % 2 else "normal"
            lines.append(f"{name},{prefix}{patient:02d},{label},{'ABC'[patient % 3]}")
    table = folder / "labels.csv"
    table.write_text("\n".join(lines) + "\n")
    return table


def write_bag(path: Path, features: Any, coords: Any, **metadata: Any) -> Path:
    known = {"encoder": "generated", "mpp": 1.0, "scale_rule": "exact", "patch_px": SIDE}
    known |= {"patch_level0": float(SIDE), "step": float(SIDE), "slide_mpp": 1.0}
    return bags.write(path, features, coords, dtype="float32", **{**known, **metadata})


def patient_recipe(table: Path, **data: Any) -> Recipe:
    """Three folds of a tiny model, with patients as the unit."""
    return Recipe(
        cohort=str(table),
        features=str(table.parent / "features"),
        model=ModelConfig(settings={"dim": 16, "heads": 2}),
        data=CohortConfig(**{"unit": "patient", **data}),
        splits=SplitConfig(folds=3, validation=0.25),
        train=TrainConfig(epochs=8, warmup_epochs=1, lr=2e-3),
        loggers={},
    )


def with_epochs(recipe: Recipe, epochs: int) -> Recipe:
    return replace(recipe, train=replace(recipe.train, epochs=epochs, warmup_epochs=0))
