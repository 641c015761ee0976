"""What a run says of itself: run.json, and fold.json of each fold. Every value is checked."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from caprmil import config
from caprmil.errors import RecipeError, RunError
from caprmil.io.json_files import read_json
from caprmil.runs.remote import FOLD

FORMAT = 2  # of the files in a run
FACTS = "run.json"
ADVICE = "Train the run again, in a new folder, or restore the file from a copy."


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
    settings: str | None = None  # how `caprmil encode` made a bag of the cohort

    def __post_init__(self) -> None:
        for name in ("in_dim", "mpp", "patch_px"):
            check_positive(name, getattr(self, name))


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
