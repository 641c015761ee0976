"""The slides of a run and the parts that they are in, in splits.json. No torch is loaded."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from caprmil import config
from caprmil.cohort.folds import Fold
from caprmil.cohort.patient_units import slides_of_patients
from caprmil.errors import RecipeError
from caprmil.runs.facts import ADVICE

SPLITS = "splits.json"
PARTS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The patient, label, size and bag of each slide by name, and the folds.

    If `unit` is patient, labels and folds are by patient.
    """

    patients: dict[str, str]
    labels: dict[str, str]
    paths: dict[str, str]
    folds: tuple[Fold, ...]
    patches: dict[str, int] = field(default_factory=dict)
    unit: Literal["slide", "patient"] = "slide"
    """What a bag is of."""
    combine: Literal["mean", "max", "learned"] | None = None
    """How the answers of a patient's slides become one, if the slides are answered alone."""
    sources: dict[str, dict[str, str]] = field(default_factory=dict)
    """The bag of each slide by source, if there are several. `paths` then has the first one's."""

    def __post_init__(self) -> None:
        names = [fold.name for fold in self.folds]
        if not names or len(set(names)) < len(names):
            raise RecipeError("there must be folds, each of its own name")
        if odd := [name for name in names if not re.fullmatch(r"(?!\.)[^/\\\0]+", name)]:
            raise RecipeError(f"{odd[0]!r} cannot be the name of a fold")
        for path in [p for own in (self.paths, *self.sources.values()) for p in own.values()]:
            if "\0" in path or max(map(len, path.split("/"))) > 255 or len(path) > 4096:
                raise RecipeError(f"{path[:80]!r} cannot be a path")
        if any(own.keys() != self.paths.keys() for own in self.sources.values()):
            raise RecipeError("a slide does not have a path in every source")
        listed = {slide for fold in self.folds for part in PARTS for slide in getattr(fold, part)}
        if unknown := sorted(listed - self.slides.keys()):
            raise RecipeError(
                f"{self.unit} {unknown[0]!r} is in a fold, and has no path or no patient"
            )
        if any(fold.seed < 0 for fold in self.folds):
            raise RecipeError("a seed is negative")

    @cached_property
    def slides(self) -> dict[str, tuple[str, ...]]:
        """The slides of each unit."""
        known = {slide: self.patients[slide] for slide in self.paths if slide in self.patients}
        if self.unit == "patient":
            return slides_of_patients(known)
        return {slide: (slide,) for slide in known}


def read_splits(folder: Path) -> Splits:
    """Return the slides and folds of the run in a folder."""
    return config.load_json(folder / SPLITS, into=Splits, advice=ADVICE)
