"""Recipes by name, from a file, or for a table of slides, and changes to them."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from caprmil import config
from caprmil.cohort.peer_tables import is_cohort_folder
from caprmil.cohort.sources import Folders, folders_of
from caprmil.errors import RecipeError, UnknownNameError
from caprmil.io.model_hub import CONFIG
from caprmil.io.paths import as_path, is_remote
from caprmil.training.recipe import Recipe
from caprmil.training.train_config import TrainConfig

_log = logging.getLogger("caprmil")


def recipe_folder() -> Path:
    """Return the folder of the recipes: in the package, or in the clone it was installed from."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def list_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.toml"))}


def model_recipes() -> dict[str, Path]:
    """Return the recipe of each model by the name of the model."""
    tables = {name: config.load_table(path) for name, path in list_recipes().items()}
    return {
        name: list_recipes()[name] for name, table in tables.items() if _model_of(table) == name
    }


def read_recipe(
    source: str | Path,
    *,
    features: Folders | None = None,
    changes: Sequence[str] = (),
    model: str | None = None,
) -> Recipe:
    """Return the recipe of a TOML file, one of the package by its name, or that for a table.

    A table of slides has the recipe of the model, which is by default the paper's. With a recipe,
    `model` replaces its table [model]. `features` is a folder of bags, or one for each of several
    sources. If the table of a recipe is not in the working directory, the paths of the recipe are
    those of the nearest folder that has it, from the recipe's own upwards.
    """
    if features is not None:
        names = [str(as_path(each)) for each in folders_of(features) if each is not None]
        value = json.dumps(names if len(names) > 1 else names[0], ensure_ascii=False)
        changes = [*changes, f"features={value}"]
    path, known = as_path(source), list_recipes()
    if path.suffix.lower() == ".toml":
        table, name = config.load_table(path), path.name
        if not any(change.partition("=")[0].strip() == "cohort" for change in changes):
            table = _locate(table, path)
    elif str(source) in known and not path.is_file():
        table, name = config.load_table(known[str(source)]), f"{source}.toml"
    else:
        _check_table(path, known)
        table, name = _recipe_of(model, known) | {"cohort": str(path)}, "recipe"
    if model is not None and _model_of(table) != model:
        table["model"] = {"name": model}
    return parse_recipe(table, name=name, changes=changes)


def _locate(table: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """Return a recipe with the paths of the folder that has its table, found from its own upwards.

    As long as the working directory has the table, paths stay as they are.
    """
    cohort = table.get("cohort")
    if not isinstance(cohort, str) or is_remote(cohort) or is_remote(recipe):
        return table
    own = recipe.absolute().parent
    if Path(cohort).exists() or Path(cohort).is_absolute():
        return table
    folder = next((each for each in (own, *own.parents) if (each / cohort).exists()), None)
    if folder is None:
        return table

    def place(path: Any) -> Any:
        if isinstance(path, list):
            return [place(each) for each in path]
        return path if not isinstance(path, str) or is_remote(path) else str(folder / path)

    _log.warning("note: paths of %s are those of %s.", recipe.name, folder)
    table |= {name: place(table[name]) for name in ("cohort", "features") if name in table}
    model = table.get("model")
    if isinstance(model, dict) and (start := _saved_model(model.get("start"), folder)):
        table["model"] = {**model, "start": start}
    return table


def _saved_model(start: Any, folder: Path) -> str | None:
    """Return the path of a model below a folder, if it is there; else it is that of the hub."""
    there = isinstance(start, str) and (folder / start / CONFIG).is_file()
    return str(folder / start) if there else None


def _recipe_of(model: str | None, known: Mapping[str, Path]) -> dict[str, Any]:
    """Return the recipe of a model without features; that of other models has only defaults."""
    table = config.load_table(known[model]) if model is not None and model in known else {}
    table.pop("features", None)
    return table if _model_of(table) == model else {}


def _model_of(table: Mapping[str, Any]) -> Any:
    model = table.get("model")
    return model.get("name") if isinstance(model, dict) else None


def parse_recipe(
    table: Mapping[str, Any], *, name: str = "recipe", changes: Sequence[str] = ()
) -> Recipe:
    """Return a table as a recipe, after changes such as `train.epochs=5`.

    Fewer epochs than the warm-up has shorten it to half of them, unless both were chosen together.
    """
    table = config.change(table, changes)
    _check_model_settings(table, name)
    if isinstance(train := table.get("train"), dict):
        table["train"] = _fit_warmup(train, changes)
    return config.parse(table, into=Recipe, name=name)


def _check_model_settings(table: Mapping[str, Any], name: str) -> None:
    """Refuse a setting of a model that is given as one of the recipe, and name it."""
    of_recipe = {each.name for each in fields(Recipe)}
    for key in table.keys() - of_recipe:
        recipes = (config.load_table(path) for path in list_recipes().values())
        if any(key in recipe.get("model", {}) for recipe in recipes):
            raise RecipeError(f"{name} has no setting called '{key}'. Did you mean 'model.{key}'?")


def _fit_warmup(train: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    keys = {change.partition("=")[0].strip() for change in changes}
    chosen = "warmup_epochs" in train and "train.epochs" not in keys
    epochs = train.get("epochs", TrainConfig.epochs)
    warmup = train.get("warmup_epochs", TrainConfig.warmup_epochs)
    if chosen or "train.warmup_epochs" in keys or not type(epochs) is type(warmup) is int:
        return train
    if not 1 <= epochs <= warmup:
        return train
    _log.warning(
        "note: the warm-up of %d epochs does not fit into %d: it has %d. Set train.warmup_epochs "
        "to choose.",
        *(warmup, epochs, epochs // 2),
    )
    return train | {"warmup_epochs": epochs // 2}


def _check_table(path: Path, known: Mapping[str, Path]) -> None:
    """Refuse what is neither a recipe nor a table. A table that is missing is an error later."""
    if is_remote(path) or path.suffix or path.is_file():
        return
    if is_cohort_folder(path):
        return
    if path.is_dir():
        raise RecipeError(
            f"{path} is a folder. Pass a table of slides and labels; one to fill in is written by: "
            f"caprmil init {path}"
        )
    raise UnknownNameError("recipe or table", str(path), known)
