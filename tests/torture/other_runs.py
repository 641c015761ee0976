"""Finished runs of other kinds than the one of the corpus, each with a cohort that it has not seen.

COHORT/kinds/KIND/run        a run of survival, several targets, patients, covariates or sources
COHORT/kinds/KIND/outside    the same slides under other names, in folders called as those of KIND
"""

import csv
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corpus import Corpus, quick_scoring

KINDS = ("survival", "several", "patient", "covariates", "sources")
VECTORS = "vectors.csv"
FEATURES = ("features", "fine", "coarse")


@dataclass(frozen=True)
class SmallRun:
    """A finished run, the folders of its bags, and a cohort that it has not seen."""

    kind: str
    home: Path

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def features(self) -> list[Path]:
        return _features(self.home)

    @property
    def slide(self) -> str:
        """The name of a bag: a slide or a patient."""
        return "p01" if self.kind == "patient" else "slide_001"

    def external(self, home: Path | None = None) -> list[object]:
        """Return the options that name a cohort outside of the run, by default its own."""
        home = home or self.home / "outside"
        words: list[object] = ["--cohort", home / "labels.csv"]
        for folder in _features(home):
            words += ["--features", folder]
        vectors = home / VECTORS
        return [*words, "--vectors", vectors] if vectors.exists() else words


def _features(home: Path) -> list[Path]:
    return [home / name for name in FEATURES if (home / name).is_dir()]


def main_run(corpus: Corpus) -> SmallRun:
    """Return the run of the corpus itself."""
    return SmallRun("classification", corpus.folder)


def other_runs(corpus: Corpus) -> list[SmallRun]:
    """Return the runs of other kinds, as far as they were made."""
    homes = [corpus.folder / "kinds" / kind for kind in KINDS]
    return [SmallRun(home.name, home) for home in homes if home.exists()]


def make_outside(corpus: Corpus) -> None:
    """Make the cohort that the run of the corpus has not seen."""
    _write_outside(corpus.folder)


def make_other_runs(corpus: Corpus) -> None:
    """Train a run of each kind."""
    sys.path.append(str(Path(__file__).parents[1]))
    from caprmil import config
    from caprmil.training.cross_validation import cross_validate
    from small_runs import small_recipe

    for kind in KINDS:
        home = corpus.folder / "kinds" / kind
        home.mkdir(parents=True)
        recipe: Any = small_recipe(kind, home)
        if kind == "covariates":
            _write_vectors(home)
            data = replace(recipe.data, vectors=str(home / VECTORS))
            recipe = replace(recipe, data=data)
        (home / "recipe.toml").write_text(config.dump(recipe))
        with quick_scoring():
            cross_validate(recipe, home / "run", device="cpu", progress=False)
        _write_outside(home)


def _write_vectors(home: Path) -> None:
    """Write a vector of each slide."""
    names = [row["slide"] for row in _rows(home / "labels.csv")]
    lines = [f"{name},{number % 5},{number % 3 - 0.5}" for number, name in enumerate(names)]
    (home / VECTORS).write_text("\n".join(["slide,first,second", *lines, ""]))


def _write_outside(home: Path) -> None:
    """Write the cohort again under other names. The bags are links."""
    outside = home / "outside"
    outside.mkdir()
    for table in ("labels.csv", VECTORS):
        if not (home / table).exists():
            continue
        rows = _rows(home / table)
        for row in rows:
            row |= {name: f"new_{row[name]}" for name in ("slide", "patient") if name in row}
        with (outside / table).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    for folder in _features(home):
        (outside / folder.name).mkdir()
        for path in folder.iterdir():
            if path.is_file():
                os.link(path, outside / folder.name / f"new_{path.name}")


def _rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))
