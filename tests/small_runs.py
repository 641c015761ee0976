"""Finished runs of every kind that a page can show, small and quickly trained."""

from pathlib import Path
from typing import Any, Literal

from caprmil.cohort.cohort import CohortConfig
from caprmil.cohort.folds import SplitConfig
from caprmil.runs.run import Run
from caprmil.synthetic import TwoModalities, TwoSources
from caprmil.targets import find_target
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import FusionConfig, ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from patient_cohort import patient_recipe, with_epochs, write_patients
from targets.small_cohorts import CELLS, SETTINGS, write_cohort

KINDS = (*CELLS, "patient", "covariates", "sources")


def small_run(kind: str, folder: Path) -> Run:
    """Return a finished run of two or three folds: of a target, or as named in `KINDS`."""
    return cross_validate(small_recipe(kind, folder), folder / "run", device="cpu", progress=False)


def small_recipe(kind: str, folder: Path) -> Recipe:
    """Write a cohort of a kind, and return the recipe of its run."""
    if kind == "patient":
        return with_epochs(patient_recipe(write_patients(folder, 12)), 2)
    if kind == "covariates":
        table = TwoModalities(slides=24, patches=(20, 30)).write(folder)
        data = CohortConfig(label="label", covariates=("marker", "age", "ward"))
        return _small(table, data=data, fusion=FusionConfig(dim=8, how="film"))
    if kind == "sources":
        table = TwoSources(slides=24).write(folder)
        return _small(table, features=(str(folder / "fine"), str(folder / "coarse")))
    target = find_target(kind)(**SETTINGS.get(kind, {}))
    return _small(write_cohort(folder, CELLS[kind]), target=target)


def patient_run(kind: str, folder: Path, combine: Literal["bag", "mean"]) -> Run:
    """Return a run of a target that predicts patients, from two sources and a covariate."""
    table = write_cohort(folder, CELLS[kind], slides=32, per_patient=2, patches=4, everything=True)
    recipe = _small(
        table,
        features=(str(folder / "features"), str(folder / "more")),
        data=CohortConfig(unit="patient", combine=combine, covariates=("age",)),
        target=find_target(kind)(**SETTINGS.get(kind, {})),
        fusion=FusionConfig(dim=4),
        train=TrainConfig(epochs=1, warmup_epochs=0, lr=1e-2),
    )
    return cross_validate(recipe, folder / "run", device="cpu", progress=False)


def _small(table: Path, **settings: Any) -> Recipe:
    return Recipe(
        **{
            "cohort": str(table),
            "features": str(table.parent / "features"),
            "model": ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
            "splits": SplitConfig(folds=2, validation=0.25),
            "train": TrainConfig(epochs=2, warmup_epochs=0, lr=1e-2),
            "loggers": {},
            **settings,
        }
    )
