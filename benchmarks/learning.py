"""Learning curves: how many updates CAPRMIL and others need, and how often they never learn.

    python benchmarks/learning.py

Every way of training has the same budget of updates on the same bags. Results are kept in a JSON
lines file next to the page, so a run that was stopped can be resumed, and seeds can be added.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from caprmil import figures
from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.figures.style import COLOURS, GREY, new_figure, tidy
from caprmil.models import CAPRMIL, MILModel
from caprmil.synthetic.tasks import TASKS as STANDARD
from caprmil.synthetic.tasks import TISSUE, Task
from caprmil.training.train_config import TrainConfig
from record import Page, Record
from task_models import (
    ALL_FIVE,
    CENTRED,
    DROP,
    MODELS,
    PROBES,
    SHARP,
    TOP,
    TaskBag,
    TaskBags,
    Way,
    test_auc,
    train,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNT = 0.9  # validation AUC from which a model counts as having learnt
INSIDE = 4  # validation bags of each class for `token_statistics`
PARTS = {  # of CAPRMIL, by words in the names of their parameters
    "projection": ("context.project.",),
    "assignment": ("project_x", "cluster", "temperature"),
    "context": ("project_f", "qkv", "project_out"),
    "MLP": (".mlp.",),
    "classifier": ("classify.",),
}
TOKENS = {
    "planted": "planted patches in the token with most of them",
    "entropy": "entropy of the assignments",
    "temperature": "temperature",
}
GRADIENTS = {part: part for part in PARTS}


TASKS: dict[str, Callable[..., Task]] = {
    **STANDARD,
    "rare, strength 5": partial(STANDARD["rare"], strength=5.0),
    "rare, strength 4": partial(STANDARD["rare"], strength=4.0),
}
WAYS: dict[str, Way] = {
    "mean": Way("mean"),
    "abmil": Way("abmil", train={"lr": 5e-3}),
    "abmil, probes": Way("abmil", train={"lr": 5e-3} | PROBES),
    "dsmil": Way("dsmil"),
    "caprmil": Way("caprmil"),
    "caprmil, centred": Way("caprmil", CENTRED),
    "caprmil, top patches": Way("caprmil", train=TOP),
    "caprmil, dropped patches": Way("caprmil", train=DROP),
    "caprmil, low temperature": Way("caprmil", SHARP),
    "caprmil, probes": Way("caprmil", train=PROBES),
    "caprmil, all but probes": Way("caprmil", CENTRED | SHARP, TOP | DROP),
    "caprmil, all five": ALL_FIVE,
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The bags and the updates that every way has."""

    train_bags: int = 240
    validation_bags: int = 60
    test_bags: int = 160
    epochs: int = 30
    batch_size: int = 4
    lr: float = 1e-3
    weight_decay: float = 1e-3
    warmup_epochs: int = 3
    clip: float = 1.0

    @property
    def steps(self) -> int:
        """The updates of an epoch."""
        return -(-self.train_bags // self.batch_size)

    def config(self, way: Way) -> TrainConfig:
        names = ("epochs", "batch_size", "lr", "weight_decay", "warmup_epochs", "clip")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        return TrainConfig(**settings | way.train, patience=self.epochs, weights="last")


LARGE = 20_000  # patches of a large bag
LARGE_BUDGET = {"epochs": 6, "warmup_epochs": 1}  # an update costs ten times as much


def budget_for(patches: int) -> Budget:
    return Budget(**LARGE_BUDGET) if patches >= LARGE else Budget()


class Job(NamedTuple):
    """One way of training on one task, with a bag size and a seed."""

    task: str
    patches: int
    way: str
    seed: int
    digest: str  # of the settings of the way and the task


@dataclass(frozen=True)
class Result:
    """The curve of one training, and the score of its last weights on test bags."""

    task: str
    patches: int
    way: str
    seed: int
    digest: str
    settings: str  # the digest of the budget
    auc: float
    curve: list[float]  # validation AUC after each epoch
    inside: dict[str, list[float]]  # `token_statistics` and `gradient_norms` after each epoch
    seconds: float

    @property
    def job(self) -> Job:
        return Job(self.task, self.patches, self.way, self.seed, self.digest)

    @property
    def learnt_after(self) -> int | None:
        """The epochs until the validation AUC is high, if it ever is."""
        return next((n for n, auc in enumerate(self.curve, 1) if auc >= LEARNT), None)


def digest(*settings: Any) -> str:
    return sha256(json.dumps(settings).encode()).hexdigest()[:12]


def job_digest(task: str, way: str) -> str:
    """Return a digest of what a result depends on, except the budget, the bag size and the seed."""
    return digest(asdict(WAYS[way]), MODELS[WAYS[way].model], asdict(TASKS[task]()))


def run(job: Job) -> Result:
    """Train a model, and score it on other bags."""
    start, way, budget = process_time(), WAYS[job.way], budget_for(job.patches)
    parts = TaskBags.generate(
        TASKS[job.task](patches=job.patches, seed=job.seed),
        budget.train_bags,
        budget.validation_bags,
        budget.test_bags,
    )
    torch.manual_seed(job.seed)
    model = way.create(parts.train[0].features.shape[1])
    some = parts.validation[: 2 * INSIDE]  # every second one is positive
    positive = [bag for bag in some if bag.label]
    inside: dict[str, list[float]] = {}

    def on_epoch() -> None:
        found = gradient_norms(model, some) | token_statistics(model, positive)
        for name, value in found.items():
            inside.setdefault(name, []).append(round(value, 4))

    curve = train(model, parts, budget.config(way), seed=job.seed, on_epoch=on_epoch)
    return Result(
        *job,
        settings=digest(asdict(budget)),
        auc=test_auc(model, parts.test),
        curve=curve,
        inside=inside,
        seconds=round(process_time() - start, 1),
    )


@torch.no_grad()
def token_statistics(model: MILModel, positive: Sequence[TaskBag]) -> dict[str, float]:
    """Return how CAPRMIL assigns patches to tokens: entropy, temperature, and planted patches.

    The entropy is that of the assignment of a patch, as a share of the highest possible. The share
    of planted patches is that in the token with the most of them.
    """
    if model.token_shape is None:
        return {}
    training, found = model.training, []
    for features, _, kinds in positive:
        output = model.eval()(torch.from_numpy(features)[None])
        assigned = output.assignments[0][0].double()  # (H, N, M)
        entropy = -(assigned * assigned.clamp(min=1e-12).log()).sum(dim=-1).mean()
        planted = torch.from_numpy(kinds != TISSUE)
        shares = assigned[:, planted].sum(dim=1) / assigned.sum(dim=1)
        found.append((float(entropy) / np.log(assigned.shape[-1]), float(shares.max())))
    model.train(training)
    entropies, most = zip(*found, strict=True)
    temperature = cast(CAPRMIL, model).context.blocks[0].attend.temperature()
    return {
        "entropy": mean(entropies),
        "planted": mean(most),
        "temperature": float(temperature.mean()),
    }


def gradient_norms(model: MILModel, some: Sequence[TaskBag]) -> dict[str, float]:
    """Return the norm of the gradient of the bag loss by part of CAPRMIL, without an update."""
    if model.token_shape is None:
        return {}
    training, parameters = model.training, dict(model.named_parameters())
    with torch.enable_grad():
        losses = [
            model.loss(model.eval()(torch.from_numpy(bag)[None]), torch.tensor([label]))["bag"]
            for bag, label, _ in some
        ]
        found = torch.autograd.grad(torch.stack(losses).mean(), list(parameters.values()))
    model.train(training)
    gradients = dict(zip(parameters, found, strict=True))
    return {
        part: float(
            sum(g.square().sum() for n, g in gradients.items() if any(w in n for w in words))
        )
        ** 0.5
        for part, words in PARTS.items()
    }


def by_cell(results: Sequence[Result]) -> dict[tuple[str, str, int], list[Result]]:
    """Return the results of each way, task and size."""
    found: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        found.setdefault((result.way, result.task, result.patches), []).append(result)
    return found


def tables(results: Sequence[Result], budget: Budget) -> str:
    """Return, for every bag size, the AUC and the updates until a way has learnt, as tables."""
    cells, parts = by_cell(results), []
    for size in sorted({result.patches for result in results}):
        own = [result for result in results if result.patches == size]
        tasks = [task for task in TASKS if any(result.task == task for result in own)]
        for title, show in (
            ("AUC on test bags: mean over seeds, in brackets the worst seed", score_text),
            (f"Updates until a validation AUC of {LEARNT}: median, and seeds that learnt", learnt),
        ):
            rows = [["", *tasks], ["---", *["--:"] * len(tasks)]]
            for way in WAYS:
                row = [cells.get((way, task, size), []) for task in tasks]
                if any(row):
                    rows.append([way, *(show(cell, budget) if cell else "" for cell in row)])
            lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
            parts.append(f"### {size:,} patches. {title}\n\n{lines}")
    return "\n\n".join(parts)


def inside_table(results: Sequence[Result], titles: Mapping[str, str]) -> str:
    """Return statistics of tokens and gradients after the first and the last epoch, over seeds."""
    numbers = ["--:"] * (1 + len(titles))
    rows = [["", "task", "patches", *titles.values()], ["---", "---", *numbers]]
    for (way, task, size), cell in by_cell(results).items():
        known = [result.inside for result in cell if result.inside.keys() >= titles.keys()]
        if known:
            texts = [
                f"{mean(k[name][0] for k in known):.2f} to {mean(k[name][-1] for k in known):.2f}"
                for name in titles
            ]
            rows.append([way, task, f"{size:,}", *texts])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def score_text(cell: Sequence[Result], _: Budget) -> str:
    return f"{mean(r.auc for r in cell):.2f} ({min(r.auc for r in cell):.2f})"


def learnt(cell: Sequence[Result], budget: Budget) -> str:
    epochs = [result.learnt_after for result in cell]
    known = [count * budget.steps for count in epochs if count is not None]
    updates = f"{median(known):.0f}, " if known else ""
    return f"{updates}{len(known)} of {len(cell)}"


def picture(results: Sequence[Result], budget: Budget, size: int) -> "Figure":
    """Draw the validation AUC by updates: a panel per task, a thin line per seed, a mean."""
    cells = by_cell(results)
    tasks = [t for t in TASKS if any(r.task == t and r.patches == size for r in results)]
    ways = [way for way in WAYS if any((way, task, size) in cells for task in tasks)]
    figure = new_figure(1 + 3.2 * len(tasks), 3.6)
    panels = np.ravel(figure.subplots(1, len(tasks), sharey=True))
    for task, axes in zip(tasks, panels, strict=True):
        tidy(
            axes, title=task, xlabel="updates", ylabel="validation AUC" if task == tasks[0] else ""
        )
        axes.axhline(0.5, color=GREY, lw=1, ls=(0, (4, 4)))
        for number, way in enumerate(ways):
            curves = [result.curve for result in cells.get((way, task, size), [])]
            colour = COLOURS[number % len(COLOURS)]
            for curve in curves:
                updates = budget.steps * np.arange(1, len(curve) + 1)
                axes.plot(updates, curve, color=colour, lw=0.6, alpha=0.35)
            if curves:
                axes.plot(updates, np.mean(curves, axis=0), color=colour, lw=2, label=way)
        axes.set(ylim=(0.35, 1.03))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def report(
    results: Sequence[Result], budget: Budget, command: str, images: Mapping[int, str]
) -> str:
    """Return the generated part of the page."""
    settings = "\n".join(f"{name} = {value!r}" for name, value in asdict(budget).items())
    minutes = sum(result.seconds for result in results) / 60
    seeds = sorted({result.seed for result in results})
    changes = " and ".join(f"{name} = {value}" for name, value in LARGE_BUDGET.items())
    large = f"From {LARGE:,} patches on, {changes}. " if max(images, default=0) >= LARGE else ""
    pictures = "\n\n".join(
        f"![Curves at {size:,} patches]({image})" for size, image in images.items()
    )
    return f"""```bash
{command}
```

```python
{settings}
```

{large}Seeds {", ".join(map(str, seeds))}. It took {minutes:.0f} minutes of one core in all.

{pictures}

{tables(results, budget)}

### Inside CAPRMIL: after the first and after the last epoch

Of {INSIDE} positive validation bags per seed. A share of 1 is a token of planted patches alone; an
entropy of 1 is an assignment to all tokens alike.

{inside_table(results, TOKENS)}

### Gradients of CAPRMIL: after the first and after the last epoch

The norm of the gradient of the bag loss on {2 * INSIDE} validation bags per seed, by part.

{inside_table(results, GRADIENTS)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs, print the tables, write the page and its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    usual = "rare;co-occurrence;distractors;batch-effect"
    parser.add_argument("--tasks", default=usual, help="default: %(default)s")
    parser.add_argument("--ways", default=";".join(WAYS), help="default: %(default)s")
    parser.add_argument("--patches", type=int, default=2000, help="per bag; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--first-seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/learning.md"), help="the page")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    budget = Budget()
    try:
        page = Page(args.out, "benchmarks/learning.py", "How CAPRMIL learns")
        for kind, names, known in (
            ("task", args.tasks.split(";"), TASKS),
            ("way", args.ways.split(";"), WAYS),
        ):
            for name in names:
                if name not in known:
                    raise UnknownNameError(kind, name, known)
        jobs = [
            Job(task, args.patches, way, seed, job_digest(task, way))
            for seed in range(args.first_seed, args.first_seed + args.seeds)
            for task in args.tasks.split(";")
            for way in args.ways.split(";")
        ]
        path = args.out.with_suffix(".jsonl")
        record = Record(path, Result, digest(asdict(budget_for(args.patches))))
        for _ in record.complete(jobs, run, processes=args.processes):
            pass
        # The page has the results of all sizes and seeds so far.
        kept = [
            result
            for size in (0, LARGE)
            for result in Record(path, Result, digest(asdict(budget_for(size)))).kept()
            if budget_for(result.patches) == budget_for(size)
        ]
        results = in_order(kept)
        images = {}
        for size in sorted({result.patches for result in results}):
            image = args.out.with_name(f"{args.out.stem}-{size}.png")
            figures.save(picture(results, budget, size), image, replace=True)
            images[size] = image.name
        page.write(report(results, budget, "python benchmarks/learning.py", images))
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    print(tables(results, budget))
    print(f"\nWritten to {args.out}; the results are in {record.path}.")


def in_order(found: Sequence[Result]) -> list[Result]:
    """Return the results of the present ways and tasks, each once."""
    ways = list(WAYS)
    present = {
        result.job: result
        for result in found
        if result.way in WAYS and result.digest == job_digest(result.task, result.way)
    }
    return sorted(present.values(), key=lambda r: (r.patches, ways.index(r.way), r.task, r.seed))


if __name__ == "__main__":
    main()
