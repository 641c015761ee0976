"""Sixty generated slides: cross-validated AUC of several recipes over seeds.

    python benchmarks/small_cohort.py --work small_cohort

The slides are those of `caprmil demo --full`, generated and encoded once. A seed decides the folds
and the training. Results are kept in a JSON lines file next to the page and are not made again.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from time import process_time
from typing import NamedTuple

import numpy as np

from caprmil import config, encoders
from caprmil.demo import FULL
from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.features.extract import Extraction
from caprmil.features.settings import configure
from caprmil.slides.slide import find_slides
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe
from caprmil.training.recipe_files import read_recipe
from learning import digest
from record import Page, Record

FOLDER = Path(__file__).parents[1] / "recipes"
DEMO = (f"train.epochs={FULL.epochs}", f"train.lr={FULL.lr}", "train.warmup_epochs=2")
PROBES, TOP, DROP = ("train.probes=4",), ("train.top_k=10",), ("train.drop_patches=0.9",)
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "mean.toml": ("mean.toml", ()),
    "abmil.toml": ("abmil.toml", ()),
    "caprmil.toml": ("caprmil.toml", ()),
    "caprmil.toml, probes": ("caprmil.toml", PROBES),
    "caprmil.toml, centred": ("caprmil.toml", ("model.init=centred",)),
    "caprmil.toml, low temperature": ("caprmil.toml", ("model.temperature=0.15",)),
    "caprmil.toml, top patches": ("caprmil.toml", TOP),
    "caprmil.toml, dropped patches": ("caprmil.toml", DROP),
    "caprmil.toml, top and dropped patches": ("caprmil.toml", (*TOP, *DROP)),
    "caprmil.toml, probes, top and dropped patches": ("caprmil.toml", (*PROBES, *TOP, *DROP)),
    "the demo's": ("caprmil.toml", DEMO),
    "the demo's, probes": ("caprmil.toml", (*DEMO, *PROBES)),
    "rare.toml": ("rare.toml", ()),
    "robust.toml": ("robust.toml", ()),
}
"""Files in recipes/, and what is changed."""
TUNING_SEED = 100  # seeds from this one on are for choosing recipes
SPLITS = ("splits.folds=3", "splits.validation=0.2")


def read(name: str, *changes: str) -> Recipe:
    file, own = RECIPES[name]
    return read_recipe(FOLDER / file, changes=(*own, *SPLITS, *changes))


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
    start = process_time()
    recipe = replace(
        read(job.recipe, f"splits.seed={job.seed}"), cohort=str(table), features=str(features)
    )
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
    return digest(repr(FULL.cohort))


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
            Job(name, seed, config.digest(read(name)))
            for seed in range(args.first_seed, args.first_seed + args.seeds)
            for name in names
        ]
        record = Record(args.out.with_suffix(".jsonl"), Result, settings_digest())
        work = partial(run, table, args.work / "features")
        for _ in record.complete(jobs, work, processes=args.processes):
            pass
        present = {name: config.digest(read(name)) for name in RECIPES}
        results = [r for r in record.kept() if r.digest == present.get(r.recipe)]
        shown = [r for r in results if r.seed < TUNING_SEED]
        tuned = [r for r in results if r.seed >= TUNING_SEED]
        text = table_text(shown)
        if tuned:
            text += f"\n\nSeeds from {TUNING_SEED} on:\n\n{table_text(tuned)}"
        page.write(f"```bash\npython benchmarks/small_cohort.py\n```\n\n{text}")
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    print(text)


if __name__ == "__main__":
    main()
