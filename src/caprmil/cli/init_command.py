"""The command init: a recipe and a table of labels, to fill in."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from caprmil.cli.shared import app
from caprmil.errors import count
from caprmil.io.paths import as_path

LABELS, RECIPE = "labels.csv", "recipe.toml"


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A folder of slides, or of features.")],
    out: Annotated[
        Path, typer.Option(help=f"Folder for {RECIPE} and {LABELS}; default: this one.")
    ] = Path(),
    model: Annotated[str, typer.Option(help="The recipe to start from, e.g. abmil.")] = "caprmil",
) -> None:
    """Write a recipe, and a table of labels to fill in.

    The table has a row per slide, and the recipe all settings with comments. Nothing is
    overwritten.

    \b
    Examples:
      caprmil init slides
      caprmil init features --out study --model abmil
    """
    from caprmil.errors import UnknownNameError
    from caprmil.io.new_files import new_files
    from caprmil.training.full_recipe import full_recipe
    from caprmil.training.recipe_files import list_recipes

    recipes = list_recipes()
    if model not in recipes:
        raise UnknownNameError("recipe", model, recipes)
    names, are_slides = _names(folder)
    features = "features" if are_slides else str(folder)
    paths = {"cohort": out / LABELS, "features": as_path(features)}
    if not out.absolute().resolve().is_relative_to(Path.cwd()):  # the recipe is found from nowhere
        paths = {key: path.absolute() for key, path in paths.items()}
    text = full_recipe(model)
    for key, path in paths.items():
        # A string of JSON is one of TOML, but for DEL.
        value = json.dumps(str(path), ensure_ascii=False).replace("\x7f", "\\u007f")
        line = f"{key} = {value}"
        text = re.sub(rf'^{key} = "[^"]*"', line.replace("\\", r"\\"), text, flags=re.M)
    with new_files(out, [LABELS, RECIPE]) as new:
        rows = ["slide,patient,label", *(f"{_cell(name)},," for name in names)]
        (new / LABELS).write_text("\n".join(rows) + "\n", encoding="utf-8")
        (new / RECIPE).write_text(text, encoding="utf-8")
    of = "slides" if are_slides else "features"
    typer.echo(f"{count(len(names), 'slide')} of {folder}, a folder of {of}.")
    typer.echo(f"Written to {out}: {LABELS}, {RECIPE}. Next:")
    typer.echo(
        f"  fill in patient and label in {out / LABELS}; without the column patient, every slide "
        "is of its own patient"
    )
    if are_slides:
        typer.echo(f"  caprmil encode {folder} --out {features}")
    typer.echo(f"  caprmil train {out / RECIPE} --out runs/first")


def _names(folder: Path) -> tuple[list[str], bool]:
    """Return the names of the slides in a folder, and whether it has slides and not features."""
    from caprmil.errors import CohortError
    from caprmil.features.bags import group_by_slide
    from caprmil.slides.names import BAG_SUFFIXES, SLIDE_SUFFIXES

    if not folder.is_dir():
        raise CohortError(f"There is no folder {folder}. Pass one of slides or of features.")
    if bags := group_by_slide(folder.rglob("*")):
        return sorted(bags), False
    from caprmil.errors import SlideError
    from caprmil.slides.slide import find_slides

    try:
        return sorted(find_slides([folder])), True
    except SlideError as problem:
        if any(path.suffix.lower() in SLIDE_SUFFIXES for path in folder.rglob("*")):
            raise
        raise CohortError(
            f"{folder} has neither features ({', '.join(BAG_SUFFIXES)}) nor slides "
            f"({', '.join(SLIDE_SUFFIXES)})."
        ) from problem


def _cell(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if re.search('[",;\r\n]', name) else name
