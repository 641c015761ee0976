"""A recipe: all that makes a run, in a TOML file or in Python."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from caprmil import config
from caprmil.cohort.cohort import CohortConfig
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CaprmilError, RecipeError
from caprmil.io.paths import as_path
from caprmil.models import MILModel, create
from caprmil.training.module import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The [model] table of a recipe: a name, and any settings of that model."""

    name: str = "caprmil"
    settings: dict[str, Any] = field(default_factory=dict, metadata=config.REST)

    def build(self, in_dim: int, n_outputs: int) -> MILModel:
        """Make the model; a value that it cannot take is an error of the recipe."""
        try:
            return create(self.name, in_dim, n_outputs, **self.settings)
        except CaprmilError:
            raise
        except (TypeError, ValueError, RuntimeError) as problem:
            raise RecipeError(f"[model] {self.name} cannot be built: {problem}") from problem


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that makes a run. Paths are as seen from the working directory."""

    cohort: str
    """A table of slides, patients and labels."""
    features: str | None = None
    """The folder with the bags, if the table has no column for their paths."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: CohortConfig = field(default_factory=CohortConfig)
    splits: SplitConfig = field(default_factory=SplitConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loggers: dict[str, Any] = field(default_factory=lambda: {"TensorBoardLogger": {}})
    """Lightning's loggers by name, each with its settings; history.csv is always written."""


def read_recipe(
    source: str | Path, *, features: str | Path | None = None, changes: Sequence[str] = ()
) -> Recipe:
    """Return the recipe of a TOML file, or the paper's recipe for a table of slides."""
    if Path(source).suffix.lower() == ".toml":
        recipe = config.load(source, into=Recipe, changes=changes)
    else:
        table = {"cohort": str(as_path(source))}
        recipe = config.parse(table, into=Recipe, changes=changes)
    return recipe if features is None else replace(recipe, features=str(as_path(features)))


def make_loggers(settings: Mapping[str, Any], folder: Path) -> list[Logger]:
    """Return Lightning's loggers of these names: its own, or package.module.Class."""
    made = []
    for name, keywords in settings.items():
        kind = _find_logger(name)
        if not isinstance(keywords, Mapping):
            raise RecipeError(f"loggers: {name} takes a table of settings, not {keywords!r}.")
        ours = {"save_dir": str(folder)} if "save_dir" in inspect.signature(kind).parameters else {}
        if issubclass(kind, (CSVLogger, TensorBoardLogger)):  # to others these are no folders
            ours |= {"name": "", "version": "log"}
        try:
            made.append(kind(**ours | dict(keywords)))
        except (ImportError, TypeError, ValueError) as problem:
            raise RecipeError(f"loggers: {name} cannot be made: {problem}") from problem
    return made


def _find_logger(name: str) -> type[Logger]:
    module, _, word = name.rpartition(".")
    try:
        place = importlib.import_module(module) if module else lightning_loggers
        kind = getattr(place, word)
        if issubclass(kind, Logger):
            return kind
    except (ImportError, AttributeError, TypeError):
        pass
    known = ", ".join(lightning_loggers.__all__)
    raise RecipeError(f"loggers: there is no logger '{name}'. Lightning has: {known}.")
