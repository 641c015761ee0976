"""CAPRMIL beside a plain Mean on real data: the classic MIL sets, with paired differences.

    python benchmarks/real_sets.py data/classic-mil

The sets are read as by benchmarks/classic.py. Every bag is predicted by models that have not seen
it. Results are kept in a JSON lines file next to the page, so a run can be resumed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.features import bags
from caprmil.features.batches import Sample
from caprmil.models import create
from caprmil.runs.inference import TrainedModel, predict_samples
from caprmil.targets import Classification
from caprmil.targets.delong import auc_influence
from caprmil.training.module import fit
from caprmil.training.train_config import TrainConfig
from classic import SETS, Bags, read, read_once, splits, standardise
from learning import digest
from record import Page, Record

TARGET = Classification(classes=("negative", "positive"))
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "mean": ("mean", {}),
    "abmil": ("abmil", {}),
    "caprmil": ("caprmil", {}),
    "caprmil, probes": ("caprmil", {"probes": 4}),
}
REFERENCE = "mean"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One recipe for all sets and models: that of docs/classic.md, and three times its epochs."""

    epochs: int = 30
    lr: float = 1e-3
    weight_decay: float = 1e-2
    warmup_epochs: int = 2
    batch_size: int = 4


class Job(NamedTuple):
    """A set, a model and a repeat of the cross-validation."""

    set: str
    way: str
    repeat: int


@dataclass(frozen=True)
class Result:
    """The probability of the positive class for every bag, by the model of its fold."""

    set: str
    way: str
    repeat: int
    settings: str  # the digest of budget and ways
    answers: list[float]
    seconds: float

    @property
    def job(self) -> Job:
        return Job(self.set, self.way, self.repeat)


def run(folder: Path, budget: Budget, job: Job) -> Result:
    """Cross-validate a model."""
    start = process_time()
    known, labels = read_once(folder, job.set)
    name, changes = WAYS[job.way]
    answers = np.zeros(len(labels))
    settings = TrainConfig(**asdict(budget), **changes, patience=budget.epochs, weights="last")
    for number, (train, test) in enumerate(splits(labels, job.repeat)):
        parts = standardise([known[i] for i in train], [known[i] for i in test])
        samples, unseen = (
            as_samples(part, labels[rows]) for part, rows in zip(parts, (train, test), strict=True)
        )
        seed = 1000 * job.repeat + number
        torch.manual_seed(seed)
        model = create(name, known[0].shape[1], 2)
        with TemporaryDirectory(prefix="caprmil-") as work:
            options: dict[str, Any] = {"settings": settings, "seed": seed, "device": "cpu"}
            fit(model, samples, target=TARGET, folder=Path(work), **options)
        answers[test] = predict_samples(TrainedModel(model, TARGET), unseen)[:, 1]
    return Result(
        *job,
        settings=settings_digest(budget),
        answers=[round(float(value), 6) for value in answers],
        seconds=round(process_time() - start, 1),
    )


def as_samples(part: Bags, labels: Sequence[int]) -> list[Sample]:
    pairs = zip(part, labels, strict=True)
    return [Sample(str(n), bags.from_arrays(bag), int(y)) for n, (bag, y) in enumerate(pairs)]


def settings_digest(budget: Budget) -> str:
    return digest(asdict(budget), WAYS)


class Comparison(NamedTuple):
    """The AUC of a model and of the reference on the same bags, and their difference."""

    auc: float
    difference: float
    error: float  # standard error of the difference, by DeLong

    def __str__(self) -> str:
        low, high = (self.difference + sign * 1.96 * self.error for sign in (-1, 1))
        return f"{self.auc:.3f}, {self.difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def compare(labels: Any, answers: Any, reference: Any) -> Comparison:
    """Compare two models by the AUC of their answers, each a mean over repeats."""
    own, other = (np.stack([1 - each, each], axis=1) for each in (answers, reference))
    owners = np.arange(len(labels))
    influence = auc_influence(labels, own, owners) - auc_influence(labels, other, owners)
    aucs = [roc_auc_score(labels, each[:, 1]) for each in (own, other)]
    return Comparison(aucs[0], aucs[0] - aucs[1], sqrt(float((influence**2).sum())))


def table(results: Sequence[Result], folder: Path) -> str:
    """Return the AUC of each model, and its difference from the reference, as a table."""
    sets = [name for name in SETS if any(result.set == name for result in results)]
    rows = [["", *(SETS[name].title for name in sets)], ["---"] * (len(sets) + 1)]
    found = {
        (way, name): np.mean(own, axis=0)
        for way in WAYS
        for name in sets
        if (own := [r.answers for r in results if (r.way, r.set) == (way, name)])
    }
    for way in WAYS:
        cells = []
        for name in sets:
            if (way, name) not in found or (REFERENCE, name) not in found:
                cells.append("")
                continue
            labels = read_once(folder, name)[1]
            compared = compare(labels, found[way, name], found[REFERENCE, name])
            cells.append(f"{compared.auc:.3f}" if way == REFERENCE else str(compared))
        if any(cells):
            rows.append([way, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="folder of NAME.csv.gz")
    parser.add_argument("--sets", default=",".join(SETS), help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/real-data.md"), help="the page")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    budget, sets = Budget(), args.sets.split(",")
    try:
        page = Page(args.out, "benchmarks/real_sets.py", "Real data")
        for name in sets:
            if name not in SETS:
                raise UnknownNameError("set", name, SETS)
            read(args.folder, name)  # before the first fold is trained
        jobs = [Job(n, way, r) for r in range(args.repeats) for n in sets for way in WAYS]
        record = Record(args.out.with_suffix(".jsonl"), Result, settings_digest(budget))
        work = partial(run, args.folder, budget)
        for _ in record.complete(jobs, work, processes=args.processes):
            pass
        results = record.kept()
        text = table(results, args.folder)
        settings = "\n".join(f"{name} = {value!r}" for name, value in asdict(budget).items())
        repeats = 1 + max(result.repeat for result in results)
        minutes = sum(result.seconds for result in results) / 60
        page.write(
            f"```bash\npython benchmarks/real_sets.py data/classic-mil\n```\n\n"
            f"```python\n{settings}\n```\n\n"
            f"{repeats} repeats; it took {minutes:.0f} minutes of one core in all.\n\n{text}"
        )
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    print(text)


if __name__ == "__main__":
    main()
