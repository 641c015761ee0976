"""Shape checks on: under pytest, every annotated tensor of the models is checked at run time."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the cores

from jaxtyping import install_import_hook

install_import_hook("caprmil.models", "beartype.beartype")

if TYPE_CHECKING:  # Lightning takes its time, and most tests have no need of it
    from caprmil.runs.run import Run
    from caprmil.training.recipe import Recipe
    from caprmil.viewer import Library


@pytest.fixture(scope="session")
def tiny_cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 24 slides whose signal is plain to see, beside their bags in `features`."""
    from caprmil.synthetic import RareSignal

    study = RareSignal(slides=24, width=64, patches=(40, 80), signal=0.3, stain=0.5)
    return study.write(tmp_path_factory.mktemp("tiny_cohort"))


@pytest.fixture(scope="session")
def tiny_recipe(tiny_cohort: Path) -> "Recipe":
    """Three folds of a tiny model, trained in a second or two."""
    from caprmil.cohort.folds import SplitConfig
    from caprmil.training.module import TrainConfig
    from caprmil.training.recipe import ModelConfig, Recipe

    return Recipe(
        cohort=str(tiny_cohort),
        features=str(tiny_cohort.parent / "features"),
        model=ModelConfig(settings={"dim": 16, "heads": 2}),
        splits=SplitConfig(folds=3, validation=0.25),
        train=TrainConfig(epochs=3, warmup_epochs=1, lr=3e-3),
    )


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe: "Recipe", tmp_path_factory: pytest.TempPathFactory) -> "Run":
    """A finished run of that recipe. It is shared: copy its folder before changing anything."""
    from caprmil.training.cross_validation import cross_validate

    folder = tmp_path_factory.mktemp("tiny_run") / "run"
    return cross_validate(tiny_recipe, folder, device="cpu", progress=False)


@pytest.fixture(scope="session")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two slides of the tiny run, as pixels; the others have none."""
    from caprmil.synthetic import Section

    folder = tmp_path_factory.mktemp("pixels")
    for number in range(2):
        Section(seed=number, width=2016, height=2016).write(folder / f"slide_00{number}.tiff")
    return folder


@pytest.fixture(scope="session")
def library(tiny_run: "Run", pixels: Path) -> "Library":
    """What the viewer shows of the tiny run."""
    from caprmil.viewer import Library

    return Library(tiny_run, pixels=pixels, device="cpu")
