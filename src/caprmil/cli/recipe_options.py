"""Settings of a recipe as options: the frequent ones by name, the others by --set."""

from pathlib import Path
from typing import Annotated

import typer

from caprmil.errors import RecipeError

RecipeOrTable = Annotated[
    Path,
    typer.Argument(
        help="A table of slides, a recipe of the package by name (abmil), or a file (.toml).",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another setting of the recipe, e.g. train.clip=1.0. May be repeated.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="The model, e.g. abmil. A table is then trained with the recipe of it."),
]
Epochs = Annotated[int | None, typer.Option(help="Epochs (train.epochs).")]
Folds = Annotated[int | None, typer.Option(help="Folds of the cross-validation (splits.folds).")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate (train.lr).")]
Seed = Annotated[int | None, typer.Option(help="Seed of folds and training (splits.seed).")]
Label = Annotated[str | None, typer.Option(help="Column of the label (data.label).")]

KEYS = {
    "epochs": "train.epochs",
    "folds": "splits.folds",
    "lr": "train.lr",
    "seed": "splits.seed",
    "label": "data.label",
}
"""The options that are settings."""


def recipe_changes(changes: list[str] | None, **options: int | float | str | None) -> list[str]:
    """Return options and --set as changes of a recipe. One given twice is an error."""
    given = {name: value for name, value in options.items() if value is not None}
    chosen = {change.partition("=")[0].strip() for change in changes or ()}
    for name in given:
        if KEYS[name] in chosen:
            raise RecipeError(f"--{name} and --set {KEYS[name]} are one setting. Leave out one.")
    own = [f"{KEYS[name]}={_toml(value)}" for name, value in given.items()]
    return [*own, *(changes or ())]


def _toml(value: float | str) -> str:
    import tomli_w

    return tomli_w.dumps({"v": value}).partition("=")[2].strip()
