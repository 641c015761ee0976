"""Recipes of the models that are trained beside another one, on its folds, to compare with it."""

from dataclasses import replace

from caprmil.runs.remote import COVARIATES_ONLY, IMAGE_ONLY, MEAN
from caprmil.training.recipe import ModelConfig, Recipe


def recipes_beside(recipe: Recipe, *, mean: bool, modalities: bool) -> dict[str, Recipe]:
    """Return recipes by the folder in the run: of a Mean, and of each modality alone."""
    plain = replace(recipe.train, top_k=0, probes=0)
    found: dict[str, Recipe] = {}
    if mean and recipe.model.name != "mean":
        found[MEAN] = replace(recipe, model=ModelConfig(name="mean"), train=plain, loggers={})
    if modalities and recipe.data.reads_covariates:
        without = replace(recipe.data, covariates=None, categorical=None, vectors=None)
        found[IMAGE_ONLY] = replace(recipe, data=without, fusion=None, loggers={})
        # Without patches there is nothing to scale, and one loss only.
        fusion = recipe.fusion and replace(recipe.fusion, how="concatenation")
        found[COVARIATES_ONLY] = replace(
            recipe,
            model=ModelConfig(name="none"),
            fusion=fusion,
            train=replace(plain, drop_patches=0.0),
            loggers={},
        )
    return found
