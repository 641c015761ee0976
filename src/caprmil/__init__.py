"""Slide-level learning in computational pathology: context-aware patches for MIL.

The names below are loaded when they are first used, so that `import caprmil` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from caprmil.cohort.cohort import Cohort
    from caprmil.errors import CaprmilError
    from caprmil.estimators import (
        MILClassifier,
        MILMultilabelClassifier,
        MILRegressor,
        MILSeveral,
        MILSurvival,
    )
    from caprmil.evaluation.predictions import Predictions
    from caprmil.explain.explained_slide import ExplainedSlide
    from caprmil.explain.explanation import Explanation
    from caprmil.features.bags import Bag
    from caprmil.models import CAPRMIL, MILModel, Output, create, list_models
    from caprmil.runs.run import Run
    from caprmil.slides.slide import Slide
    from caprmil.training.cross_validation import cross_validate
    from caprmil.training.recipe import Recipe
    from caprmil.training.recipe_files import read_recipe

_HOMES = {
    "Bag": "features.bags",
    "CAPRMIL": "models",
    "CaprmilError": "errors",
    "Cohort": "cohort.cohort",
    "ExplainedSlide": "explain.explained_slide",
    "Explanation": "explain.explanation",
    "MILClassifier": "estimators",
    "MILModel": "models",
    "MILMultilabelClassifier": "estimators",
    "MILRegressor": "estimators",
    "MILSeveral": "estimators",
    "MILSurvival": "estimators",
    "Output": "models",
    "Predictions": "evaluation.predictions",
    "Recipe": "training.recipe",
    "Run": "runs.run",
    "Slide": "slides.slide",
    "create": "models",
    "cross_validate": "training.cross_validation",
    "list_models": "models",
    "read_recipe": "training.recipe_files",
}

__all__ = [
    "CAPRMIL",
    "Bag",
    "CaprmilError",
    "Cohort",
    "ExplainedSlide",
    "Explanation",
    "MILClassifier",
    "MILModel",
    "MILMultilabelClassifier",
    "MILRegressor",
    "MILSeveral",
    "MILSurvival",
    "Output",
    "Predictions",
    "Recipe",
    "Run",
    "Slide",
    "create",
    "cross_validate",
    "explain",
    "list_models",
    "read_recipe",
]


def __getattr__(name: str) -> Any:
    if name == "explain":  # a package that can be called
        return import_module("caprmil.explain")
    if name not in _HOMES:
        raise AttributeError(f"caprmil has no attribute '{name}'")
    return getattr(import_module(f"caprmil.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
