"""Sixty generated slides: cross-validated AUC of several recipes over seeds.

    python benchmarks/small_cohort.py --work small_cohort

The slides are those of `caprmil demo --full`, generated and encoded once. A seed decides the folds
and the training. Results are kept in a JSON lines file next to the page and are not made again.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from caprmil import config, encoders
from caprmil.demo import FULL
from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.features.extract import Extraction
from caprmil.features.settings import configure
from caprmil.slides.slide import find_slides
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe
from learning import digest
from record import Page, Record
from task_models import CENTRED, DROP, PROBES, SHARP, TOP

PLAIN: dict[str, Any] = {"epochs": 20, "warmup_epochs": 2, "lr": 5e-4}
RARE = PLAIN | TOP | DROP | PROBES | {
    "lr": 1e-3, "batch_size": 4, "weight_decay": 1e-3, "clip": 1.0, "weights": "last",
    "patience": 60, "epochs": 60, "warmup_epochs": 6,
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "mean": {"model": {"name": "mean"}, "train": PLAIN},
    "abmil": {"model": {"name": "abmil"}, "train": PLAIN},
    "caprmil": {"model": {"name": "caprmil"}, "train": PLAIN},
    "caprmil, probes": {"model": {"name": "caprmil"}, "train": PLAIN | PROBES},
    "caprmil, rare.toml": {
        "model": {"name": "caprmil", **CENTRED, **SHARP},
        "train": RARE,
    },
}
SPLITS = {"folds": 3, "validation": 0.2}


class Job(NamedTuple):
    """A recipe and a seed."""

    recipe: str
    seed: int
    digest: str  # of the recipe


@dataclass(frozen=True)
class Result:
    """The scores of a cross-validation."""

    recipe: str
    seed: int
    digest: str
    settings: str  # the digest of cohort and folds
    folds: list[float]  # AUC
    brier: float
    seconds: float

    @property
    def job(self) -> Job:
        return Job(self.recipe, self.seed, self.digest)


def make_cohort(work: Path) -> Path:
    """Generate and encode the slides, and return their table."""
    table = FULL.cohort.write(work / "cohort")
    encoder = encoders.load(encoders.DEFAULT, device="cpu")
    job = Extraction(out=work / "features", encoder=encoder, config=configure(encoder.card))
    job.run(find_slides([table.parent / "slides"]))
    return table


def run(table: Path, features: Path, job: Job) -> Result:
    """Cross-validate a recipe."""
    start, own = process_time(), RECIPES[job.recipe]
    files = {"cohort": str(table), "features": str(features)}
    splits = {"splits": {**SPLITS, "seed": job.seed}}
    recipe = config.parse({**files, **splits, **own}, into=Recipe)
    with TemporaryDirectory(prefix="caprmil-") as folder:
        made = cross_validate(
            recipe, Path(folder) / "run", device="cpu", progress=False, mean=False
        )
        scores = list(made.scores["folds"].values())
    return Result(
        *job,
        settings=settings_digest(),
        folds=[round(fold["auc"], 4) for fold in scores],
        brier=round(float(np.mean([fold["brier"] for fold in scores])), 4),
        seconds=round(process_time() - start, 1),
    )


def settings_digest() -> str:
    return digest(repr(FULL.cohort), SPLITS)


def table_text(results: Sequence[Result]) -> str:
    rows = [
        "| recipe | seeds | AUC: mean | worst seed | worst fold | Brier score: mean |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name in RECIPES:
        own = [result for result in results if result.recipe == name]
        if own:
            aucs = [mean(result.folds) for result in own]
            rows.append(
                f"| {name} | {len(own)} | {mean(aucs):.3f} | {min(aucs):.3f} | "
                f"{min(min(result.folds) for result in own):.3f} | "
                f"{mean(result.brier for result in own):.3f} |"
            )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipes", default=";".join(RECIPES), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--first-seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("small_cohort"), help="slides and bags")
    parser.add_argument("--out", type=Path, default=Path("docs/small-cohort.md"), help="the page")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    names = args.recipes.split(";")
    try:
        for name in names:
            if name not in RECIPES:
                raise UnknownNameError("recipe", name, RECIPES)
        page = Page(args.out, "benchmarks/small_cohort.py", "Sixty slides")
        table = make_cohort(args.work)
        jobs = [
            Job(name, seed, digest(RECIPES[name]))
            for seed in range(args.first_seed, args.first_seed + args.seeds)
            for name in names
        ]
        record = Record(args.out.with_suffix(".jsonl"), Result, settings_digest())
        work = partial(run, table, args.work / "features")
        for _ in record.complete(jobs, work, processes=args.processes):
            pass
        present = {name: digest(own) for name, own in RECIPES.items()}
        results = [r for r in record.kept() if r.digest == present.get(r.recipe)]
        text = table_text(results)
        page.write(f"```bash\npython benchmarks/small_cohort.py\n```\n\n{text}")
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    print(text)


if __name__ == "__main__":
    main()
