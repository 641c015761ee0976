"""Cross-validate models on the classic MIL sets, next to published figures.

    python benchmarks/classic.py data/classic-mil

The folder holds NAME.csv.gz for each set: no header, column 0 the label of the bag, column 1 its
id, the rest features. Finished folds are kept in a JSON lines file next to the page, so a run that
was stopped can be resumed. Text outside the two markers of the page is kept.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold

from caprmil.config import digest
from caprmil.errors import BagError, CaprmilError, UnknownNameError
from caprmil.estimators import MILClassifier
from caprmil.models import list_models
from caprmil.targets import classification_metrics as metrics
from caprmil.targets.metric import mean_and_spread
from record import Page, Record

FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe for all sets and models. The page says how it was chosen."""

    epochs: int = 10
    lr: float = 1e-3
    weight_decay: float = 1e-2
    warmup_epochs: int = 2
    batch_size: int = 4


class Shape(NamedTuple):
    """The known size of a set. Copies with one more feature contain the label of the instance."""

    title: str
    bags: int
    positive: int
    instances: int
    width: int


SETS = {
    "musk1": Shape("MUSK1", 92, 47, 476, 166),
    "musk2": Shape("MUSK2", 102, 39, 6598, 166),
    "elephant": Shape("Elephant", 200, 100, 1391, 230),
    "fox": Shape("Fox", 200, 100, 1320, 230),
    "tiger": Shape("Tiger", 200, 100, 1220, 230),
    "ucsb-breast": Shape("UCSB breast", 58, 26, 2002, 708),
}

ILSE, HOPFIELD = "Ilse et al. 2018", "Ramsauer et al. 2021"
FIVE = ("musk1", "musk2", "fox", "tiger", "elephant")
FOUR = ("tiger", "fox", "elephant", "ucsb-breast")
PUBLISHED: dict[str, dict[str, dict[str, str]]] = {
    "accuracy": {
        f"{method} ({ILSE})": dict(zip(FIVE, figures, strict=True))
        for method, *figures in (
            ("mi-Net", ".889", ".858", ".613", ".824", ".858"),
            ("MI-Net", ".887", ".859", ".622", ".830", ".862"),
            ("Attention", ".892", ".858", ".615", ".839", ".868"),
            ("Gated attention", ".900", ".863", ".603", ".845", ".857"),
        )
    },
    "auc": {
        f"{method} ({HOPFIELD})": dict(zip(FOUR, figures, strict=True))
        for method, *figures in (
            ("Hopfield pooling", ".913", ".6405", ".949", ".895"),
            ("MILES", ".872", ".738", ".927", ".833"),
        )
    },
}
"""From the tables of their papers; a dash is a set that the paper leaves out."""


@dataclass(frozen=True)
class Result:
    """The scores of one model on one test fold."""

    set: str
    model: str
    repeat: int
    fold: int
    settings: str  # the digest of the recipe
    accuracy: float
    auc: float
    bags: int
    train_loss: float  # of the last epoch
    seconds: float

    @property
    def job(self) -> "Job":
        return Job(self.set, self.model, self.repeat, self.fold)


class Job(NamedTuple):
    """One fold of one repeat."""

    set: str
    model: str
    repeat: int
    fold: int


Bags = list[NDArray[np.float32]]


def read(folder: Path, name: str) -> tuple[Bags, NDArray[np.int64]]:
    """Return the bags of a set and their labels, in the order of their ids."""
    if name not in SETS:
        raise UnknownNameError("set", name, SETS)
    expected, path = SETS[name], folder / f"{name}.csv.gz"
    if not path.exists():
        raise BagError(f"There is no {path}. Put the set there as a gzipped CSV.")
    table = np.loadtxt(path, delimiter=",", ndmin=2, dtype=np.float64)
    width = table.shape[1] - 2
    if width == expected.width + 1:
        raise BagError(
            f"{path} has {width} features and should have {expected.width}: such copies contain "
            "the label of the instance as the last one. Use a clean copy."
        )
    if width != expected.width:
        raise BagError(f"{path} has {width} features and should have {expected.width}.")
    bags, labels = [], []
    for number in np.unique(table[:, 1]):
        rows = table[table[:, 1] == number]
        if len(set(rows[:, 0])) > 1:
            raise BagError(f"{path}: bag {number:g} has more than one label.")
        bags.append(rows[:, 2:].astype(np.float32))
        labels.append(int(rows[0, 0] > 0))
    found = expected._replace(bags=len(bags), positive=sum(labels), instances=len(table))
    if found != expected:
        raise BagError(
            f"{path} has {found.bags} bags ({found.positive} positive) of {found.instances} "
            f"instances; known are {expected.bags} ({expected.positive}) of {expected.instances}. "
            "This is another version of the set."
        )
    return bags, np.array(labels)


read_once = lru_cache(maxsize=None)(read)


def splits(labels: NDArray[np.int64], repeat: int) -> list[tuple[Any, Any]]:
    """Return the train and test part of each fold: stratified, by bag, shuffled per repeat."""
    return list(StratifiedKFold(FOLDS, shuffle=True, random_state=repeat).split(labels, labels))


def standardise(train: Bags, test: Bags) -> tuple[Bags, Bags]:
    """Standardise every feature by its mean and deviation in the training part."""
    rows = np.concatenate(train).astype(np.float64)
    mean, std = rows.mean(axis=0), rows.std(axis=0)
    std[std < 1e-8] = 1.0  # a constant feature

    def scaled(bags: Bags) -> Bags:
        return [((bag - mean) / std).astype(np.float32) for bag in bags]

    return scaled(train), scaled(test)


def run(folder: Path, recipe: Recipe, job: Job) -> Result:
    """Train on all folds but one, and score the model on that one."""
    start = process_time()
    bags, labels = read_once(folder, job.set)
    train, test = splits(labels, job.repeat)[job.fold]
    known, unseen = standardise([bags[i] for i in train], [bags[i] for i in test])
    seed = 1000 * job.repeat + job.fold
    classifier = MILClassifier(job.model, seed=seed, device="cpu", **asdict(recipe))
    probabilities = classifier.fit(known, labels[train]).predict_proba(unseen)
    return Result(
        *job,
        settings=digest(recipe),
        accuracy=metrics.accuracy(labels[test], probabilities),
        auc=metrics.auc(labels[test], probabilities),
        bags=len(test),
        train_loss=round(classifier.history_[-1]["train_loss"], 6),
        seconds=round(process_time() - start, 2),
    )


def run_all(
    folder: Path, jobs: Sequence[Job], recipe: Recipe, path: Path, *, processes: int
) -> list[Result]:
    """Run the jobs that are not in the record yet; print each set and model when it is done."""
    record, results = Record(path, Result, digest(recipe)), []
    for result in record.complete(jobs, partial(run, folder, recipe), processes=processes):
        results.append(result)
        cell = [r for r in results if r.job[:2] == result.job[:2]]
        if len(cell) == sum(job[:2] == result.job[:2] for job in jobs):
            print(
                f"{result.set}, {result.model}: accuracy {spread(cell, 'accuracy')}, "
                f"AUC {spread(cell, 'auc')}, {sum(r.seconds for r in cell):.0f} s"
            )
    return results


def spread(results: Sequence[Result], metric: str) -> str:
    """Return mean and sample standard deviation over all folds of all repeats."""
    mean, std, _ = mean_and_spread([getattr(result, metric) for result in results])
    return f"{mean:.3f} ± {std:.3f}"


def table(
    results: Sequence[Result], metric: str, sets: Sequence[str], models: Sequence[str]
) -> str:
    """Return our figures and the published ones as a Markdown table."""
    rows = [["", *(SETS[name].title for name in sets)], ["---"] * (len(sets) + 1)]
    for model in models:
        cells = [[r for r in results if (r.set, r.model) == (name, model)] for name in sets]
        rows.append(
            [f"**{model}**, ours", *(spread(cell, metric) if cell else "" for cell in cells)]
        )
    for method, figures in PUBLISHED[metric].items():
        if any(name in figures for name in sets):
            rows.append([method, *(figures.get(name, "–") for name in sets)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def report(
    results: Sequence[Result],
    sets: Sequence[str],
    models: Sequence[str],
    *,
    repeats: int,
    recipe: Recipe,
    command: str,
) -> str:
    """Return the generated part of the page."""
    settings = "\n".join(f"{name} = {value!r}" for name, value in asdict(recipe).items())
    folds = f"{FOLDS} folds" + (f" of {repeats} repeats" if repeats > 1 else "")
    minutes = sum(result.seconds for result in results) / 60
    return f"""```bash
{command}
```

{FOLDS}-fold cross-validation, stratified, by bag; {repeats} repeat{"s" * (repeats > 1)}. Every
model has its defaults. For all sets and models:

```python
{settings}
```

Ours are mean ± sample standard deviation over the {folds}. It took {minutes:.0f} minutes of one
core in all.

### Accuracy

{table(results, "accuracy", sets, models)}

### Area under the ROC curve

{table(results, "auc", sets, models)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, print the tables and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="folder of NAME.csv.gz")
    parser.add_argument("--sets", default=",".join(SETS), help="default: %(default)s")
    parser.add_argument("--models", default=",".join(list_models()), help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=1, help="of the cross-validation")
    parser.add_argument("--out", type=Path, default=Path("docs/classic.md"), help="the page")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    sets, models = args.sets.split(","), args.models.split(",")
    try:
        page = Page(args.out, "benchmarks/classic.py", "The classic MIL sets")
        for name in sets:
            read(args.folder, name)  # before the first fold is trained
        jobs = [
            Job(name, model, repeat, fold)
            for name in sets
            for model in models
            for repeat in range(args.repeats)
            for fold in range(FOLDS)
        ]
        recipe, kept = Recipe(), args.out.with_suffix(".jsonl")
        results = run_all(args.folder, jobs, recipe, kept, processes=args.processes)
        command = "python benchmarks/classic.py data/classic-mil"
        for option, value in (
            ("sets", args.sets),
            ("models", args.models),
            ("repeats", args.repeats),
        ):
            if value != parser.get_default(option):
                command += f" --{option} {value}"
        page.write(
            report(results, sets, models, repeats=args.repeats, recipe=recipe, command=command)
        )
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    for metric in PUBLISHED:
        print(f"\n{metric}\n{table(results, metric, sets, models)}")
    print(f"\nWritten to {args.out}; the folds are in {kept}.")


if __name__ == "__main__":
    main()
