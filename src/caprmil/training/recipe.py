"""A recipe: all settings of a run, in a TOML file or in Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from caprmil import config
from caprmil.cohort.cohort import CohortConfig
from caprmil.cohort.covariates import VECTOR, Column, NumberColumn, column_table
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CaprmilError, RecipeError
from caprmil.io.paths import as_path
from caprmil.models import FusedModel, MILModel, create, list_models
from caprmil.models.registry import needs_classes
from caprmil.targets import Classification, Target, find_target
from caprmil.training.module import TrainConfig, check_classes


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The [model] table of a recipe: a name, and any settings of that model."""

    name: str = "caprmil"
    settings: dict[str, Any] = field(default_factory=dict, metadata=config.REST)

    def build(self, in_dim: int, target: Target) -> MILModel:
        """Make the model; a value that it cannot take is an error of the recipe."""
        if not target.has_classes and needs_classes(self.name, self.settings):
            raise RecipeError(
                f"{self.name} needs classes, and the target {target.kind} has none. Choose another "
                f"model: {', '.join(name for name in list_models() if not needs_classes(name))}."
            )
        try:
            return create(self.name, in_dim, target.n_outputs, **self.settings)
        except CaprmilError:
            raise
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as problem:
            raise RecipeError(f"[model] {self.name} cannot be built: {problem}") from problem


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """The [fusion] table of a recipe: how covariates are added to a model of the patches."""

    how: Literal["concatenation", "late"] = "concatenation"
    """concatenation: before the last linear layer; late: two models, each with its own loss, and
    the mean of their outputs."""
    dim: int = 128
    """The width of the embedding of the covariates."""
    dropout: float = 0.1
    """Of that embedding, in training."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run. Paths are relative to the working directory."""

    cohort: str
    """A table of slides, patients and labels."""
    features: str | None = None
    """The folder with the bags, if the table has no column for their paths."""
    target: Target = field(default_factory=Classification, metadata=config.by_kind(find_target))
    """What is predicted: its kind, and the settings of that kind."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: CohortConfig = field(default_factory=CohortConfig)
    splits: SplitConfig = field(default_factory=SplitConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fusion: FusionConfig | None = None
    """How covariates are read, if [data] covariates names some."""
    loggers: dict[str, Any] = field(default_factory=lambda: {"TensorBoardLogger": {}})
    """Loggers by name, each with its settings: see `training.loggers`. history.csv is always
    written."""

    def __post_init__(self) -> None:
        if self.fusion is not None and not self.data.reads_covariates:
            raise RecipeError(
                "[fusion] is about covariates, and there are none. Name columns in [data] "
                "covariates, or vectors in [data] vectors, or leave [fusion] out."
            )

    def build_model(self, in_dim: int, target: Target, columns: Sequence[Column] = ()) -> MILModel:
        """Make the model. `columns` are the covariates, with their statistics in training."""
        image = self.model.build(in_dim, target)
        if not columns:
            return image
        fusion = self.fusion or FusionConfig()
        try:
            return FusedModel(
                *(in_dim, target.n_outputs),
                image=image,
                columns=[column_table(column) for column in columns],
                how=fusion.how,
                dim=fusion.dim,
                dropout=fusion.dropout,
            )
        except ValueError as problem:
            raise RecipeError(f"[fusion]: {problem}") from problem

    def try_model(self) -> MILModel:
        """Make the model before a cohort is read, with sizes that are only plausible."""
        target = self.target.example()
        names = [*(self.data.covariates or ()), *([VECTOR] if self.data.vectors else [])]
        columns = [NumberColumn(name=name, mean=0.0, std=1.0) for name in names]
        if columns and self.train.compile:
            raise RecipeError("A model with covariates is not compiled. Set train.compile = false.")
        model = self.build_model(1024, target, columns)
        check_classes(model, target, self.train)
        return model


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
