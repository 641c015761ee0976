"""Grades on generated slides: does knowing their order help? The ordinal target against classes.

    python benchmarks/graded_slides.py --work graded_slides

The grade of a slide is the range of its share of tumour. Slides are generated, and encoded once
with the embedded encoder. A seed decides the folds and the training; both targets have the same
folds, and `compare` tests their difference by patient. Results are kept in a JSON lines file next
to the page and are not made again.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple

from caprmil import config, encoders
from caprmil.errors import CaprmilError
from caprmil.evaluation.comparison import compare
from caprmil.evaluation.differences import show_p
from caprmil.features.extract import Extraction
from caprmil.features.settings import configure
from caprmil.slides.slide import find_slides
from caprmil.synthetic import GradedSlides
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe
from caprmil.training.recipe_files import read_recipe
from learning import digest
from record import Page, Record

RECIPE = Path(__file__).parents[1] / "recipes" / "caprmil.toml"
COHORT = GradedSlides()
CHANGES = (
    *("data.label=grade", "splits.folds=3", "splits.validation=0.2"),
    *("train.epochs=20", "train.warmup_epochs=2", "train.lr=0.001"),  # those of caprmil demo
)
ORDINAL, CLASSES = "ordinal", "classification"
METRICS = {"kappa": "quadratic kappa", "adjacent_accuracy": "adjacent accuracy"}


class Job(NamedTuple):
    """Two cross-validations on the same folds."""

    seed: int
    digest: str  # of both recipes


@dataclass(frozen=True)
class Result:
    """The scores of both targets, and their paired difference."""

    seed: int
    digest: str
    settings: str  # the digest of the cohort
    scores: dict[str, dict[str, Any]]  # by metric: ordinal, classes, low and high end, p
    seconds: float

    @property
    def job(self) -> Job:
        return Job(self.seed, self.digest)


def read(kind: str, *changes: str) -> Recipe:
    return read_recipe(RECIPE, changes=(*CHANGES, f"target.kind={kind}", *changes))


def make_cohort(work: Path) -> Path:
    """Generate and encode the slides, and return their table."""
    table = COHORT.write(work / "cohort")
    encoder = encoders.load(encoders.DEFAULT, device="cpu")
    job = Extraction(out=work / "features", encoder=encoder, config=configure(encoder.card))
    job.run(find_slides([table.parent / "slides"]))
    return table


def run(table: Path, features: Path, job: Job) -> Result:
    """Cross-validate both targets on the folds of a seed, and compare them."""
    start, found = process_time(), {}
    with TemporaryDirectory(prefix="caprmil-") as folder:
        for kind in (ORDINAL, CLASSES):
            recipe = replace(
                read(kind, f"splits.seed={job.seed}"),
                cohort=str(table),
                features=str(features),
            )
            out = Path(folder) / kind
            made = cross_validate(recipe, out, device="cpu", progress=False, mean=False)
            found[kind] = made.predictions
    tested = compare(found, names=METRICS).differences
    return Result(
        *job,
        settings=settings_digest(),
        scores={
            each.metric: {
                ORDINAL: round(each.of_first.mean, 4),
                CLASSES: round(each.of_second.mean, 4),
                "low": round(each.interval.low, 4),
                "high": round(each.interval.high, 4),
                "p": round(each.p, 4),
            }
            for each in tested
        },
        seconds=round(process_time() - start, 1),
    )


def settings_digest() -> str:
    return digest(asdict(COHORT))


def recipes_digest() -> str:
    return digest([config.digest(read(kind)) for kind in (ORDINAL, CLASSES)])


def table_text(results: Sequence[Result]) -> str:
    """Return a row per seed and metric, and the mean over seeds."""
    head = ["metric", "seed", "order known", "classes", "difference", "95 % interval", "p"]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for name, title in METRICS.items():
        own = [(result.seed, result.scores[name]) for result in results]
        apart = [each[ORDINAL] - each[CLASSES] for _, each in own]
        for (seed, each), difference in zip(own, apart, strict=True):
            ends = f"{each['low']:+.3f} to {each['high']:+.3f}"
            values = (f"{each[kind]:.3f}" for kind in (ORDINAL, CLASSES))
            rows.append([title, str(seed), *values, f"{difference:+.3f}", ends, show_p(each["p"])])
        means = (f"{mean(each[kind] for _, each in own):.3f}" for kind in (ORDINAL, CLASSES))
        spread = f" ± {stdev(apart):.3f}" if len(apart) > 1 else ""
        rows.append([title, "mean", *means, f"{mean(apart):+.3f}{spread}", "", ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_text(results: Sequence[Result]) -> str:
    cohort = (
        f"{COHORT.slides} slides, {COHORT.grades} grades, tumour in up to {COHORT.tumour:.0%} of "
        "the tissue; three folds; intervals and p by patient, of one seed."
    )
    command = "```bash\npython benchmarks/graded_slides.py\n```"
    return f"{command}\n\n{cohort}\n\n{table_text(results)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs, print the table, write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("graded_slides"), help="slides and bags")
    parser.add_argument("--out", type=Path, default=Path("docs/ordinal.md"), help="the page")
    parser.add_argument("--processes", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        page = Page(args.out, "benchmarks/graded_slides.py", "Grades")
        table = make_cohort(args.work)
        jobs = [Job(seed, recipes_digest()) for seed in range(args.seeds)]
        record = Record(args.out.with_suffix(".jsonl"), Result, settings_digest())
        work = partial(run, table, args.work / "features")
        found = sorted(
            record.complete(jobs, work, processes=args.processes), key=lambda each: each.seed
        )
        text = page_text(found)
        page.write(text)
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    print(text)


if __name__ == "__main__":
    main()
