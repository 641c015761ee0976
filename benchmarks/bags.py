"""A hard benchmark: generated bags with five tasks for MIL models.

    python benchmarks/bags.py

Every model is trained on every task, with several bag sizes and seeds, by one recipe. Results are
kept in a JSON lines file next to the page, so a run that was stopped can be resumed.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sklearn.metrics import roc_auc_score

from caprmil import figures
from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.estimator import MILClassifier
from caprmil.figures.style import COLOURS, GREY, new_figure, tidy
from caprmil.synthetic.tasks import TASKS
from caprmil.targets import classification_metrics as metrics
from record import Page, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WIDTH = 64
NYSTROM = {"dim": WIDTH, "heads": 4, "landmarks": 64}
MODELS: dict[str, dict[str, Any]] = {
    "mean": {"dim": WIDTH},
    "abmil": {"dim": WIDTH, "hidden": WIDTH},
    "clam": {"dim": WIDTH, "hidden": WIDTH},
    "dsmil": {"hidden": WIDTH},
    "dtfd": {"dim": WIDTH, "hidden": WIDTH},
    "bayesmil": {"dim": WIDTH, "hidden": WIDTH},
    "sgpmil": {"dims": [WIDTH] * 3, "gp_dim": 32},
    "transmil": NYSTROM,
    "dgrmil": {**NYSTROM, "warmup_epochs": 2},
    "caprmil": {"dim": WIDTH},
    "caprmil+attention": {"dim": WIDTH},
    "caprmil+gated": {"dim": WIDTH},
}
"""All models have the same width, so that they cost about the same."""

ORACLE = "(oracle)"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe for all tasks, sizes and models. The page says how it was chosen."""

    train_bags: int = 240
    test_bags: int = 160
    epochs: int = 8
    batch_size: int = 4
    lr: float = 1e-3
    weight_decay: float = 1e-3
    warmup_epochs: int = 1
    clip: float = 1.0


class Job(NamedTuple):
    """One model on one task, with a bag size and a seed."""

    task: str
    patches: int
    model: str
    seed: int


@dataclass(frozen=True)
class Result:
    """The score of a model on unseen bags."""

    task: str
    patches: int
    model: str
    seed: int
    settings: str  # the digest of recipe, models and tasks
    auc: float
    train_loss: float  # of the last epoch
    seconds: float

    @property
    def job(self) -> Job:
        return Job(self.task, self.patches, self.model, self.seed)


SIZES: dict[int, tuple[str, ...]] = {
    500: tuple(TASKS),
    2_000: ("rare", "co-occurrence"),
    20_000: ("rare",),
}
"""Patches per bag, and the tasks at that size."""

SLOW = ("bayesmil", "sgpmil", "transmil", "dgrmil", "caprmil+attention", "caprmil+gated")
"""Left out for larger bags: together they take several times as long as all the others."""


def plan(
    tasks: Sequence[str], models: Sequence[str], sizes: Sequence[int], seeds: int
) -> list[Job]:
    """Return the jobs, small bags first. Only the smallest have several seeds and all models."""
    smallest = min(SIZES)
    return [
        Job(task, size, model, seed)
        for size in sorted(sizes)
        for seed in range(seeds if size == smallest else 1)
        for task in tasks
        if task in SIZES[size]
        for model in (ORACLE, *models)
        if size == smallest or model not in SLOW
    ]


def fingerprint(recipe: Recipe) -> str:
    """Return a digest of everything that a result depends on, except its job."""
    tasks = {name: asdict(task()) for name, task in TASKS.items()}
    text = json.dumps({"recipe": asdict(recipe), "models": MODELS, "tasks": tasks})
    return sha256(text.encode()).hexdigest()[:12]


def run(recipe: Recipe, job: Job) -> Result:
    """Train a model on bags of a task and score it on others, or score the oracle."""
    start = process_time()
    task = TASKS[job.task](patches=job.patches, seed=job.seed)
    first = 0 if job.model != ORACLE else recipe.train_bags
    bags = [task.bag(number) for number in range(first, recipe.train_bags + recipe.test_bags)]
    features, labels = [bag[0] for bag in bags], np.array([bag[1] for bag in bags])
    train_loss = float("nan")
    if job.model == ORACLE:
        auc = roc_auc_score(labels, [task.oracle(bag) for bag in features])
    else:
        known = recipe.train_bags
        classifier = learner(recipe, job).fit(features[:known], labels[:known])
        train_loss = classifier.history_[-1]["train_loss"]
        auc = metrics.auc(labels[known:], classifier.predict_proba(features[known:]))
    return Result(
        *job,
        settings=fingerprint(recipe),
        auc=round(float(auc), 6),
        train_loss=round(train_loss, 6),
        seconds=round(process_time() - start, 2),
    )


def learner(recipe: Recipe, job: Job) -> MILClassifier:
    return MILClassifier(
        job.model,
        settings=MODELS[job.model],
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        warmup_epochs=recipe.warmup_epochs,
        clip=recipe.clip,
        seed=job.seed,
        device="cpu",
    )


class Cell(NamedTuple):
    """A model on a task at a size: the mean over seeds, and the worst of them."""

    mean: float
    worst: float
    seeds: int


def cells(results: Sequence[Result]) -> dict[tuple[str, str, int], Cell]:
    """Return each cell by model, task and size."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for result in results:
        found.setdefault((result.model, result.task, result.patches), []).append(result.auc)
    return {key: Cell(float(np.mean(a)), min(a), len(a)) for key, a in found.items()}


def table(results: Sequence[Result], models: Sequence[str], size: int) -> str:
    """Return mean and worst seed of each model and task at one size, as a Markdown table."""
    found = cells(results)
    tasks = [task for task in TASKS if (ORACLE, task, size) in found]
    rows = [["", *tasks], ["---", *["--:"] * len(tasks)]]
    for model in (*models, ORACLE):
        row = [found.get((model, task, size)) for task in tasks]
        if any(row):
            rows.append([model, *(show(cell) if cell else "" for cell in row)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def show(cell: Cell) -> str:
    return f"{cell.mean:.2f}" if cell.seeds == 1 else f"{cell.mean:.2f} ({cell.worst:.2f})"


def picture(results: Sequence[Result], models: Sequence[str]) -> "Figure":
    """Return a panel per task: a row per model, a dot per size, a bar to the worst seed."""
    found, names = cells(results), [*models, ORACLE]
    sizes = sorted({result.patches for result in results})
    tasks = [task for task in TASKS if any(task == result.task for result in results)]
    figure = new_figure(1.6 + 2.1 * len(tasks), 1.2 + 0.3 * len(names))
    panels = np.ravel(figure.subplots(1, len(tasks), sharey=True))
    for task, axes in zip(tasks, panels, strict=True):
        tidy(axes, title=task, xlabel="AUC")
        axes.axvline(0.5, color=GREY, lw=1, ls=(0, (4, 4)))
        for number, size in enumerate(sizes):
            for row, model in enumerate(names):
                if cell := found.get((model, task, size)):
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


def report(
    results: Sequence[Result],
    models: Sequence[str],
    *,
    recipe: Recipe,
    command: str,
    image: str,
) -> str:
    """Return the generated part of the page."""
    settings = "\n".join(f"{name} = {value!r}" for name, value in asdict(recipe).items())
    minutes = sum(result.seconds for result in results) / 60
    sizes = sorted({result.patches for result in results})
    counted = cells(results)
    parts = [
        f"### {size:,} patches\n\n{seeds_text(counted, size)}\n\n{table(results, models, size)}"
        for size in sizes
    ]
    return f"""```bash
{command}
```

```python
{settings}
```

It took {minutes:.0f} minutes of one core in all.

![AUC of every model on every task]({image})

{chr(10).join(f"{part}{chr(10)}" for part in parts)}"""


def seeds_text(counted: Mapping[tuple[str, str, int], Cell], size: int) -> str:
    seeds = max(cell.seeds for (_, _, patches), cell in counted.items() if patches == size)
    if seeds == 1:
        return "AUC on unseen bags, one seed."
    return f"AUC on unseen bags: mean over {seeds} seeds, and the worst of them."


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run the jobs, print tables, write the page and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="of the smallest bags")
    parser.add_argument("--out", type=Path, default=Path("docs/bags.md"), help="the page")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    tasks, models, sizes = (text.split(",") for text in (args.tasks, args.models, args.sizes))
    try:
        known_sizes = [str(size) for size in SIZES]
        choices = (("task", tasks, TASKS), ("model", models, MODELS), ("size", sizes, known_sizes))
        for kind, names, known in choices:
            for name in names:
                if name not in known:
                    raise UnknownNameError(kind, name, known)
        page = Page(args.out, "benchmarks/bags.py", "A hard benchmark of bags")
        recipe = Recipe()
        record = Record(args.out.with_suffix(".jsonl"), Result, fingerprint(recipe))
        jobs = plan(tasks, models, [int(size) for size in sizes], args.seeds)
        results = list(record.complete(jobs, partial(run, recipe), processes=args.processes))
        image = args.out.with_suffix(".png")
        figures.save(picture(results, models), image, replace=True)
        command = "python benchmarks/bags.py"
        for option in ("tasks", "models", "sizes", "seeds"):
            if (value := getattr(args, option)) != parser.get_default(option):
                command += f" --{option} {value}"
        page.write(report(results, models, recipe=recipe, command=command, image=image.name))
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    for size in sorted({result.patches for result in results}):
        print(f"\n{size:,} patches\n{table(results, models, size)}")
    print(f"\nWritten to {args.out} and {image}; the results are in {record.path}.")


if __name__ == "__main__":
    main()
