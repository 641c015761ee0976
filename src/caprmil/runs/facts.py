"""What a run says of itself: run.json, and fold.json of each fold. Every value is checked."""

import re
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from caprmil import config
from caprmil.errors import RecipeError, RunError
from caprmil.io.json_files import read_json
from caprmil.runs.remote import FOLD, LOCK

FORMAT = 2  # of the files in a run
FACTS, RECIPE, MAPS = "run.json", "recipe.toml", "maps.json"
SEVERAL = ("sources", "join")  # fields of a run with several sources
START = "start"  # where the weights start: a field of run.json, and a folder of the run
COHORT = "cohort.csv"  # a DataFrame that is given instead of the table of a recipe
EARLY = (LOCK, COHORT, START)
"""What a run may hold before its recipe. Every other file is written after the recipe."""
ADVICE = "Train the run again, in a new folder, or restore the file from a copy."


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """The metadata of the bags of one source, if a run has several."""

    name: str
    in_dim: int
    encoder: str | None = None
    mpp: float | None = None
    fingerprint: str | None = None
    patch_px: int | None = None
    scale_rule: str | None = None
    settings: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(?!\.\.?$)[^/\\\0]+", self.name):  # bags are encoded into this folder
            raise RecipeError(f"{self.name!r} cannot be the name of a source")
        for name in ("in_dim", "mpp", "patch_px"):
            check_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """The model whose weights the training of every fold starts from."""

    source: str
    """A folder, or a repository of the hub."""
    weights: str
    """The hash of its weights."""
    copied: int
    """The number of tensors that start from it."""
    anew: tuple[str, ...] = ()
    """Those that start at random, because the target is another one."""
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return it in a line."""
        new = f"; anew: {', '.join(self.anew)}" if self.anew else ""
        return f"{self.source} (weights {self.weights}, {self.copied} tensors{new})"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The metadata of a run, in run.json."""

    format: int
    version: str
    digest: str
    model: str
    target: dict[str, Any]
    in_dim: int
    encoder: str | None
    mpp: float | None
    seed: int
    weights: str  # which epoch's weights were kept: best or last
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    fingerprint: str | None = None  # of the encoder
    patch_px: int | None = None
    scale_rule: str | None = None
    label: str | None = None  # the column of the label, if it is one that no target names
    settings: str | None = None  # how `caprmil encode` made a bag of the cohort
    sources: tuple[SourceFacts, ...] = ()  # if there are several
    join: Literal["concatenation", "bag"] | None = None  # how they were joined
    start: StartFacts | None = None  # where the weights start, unless at random

    def __post_init__(self) -> None:
        for name in ("in_dim", "mpp", "patch_px"):
            check_positive(name, getattr(self, name))
        names = {source.name for source in self.sources}
        if len(names) < len(self.sources) or bool(names) != (self.join is not None):
            raise RecipeError("its sources are incomplete")

    @property
    def mean_dim(self) -> int:
        """The width of the mean feature of a bag: of one source after the other."""
        return sum(source.in_dim for source in self.sources) or self.in_dim

    def as_table(self) -> dict[str, Any]:
        """Return the content of run.json. Sources and start are in it only if there are some."""
        table = asdict(self)
        unused = (*(() if self.sources else SEVERAL), *(() if self.start else (START,)))
        return {name: value for name, value in table.items() if name not in unused}


@dataclass(frozen=True, kw_only=True)
class FoldFacts:
    """The metadata of a trained fold, in fold.json."""

    kept_epoch: int
    epochs: int
    target: dict[str, Any]

    def __post_init__(self) -> None:
        if not 0 <= self.kept_epoch < self.epochs:
            raise RecipeError(f"epoch {self.kept_epoch} of {self.epochs} cannot have been kept")


def check_positive(name: str, value: float | None) -> None:
    """Raise if a number that is known is not positive."""
    if value is not None and not value > 0:
        raise RecipeError(f"{name} must be positive, not {value}")


def read_facts(folder: Path) -> Facts:
    """Return the metadata of the run in a folder, which must exist."""
    path = folder / FACTS
    found = read_json(path)
    format_ = found.get("format", 1)
    if format_ != FORMAT:
        raise RunError(
            f"{folder} was made by caprmil {found.get('version')} in run format {format_}; this is "
            f"caprmil {version('caprmil')}, which reads format {FORMAT}. Use the version that made "
            "it, or train again."
        )
    return config.load_json(path, into=Facts, advice=ADVICE)


def read_fold_facts(folder: Path) -> FoldFacts:
    """Return the metadata of the trained fold in a folder."""
    return config.load_json(folder / FOLD, into=FoldFacts, advice=ADVICE)
