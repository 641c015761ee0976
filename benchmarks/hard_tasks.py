"""A hard benchmark: generated bags with five tasks for MIL models.

    python benchmarks/hard_tasks.py

Every model is trained until its validation AUC stops improving, with a learning rate of its own,
chosen on seeds that the tables do not have. Results are kept in a JSON lines file next to the page,
so a run that was stopped can be resumed, and sizes and seeds can be added.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from caprmil import figures
from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.figures.style import COLOURS, GREY, new_figure, tidy
from caprmil.synthetic.tasks import TASKS
from caprmil.training.train_config import TrainConfig
from record import Page, Record
from task_models import ALL_FIVE, MODELS, StopRule, TaskBags, Way, test_auc, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WAYS: dict[str, Way] = {**{name: Way(name) for name in MODELS}, "caprmil, rare.toml": ALL_FIVE}
ORACLE = "(oracle)"
RATES = (3e-4, 1e-3, 3e-3)  # the learning rates that are tried
TUNING_SEEDS = (100,)
TUNING_TASKS = ("rare", "distractors", "batch-effect")
SIZES = (500, 2_000, 20_000)  # patches per bag
SMALLEST, LARGE = SIZES[0], SIZES[-1]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The bags, and the updates that a model has at most. The page gives the reasons."""

    train_bags: int = 240
    validation_bags: int = 60
    test_bags: int = 160
    epochs: int = 60
    patience: int = 15
    batch_size: int = 4
    weight_decay: float = 1e-3
    warmup_epochs: int = 2
    clip: float = 1.0

    @property
    def steps(self) -> int:
        """The updates of an epoch."""
        return -(-self.train_bags // self.batch_size)

    def config(self, way: Way, lr: float) -> TrainConfig:
        names = ("epochs", "batch_size", "weight_decay", "warmup_epochs", "clip")
        settings = {name: getattr(self, name) for name in names}
        return TrainConfig(
            **settings | way.train, lr=lr, patience=self.epochs, min_delta=0.0, weights="last"
        )


LARGE_BUDGET = {"epochs": 20, "patience": 6}  # an update costs ten times as much


def budget_for(patches: int) -> Budget:
    return Budget(**LARGE_BUDGET) if patches >= LARGE else Budget()


class Job(NamedTuple):
    """One model on one task, with a bag size, a seed and a learning rate."""

    task: str
    patches: int
    way: str
    seed: int
    lr: float
    digest: str  # of the settings of the way, the task and the budget


@dataclass(frozen=True)
class Result:
    """The score of a model on unseen bags."""

    task: str
    patches: int
    way: str
    seed: int
    lr: float
    digest: str
    settings: str  # part of `digest`, the same for all results
    auc: float  # of the epoch with the best validation AUC
    validation: float  # that AUC
    updates: int  # until the training ended
    seconds: float

    @property
    def job(self) -> Job:
        return Job(self.task, self.patches, self.way, self.seed, self.lr, self.digest)


def make_job(task: str, patches: int, way: str, seed: int, lr: float = 0.0) -> Job:
    own = WAYS.get(way)  # the oracle has none
    settings = (
        asdict(own) if own else {},
        MODELS[own.model] if own else {},
        asdict(TASKS[task]()),
        asdict(budget_for(patches)),
    )
    digest = sha256(json.dumps(settings).encode()).hexdigest()[:12]
    return Job(task, patches, way, seed, lr, digest)


def run(job: Job) -> Result:
    """Train a model on bags of a task and score it on others, or score the oracle."""
    start, budget = process_time(), budget_for(job.patches)
    task = TASKS[job.task](patches=job.patches, seed=job.seed)
    counts = (budget.train_bags, budget.validation_bags, budget.test_bags)
    curve: list[float] = []
    if job.way == ORACLE:
        test = [task.bag(number) for number in range(counts[0] + counts[1], sum(counts))]
        scores = [task.oracle(features) for features, _, _ in test]
        auc = round(float(roc_auc_score([label for _, label, _ in test], scores)), 4)
    else:
        parts, way = TaskBags.generate(task, *counts), WAYS[job.way]
        torch.manual_seed(job.seed)
        model = way.create(parts.train[0].features.shape[1])
        stop = StopRule(patience=budget.patience)
        curve = train(model, parts, budget.config(way, job.lr), seed=job.seed, stop=stop)
        auc = test_auc(model, parts.test)
    return Result(
        *job,
        settings="",
        auc=auc,
        validation=max(curve, default=auc),
        updates=len(curve) * budget.steps,
        seconds=round(process_time() - start, 1),
    )


def tuning_jobs(ways: Sequence[str]) -> list[Job]:
    """Return the trainings from which learning rates are chosen, on the smallest bags."""
    return [
        make_job(task, SMALLEST, way, seed, lr)
        for seed in TUNING_SEEDS
        for task in TUNING_TASKS
        for way in ways
        for lr in RATES
    ]


def chosen_rates(tuned: Sequence[Result]) -> dict[str, float]:
    """Return the rate with the highest mean validation AUC of each model; if equal, the fastest."""
    rates = {}
    for way in dict.fromkeys(result.way for result in tuned):
        own = [result for result in tuned if result.way == way]
        rates[way] = max(
            dict.fromkeys(result.lr for result in own),
            key=lambda lr: (
                round(mean(r.validation for r in own if r.lr == lr), 2),
                -mean(r.updates for r in own if r.lr == lr),
            ),
        )
    return rates


def plan(
    tasks: Sequence[str],
    rates: Mapping[str, float],
    sizes: Sequence[int],
    seeds: Sequence[int],
) -> list[Job]:
    """Return the jobs, small bags first, and one seed of all models before the next."""
    return [
        make_job(task, size, way, seed, rates.get(way, 0.0))
        for size in sorted(sizes)
        for seed in seeds
        for task in tasks
        for way in (ORACLE, *rates)
    ]


class Cell(NamedTuple):
    """A model on a task at a size: the mean over seeds, the worst of them, and the updates."""

    mean: float
    worst: float
    seeds: int
    updates: int  # median

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.worst:.2f})"


def cells(results: Sequence[Result]) -> dict[tuple[str, str, int], Cell]:
    """Return each cell by model, task and size."""
    found: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        found.setdefault((result.way, result.task, result.patches), []).append(result)
    return {
        key: Cell(
            mean(r.auc for r in own),
            min(r.auc for r in own),
            len(own),
            round(median(r.updates for r in own)),
        )
        for key, own in found.items()
    }


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is the header, and whose first column is text."""
    marks = ["---", *["--:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], marks, *rows[1:]))


def table(found: Mapping[tuple[str, str, int], Cell], size: int, *, updates: bool = False) -> str:
    """Return AUC, or updates and seeds, of each model and task at one size."""
    tasks = [task for task in TASKS if (ORACLE, task, size) in found]
    rows = [["", *tasks]]
    for way in WAYS if updates else (*WAYS, ORACLE):
        row = [found.get((way, task, size)) for task in tasks]
        if any(row):
            texts = [
                "" if cell is None else f"{cell.updates:,} ({cell.seeds})" if updates else str(cell)
                for cell in row
            ]
            rows.append([way, *texts])
    return markdown(rows)


def rates_table(tuned: Sequence[Result]) -> str:
    """Return the mean validation AUC of each learning rate; the chosen one is bold."""
    chosen = chosen_rates(tuned)
    rows = [["", *(f"{lr:g}" for lr in RATES)]]
    for way, best in chosen.items():
        aucs = [mean(r.validation for r in tuned if (r.way, r.lr) == (way, lr)) for lr in RATES]
        texts = [
            f"**{auc:.2f}**" if lr == best else f"{auc:.2f}"
            for lr, auc in zip(RATES, aucs, strict=True)
        ]
        rows.append([way, *texts])
    return markdown(rows)


def picture(results: Sequence[Result]) -> "Figure":
    """Return a panel per task: a row per model, a dot per size, a bar to the worst seed."""
    found = cells(results)
    names = [way for way in (*WAYS, ORACLE) if any(way == result.way for result in results)]
    sizes = sorted({result.patches for result in results})
    tasks = [task for task in TASKS if any(task == result.task for result in results)]
    figure = new_figure(1.6 + 2.1 * len(tasks), 1.2 + 0.3 * len(names))
    panels = np.ravel(figure.subplots(1, len(tasks), sharey=True))
    for task, axes in zip(tasks, panels, strict=True):
        tidy(axes, title=task, xlabel="AUC")
        axes.axvline(0.5, color=GREY, lw=1, ls=(0, (4, 4)))
        for number, size in enumerate(sizes):
            for row, way in enumerate(names):
                if cell := found.get((way, task, size)):
                    up = row + 0.24 * (number - (len(sizes) - 1) / 2)
                    colour = COLOURS[number]
                    axes.plot([cell.worst, cell.mean], [up, up], color=colour, lw=1.4, alpha=0.5)
                    axes.plot(cell.mean, up, "o", color=colour, ms=5, mec="white", mew=0.5)
        axes.set(xlim=(0.35, 1.04), ylim=(len(names) - 0.4, -0.6))
        axes.set_yticks(range(len(names)), labels=names)
    figure.legend(
        [mark(colour) for colour in COLOURS[: len(sizes)]],
        [f"{size:,} patches" for size in sizes],
        loc="outside lower center",
        ncols=len(sizes),
        frameon=False,
    )
    return figure


def mark(colour: str) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, marker="o", ls="", ms=6)


def report(results: Sequence[Result], tuned: Sequence[Result], image: str) -> str:
    """Return the generated part of the page."""
    settings = "\n".join(f"{name} = {value!r}" for name, value in asdict(Budget()).items())
    changes = " and ".join(f"{name} = {value}" for name, value in LARGE_BUDGET.items())
    hours = sum(result.seconds for result in (*results, *tuned)) / 3600
    found, parts = cells(results), []
    for size in sorted({result.patches for result in results}):
        parts += [
            f"### {size:,} patches\n\nAUC on unseen bags: mean over seeds, and the worst of them.",
            table(found, size),
            "Updates until the training ended, median over seeds, and the number of seeds.",
            table(found, size, updates=True),
        ]
    tuning = ", ".join(map(str, TUNING_SEEDS))
    return f"""```bash
python benchmarks/hard_tasks.py
```

```python
{settings}
```

From {LARGE:,} patches on, {changes}. It took {hours:.1f} hours of one core in all.

![AUC of every model on every task]({image})

{chr(10).join(f"{part}{chr(10)}" for part in parts)}
### Learning rates

Mean validation AUC at {SMALLEST} patches on {", ".join(TUNING_TASKS)}, seed {tuning}. The bold one
is used above: the highest, rounded to two digits, and of equal ones that with the fewest updates.

{rates_table(tuned)}
"""


def present(record: Record[Result]) -> list[Result]:
    """Return the results of the present ways, tasks and budgets, each once."""
    known = {
        result.job: result
        for result in record.kept()
        if (result.way in WAYS or result.way == ORACLE)
        and result.task in TASKS
        and result.job == make_job(*result.job[:5])
    }
    return list(known.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run the jobs, print tables, write the page and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument("--ways", default=";".join(WAYS), help="default: %(default)s")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/hard-tasks.md"), help="the page")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    tasks, ways, sizes = args.tasks.split(","), args.ways.split(";"), args.sizes.split(",")
    try:
        known_sizes = [str(size) for size in SIZES]
        choices = (("task", tasks, TASKS), ("way", ways, WAYS), ("size", sizes, known_sizes))
        for kind, names, known in choices:
            for name in names:
                if name not in known:
                    raise UnknownNameError(kind, name, known)
        page = Page(args.out, "benchmarks/hard_tasks.py", "A hard benchmark of bags")
        record = Record(args.out.with_suffix(".jsonl"), Result, "")
        tuned = list(record.complete(tuning_jobs(ways), run, processes=args.processes))
        jobs = plan(tasks, chosen_rates(tuned), [int(size) for size in sizes], range(args.seeds))
        for _ in record.complete(jobs, run, processes=args.processes):
            pass
        # The page has all results so far, of other models and sizes too.
        results = present(record)
        tuned = [result for result in results if result.seed in TUNING_SEEDS]
        rates = chosen_rates(tuned)
        results = [
            result
            for result in results
            if result.seed not in TUNING_SEEDS and result.lr == rates.get(result.way, 0.0)
        ]
        image = args.out.with_suffix(".png")
        figures.save(picture(results), image, replace=True)
        page.write(report(results, tuned, image.name))
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    found = cells(results)
    for size in sorted({result.patches for result in results}):
        print(f"\n{size:,} patches\n{table(found, size)}")
    print(f"\nWritten to {args.out} and {image}; the results are in {record.path}.")


if __name__ == "__main__":
    main()
