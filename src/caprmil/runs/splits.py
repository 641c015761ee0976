"""The slides of a run and the parts that they are in, in splits.json. No torch is loaded."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from caprmil import config
from caprmil.cohort.folds import Fold
from caprmil.errors import RecipeError
from caprmil.runs.facts import ADVICE

SPLITS = "splits.json"
PARTS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The patient, label, size and bag of each slide by name, and the folds."""

    patients: dict[str, str]
    labels: dict[str, str]
    paths: dict[str, str]
    folds: tuple[Fold, ...]
    patches: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [fold.name for fold in self.folds]
        if not names or len(set(names)) < len(names):
            raise RecipeError("there must be folds, each of its own name")
        if odd := [name for name in names if not re.fullmatch(r"(?!\.)[^/\\\0]+", name)]:
            raise RecipeError(f"{odd[0]!r} cannot be the name of a fold")
        for path in self.paths.values():
            if "\0" in path or max(map(len, path.split("/"))) > 255 or len(path) > 4096:
                raise RecipeError(f"{path[:80]!r} cannot be a path")
        listed = {slide for fold in self.folds for part in PARTS for slide in getattr(fold, part)}
        if unknown := sorted(listed - (self.paths.keys() & self.patients.keys())):
            raise RecipeError(f"slide {unknown[0]!r} is in a fold, and has no path or no patient")
        if any(fold.seed < 0 for fold in self.folds):
            raise RecipeError("a seed is negative")


def read_splits(folder: Path) -> Splits:
    """Return the slides and folds of the run in a folder."""
    return config.load_json(folder / SPLITS, into=Splits, advice=ADVICE)
