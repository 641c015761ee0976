"""Recipes of the models that are trained beside another one, on its folds, to compare with it."""

from dataclasses import replace
from typing import NamedTuple

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.one_source import only_source
from caprmil.io.tables import Row
from caprmil.runs.modalities import modalities_of
from caprmil.runs.remote import COLUMNS_ONLY, IMAGE_ONLY, MEAN, SOURCE_ONLY, VECTORS_ONLY
from caprmil.training.recipe import ModelConfig, Recipe


class Beside(NamedTuple):
    """A recipe of a further model, and what it reads of the cohort."""

    recipe: Recipe
    cohort: Cohort


def models_beside(
    recipe: Recipe, cohort: Cohort, *, mean: bool, modalities: bool
) -> dict[str, Beside]:
    """Return further models by the folder in the run: a Mean, and one of each modality alone."""
    plain = replace(recipe.train, top_k=0, probes=0)
    found: dict[str, Beside] = {}
    if mean and recipe.model.name != "mean":
        model = ModelConfig(name="mean")
        found[MEAN] = Beside(replace(recipe, model=model, train=plain, loggers={}), cohort)
    if not modalities:
        return found
    names = [source.name for source in cohort.sources]
    data = recipe.data
    alone = modalities_of(names, columns=bool(data.covariates), vectors=bool(data.vectors))
    image = replace(
        recipe,
        data=replace(data, covariates=None, categorical=None, vectors=None),
        fusion=None,
        loggers={},
    )
    for folder in alone:
        if folder.startswith(SOURCE_ONLY):
            number = names.index(folder.removeprefix(SOURCE_ONLY))
            found[folder] = Beside(_of_source(image, number), only_source(cohort, number))
        elif folder == IMAGE_ONLY:
            found[folder] = Beside(image, replace(cohort, covariates=None))
        else:
            found[folder] = _without_image(recipe, cohort, folder)
    return found


def _of_source(image: Recipe, number: int) -> Recipe:
    """Return a recipe for one of several sources. Saved weights are of another width."""
    assert isinstance(image.features, tuple)
    model = replace(image.model, start=None)
    return replace(image, features=image.features[number], sources=None, model=model)


def _without_image(recipe: Recipe, cohort: Cohort, folder: str) -> Beside:
    """Return a model of covariates alone: all of them, or only the columns or the vectors."""
    data, covariates = recipe.data, cohort.covariates
    assert covariates is not None
    if folder == COLUMNS_ONLY:
        data, covariates = replace(data, vectors=None), replace(covariates, vectors=None)
    elif folder == VECTORS_ONLY:
        data = replace(data, covariates=None, categorical=None)
        empty: dict[str, Row] = {slide: {} for slide in covariates.cells}
        covariates = replace(covariates, names=(), categorical=frozenset(), cells=empty)
    # Without patches there is nothing to scale, and one loss only.
    fusion = recipe.fusion and replace(recipe.fusion, how="concatenation")
    own = replace(
        recipe,
        data=data,
        model=ModelConfig(name="none"),
        fusion=fusion,
        train=replace(recipe.train, top_k=0, probes=0, drop_patches=0.0),
        loggers={},
    )
    return Beside(own, replace(cohort, covariates=covariates))
