"""A recipe: all settings of a run, in a TOML file or in Python. It is read without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from caprmil import config
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.covariates import VECTOR, Column, NumberColumn, column_table
from caprmil.cohort.folds import SplitConfig
from caprmil.cohort.sources import JoinRule
from caprmil.errors import CaprmilError, RecipeError
from caprmil.targets import Classification, Target, find_target
from caprmil.training.train_config import TrainConfig, check_classes

if TYPE_CHECKING:
    from caprmil.models import MILModel


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The [model] table of a recipe: a name, and any settings of that model."""

    name: str = "caprmil"
    start: str | None = None
    """Where the weights start: a folder with a saved model, or OWNER/NAME on the hub, also with
    @REVISION; by default at random."""
    settings: dict[str, Any] = field(default_factory=dict, metadata=config.REST)

    def build(self, in_dim: int, target: Target) -> "MILModel":
        """Make the model; a value that it cannot take is an error of the recipe."""
        from caprmil.models import create, list_models
        from caprmil.models.registry import needs_classes

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

    how: Literal["concatenation", "late", "film"] = "concatenation"
    """concatenation: before the last linear layer; late: two models, each with its own loss, and
    the mean of their outputs; film: a scale and a shift of the embedding of the patches."""
    dim: int = 128
    """The width of the embedding of the covariates."""
    dropout: float = 0.1
    """Of that embedding, in training."""


@dataclass(frozen=True, kw_only=True)
class SourcesConfig:
    """The [sources] table of a recipe: how the features of several sources are joined."""

    join: JoinRule = "auto"
    """concatenation: the features of each patch; bag: the patches of all sources are one bag; auto:
    concatenation if all sources have the same patches in every slide."""
    dim: int = 256
    """With "bag", the width that the features of every source are projected to."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise RecipeError(f"[sources] dim must be 1 or more, not {self.dim}.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run. Paths are relative to the working directory; those of a file, if the
    table is not there, to the nearest folder that has it, from the file's own upwards."""

    cohort: str
    """A table of slides, patients and labels."""
    features: str | tuple[str, ...] | None = None
    """The folder with the bags, if the table has no column for their paths; or one folder for each
    of several sources: docs/sources.md."""
    target: Target = field(default_factory=Classification, metadata=config.by_kind(find_target))
    """What is predicted: its kind, and the settings of that kind."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Which model, and the settings of that model."""
    data: CohortConfig = field(default_factory=CohortConfig)
    """How the table is read."""
    splits: SplitConfig = field(default_factory=SplitConfig)
    """How the cohort is divided into training, validation and test parts."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How a model is trained."""
    fusion: FusionConfig | None = None
    """How covariates are read, if [data] covariates names some."""
    sources: SourcesConfig | None = None
    """How sources are joined, if `features` names several."""
    loggers: dict[str, Any] = field(default_factory=lambda: {"TensorBoardLogger": {}})
    """Loggers by name, each with its settings: see `training.loggers`. history.csv is always
    written."""

    def __post_init__(self) -> None:
        if isinstance(self.features, tuple):
            if not self.features or len(set(self.features)) < len(self.features):
                raise RecipeError("features must name folders, and none of them twice.")
            if len(self.features) == 1:
                object.__setattr__(self, "features", self.features[0])
        if self.model.start is not None and self.train.probes:
            raise RecipeError(
                "train.probes and [model] start both set where the first layer starts. Set "
                "train.probes = 0, or leave start out."
            )
        if self.sources is not None and not isinstance(self.features, tuple):
            raise RecipeError(
                "[sources] is about several sources, and there is one. Name several folders in "
                "features, or leave [sources] out."
            )
        if self.fusion is not None and not self.data.reads_covariates:
            raise RecipeError(
                "[fusion] is about covariates, and there are none. Name columns in [data] "
                "covariates, or vectors in [data] vectors, or leave [fusion] out."
            )

    @property
    def is_multimodal(self) -> bool:
        """Whether a model reads covariates or several sources of features."""
        return self.data.reads_covariates or isinstance(self.features, tuple)

    @property
    def join(self) -> JoinRule:
        """How sources are joined."""
        return (self.sources or SourcesConfig()).join

    def build_model(
        self,
        in_dim: int,
        target: Target,
        columns: Sequence[Column] = (),
        widths: Sequence[int] = (),
    ) -> "MILModel":
        """Make the model. `columns` are the covariates, with their statistics in training.

        `widths` are those of several sources whose patches are one bag.
        """
        image = self._build_image(in_dim, target, widths)
        if not columns:
            return image
        from caprmil.models import FusedModel

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

    def _build_image(self, in_dim: int, target: Target, widths: Sequence[int]) -> "MILModel":
        """Make the model of the patches."""
        if not widths or self.model.name == "none":  # which reads no patches
            return self.model.build(in_dim, target)
        for name, none in (("probes", "0"), ("compile", "false")):
            if getattr(self.train, name):
                raise RecipeError(
                    f"train.{name} cannot be used where the patches of several sources are one "
                    f"bag. Set train.{name} = {none}, or leave all sources but one out."
                )
        from caprmil.models.source_model import SourceModel

        dim = (self.sources or SourcesConfig()).dim
        image = self.model.build(dim, target)
        return SourceModel(in_dim, target.n_outputs, image=image, widths=widths, dim=dim)

    def try_model(self) -> "MILModel":
        """Make the model before a cohort is read, with sizes that are only plausible."""
        target = self.target.example()
        names = [*(self.data.covariates or ()), *([VECTOR] if self.data.vectors else [])]
        columns = [NumberColumn(name=name, mean=0.0, std=1.0) for name in names]
        if columns and self.train.compile:
            raise RecipeError("A model with covariates is not compiled. Set train.compile = false.")
        model = self.build_model(1024, target, columns)
        check_classes(model, target, self.train)
        return model
