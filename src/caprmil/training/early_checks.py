"""What can be wrong with a training before torch is loaded, which takes seconds."""

import re
import sys
from pathlib import Path
from typing import Any

from caprmil import config
from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.sources import folders_of
from caprmil.errors import CohortError, RecipeError, RunError, UnknownNameError
from caprmil.io.leftovers import clear_leftovers, final_name
from caprmil.io.model_hub import CONFIG, download
from caprmil.io.paths import RemotePath, as_path, is_remote
from caprmil.runs.facts import EARLY, MAPS, RECIPE, START, read_facts
from caprmil.runs.scores import SCORES
from caprmil.training.recipe import Recipe
from caprmil.training.recipe_files import model_recipes


def check_early(recipe: Recipe, out: Path) -> None:
    """Raise what is wrong with a recipe, its cohort or the folder of a run, as far as it shows.

    A cohort with problems is read in full, so that all of them are in one error. No bag is read
    otherwise: training does it.
    """
    _check_model(recipe.model.name)
    check_folder(out, recipe)
    check_start(recipe, out)
    folders = folders_of(recipe.features)
    if any(is_remote(each or "") for each in (recipe.cohort, *folders)):
        return
    cohort = (recipe.cohort, recipe.features, recipe.data, recipe.splits)
    options: dict[str, Any] = {"target": recipe.target, "join": recipe.join}
    try:
        load_cohort(*cohort, **options, inspect=False)
    except CohortError:
        load_cohort(*cohort, **options)
        raise
    recipe.try_model()  # loads torch, which training needs, but not Lightning


def _check_model(name: str) -> None:
    """Refuse an unknown model by the names of recipes: each model has one.

    Models of other packages are registered, which loads the registry.
    """
    known = model_recipes()
    if name.partition("+")[0] not in known and "caprmil.models.registry" not in sys.modules:
        raise UnknownNameError("model", name, known)


def check_start(recipe: Recipe, out: Path) -> None:
    """Refuse a start that is no saved model, before bags are checked."""
    source = recipe.model.start
    if source is None or (out / START / CONFIG).is_file():  # a run to resume has its copy
        return
    folder = Path(source)
    if (folder / CONFIG).is_file():
        return
    if folder.is_dir():
        raise RecipeError(
            f"[model] start: {source} has no model: {CONFIG} is missing. The models of a run are "
            "in its folders folds/NAME/model."
        )
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@.+)?", source):
        raise RecipeError(
            f"[model] start: there is no folder {source}. Pass one with a saved model, such as "
            "RUN/folds/fold-0/model, or OWNER/NAME on the hub."
        )
    try:
        download(source, [CONFIG])
    except RunError as problem:
        raise RecipeError(f"[model] start: {problem}") from problem


def check_folder(out: Path, recipe: Recipe) -> None:
    """Refuse a folder that holds anything but an unfinished run of this recipe."""
    advice = "Choose another folder for the new run."
    if not out.exists():
        return
    is_new = out.is_dir() and all(path.name in EARLY or final_name(path) for path in out.iterdir())
    if not is_new and not (out / RECIPE).exists():
        raise RunError(f"{out} exists and is not a run. {advice}")
    if not isinstance(out, RemotePath):
        clear_leftovers(out)  # a process may have been killed at any file
    if is_new:
        return
    if (out / SCORES).exists():
        raise RunError(f"{out} holds a finished run. {advice}")
    before = config.load(out / RECIPE, into=Recipe)
    if changed := config.differences(before, recipe):
        raise RunError(f"{out} holds a run of another recipe ({'; '.join(changed)}). {advice}")


def has_only_to_measure_maps(recipe: Recipe, out: Path) -> bool:
    """Return whether a folder has the finished run of a recipe, stopped before its last step."""
    folder = as_path(out)
    if not (folder / SCORES).exists() or (folder / MAPS).exists():
        return False
    return read_facts(folder).digest == config.digest(recipe)
