"""Maps on five tasks with known planted patches: how faithful they are, and what they cost.

    python benchmarks/task_maps.py

CAPRMIL is trained on generated bags of each task (`synthetic.tasks`), and positive test bags that
it predicts as positive are explained with every map. Results are kept in a JSON lines file next to
the page, so that an interrupted benchmark can be resumed.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.estimators import MILClassifier
from caprmil.explain import explain, faithfulness
from caprmil.explain.map_kinds import COMPUTED, SAMPLED
from caprmil.features import bags
from caprmil.models import MILModel
from caprmil.synthetic.tasks import OUTLIER, PARTNER, SIGNAL, TASKS
from caprmil.targets import Target, classification_metrics
from record import Page, Record
from task_models import MODELS
from timed_maps import timed_maps

DEFAULT = SAMPLED.name
RANDOM = "random"
MAPS = (*COMPUTED, "evidence", "perturbation", "gradients", "attention", RANDOM)

Map = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe for all tasks and models."""

    train_bags: int = 240
    test_bags: int = 160
    epochs: int = 12
    batch_size: int = 4
    lr: float = 1e-3
    weight_decay: float = 1e-3
    warmup_epochs: int = 1
    clip: float = 1.0

    def learner(self, model: str, seed: int) -> MILClassifier:
        return MILClassifier(
            model,
            settings=MODELS[model],
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            weight_decay=self.weight_decay,
            warmup_epochs=self.warmup_epochs,
            clip=self.clip,
            seed=seed,
            device="cpu",
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The bags, and the recipe of training. The page gives the reasons."""

    patches: int = 500
    explained: int = 12  # positive test bags
    recipe: Recipe = field(default_factory=Recipe)


class Job(NamedTuple):
    """One model on one task, from one seed."""

    task: str
    model: str
    seed: int


@dataclass(frozen=True)
class Result:
    """The score of a model, and of each of its maps."""

    task: str
    model: str
    seed: int
    settings: str  # the digest of plan and models
    auc: float  # over test bags
    explained: int  # positive bags that are predicted as positive
    areas: dict[str, float]  # between the deletion curves, mean over bags
    found: dict[str, float]  # AUC of planted patches, mean over bags
    costs: dict[str, float]  # CPU time as a multiple of a prediction, median over bags

    @property
    def job(self) -> Job:
        return Job(self.task, self.model, self.seed)


def fingerprint(plan: Plan) -> str:
    """Return a digest of everything that a result depends on, except its job."""
    tasks = {name: asdict(task()) for name, task in TASKS.items()}
    text = json.dumps({"plan": asdict(plan), "models": MODELS, "tasks": tasks})
    return sha256(text.encode()).hexdigest()[:12]


def run(plan: Plan, job: Job) -> Result:
    """Train a model, and measure every map on positive test bags."""
    recipe, task = plan.recipe, TASKS[job.task](patches=plan.patches, seed=job.seed)
    made = [task.bag(number) for number in range(recipe.train_bags + recipe.test_bags)]
    features, labels = [bag[0] for bag in made], np.array([bag[1] for bag in made])
    known = recipe.train_bags
    learner = recipe.learner(job.model, job.seed)
    classifier = learner.fit(features[:known], labels[:known])
    answers = classifier.predict_proba(features[known:])
    auc = classification_metrics.auc(labels[known:], answers)
    right = [known + n for n in np.flatnonzero((labels[known:] == 1) & (answers[:, 1] > 0.5))]
    # Of two kinds in every bag, only the more frequent one makes it positive.
    planted = (SIGNAL,) if job.task == "proportion" else (SIGNAL, PARTNER)
    scores = [
        measure(classifier.model_.eval(), features[n], made[n][2], classifier.target_, planted)
        for n in right[: plan.explained]
    ]

    def mean(kind: int, pool: Callable[[list[float]], float]) -> dict[str, float]:
        names = scores[0][kind] if scores else {}
        return {name: round(float(pool([s[kind][name] for s in scores])), 4) for name in names}

    return Result(
        *job,
        settings=fingerprint(plan),
        auc=round(float(auc), 4),
        explained=len(scores),
        areas=mean(0, np.mean),
        found=mean(1, np.mean),
        costs=mean(2, median),
    )


def measure(
    model: MILModel,
    features: NDArray[np.float32],
    kinds: NDArray[np.int8],
    target: Target,
    planted_kinds: Sequence[int],
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return areas, AUCs of planted patches, and costs of every map of one bag."""
    bag = bags.from_arrays(features)
    explanation = explain(model, bag, target=target, slide="bag", first="evidence")
    contrast = explanation.target.contrasts[1]
    point = torch.from_numpy(features)[None]
    maps, costs = timed_maps(model, point, None, contrast)
    curves = faithfulness(model, bag, explanation, of=1, maps=maps).curves
    areas = {name: curves[name].area for name in MAPS if name in curves}
    planted, counted = np.isin(kinds, planted_kinds), kinds != OUTLIER
    found = {name: roc_auc_score(planted[counted], maps[name][counted]) for name in maps}
    return areas, found | {RANDOM: 0.5}, costs


def table(results: Sequence[Result], score: str) -> str:
    """Return mean and worst seed of a score for each map and task, as a Markdown table."""
    tasks = [task for task in TASKS if any(result.task == task for result in results)]
    rows = [["map", "cost", *tasks], ["---", *["--:"] * (len(tasks) + 1)]]
    for name in MAPS:
        costs = [result.costs[name] for result in results if name in result.costs]
        cells = [f"{median(costs):.1f}" if costs else ""]
        for task in tasks:
            values = [
                getattr(result, score)[name]
                for result in results
                if result.task == task and name in getattr(result, score)
            ]
            cells.append(f"{np.mean(values):.2f} ({min(values):.2f})" if values else "")
        if name == DEFAULT:
            cells = [f"**{cell}**" for cell in cells]
        rows.append([f"**{name}**" if name == DEFAULT else name, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def report(results: Sequence[Result], command: str, plan: Plan) -> str:
    """Return the part of the page."""
    parts = [f"```bash\n{command}\n```"]
    for model in dict.fromkeys(result.model for result in results):
        own = [result for result in results if result.model == model]
        seeds = sorted({result.seed for result in own})
        aucs = {
            task: [result.auc for result in own if result.task == task]
            for task in dict.fromkeys(result.task for result in own)
        }
        learnt = "; ".join(f"{t} {np.mean(a):.2f} ({min(a):.2f})" for t, a in aucs.items())
        parts += [
            f"### {model}",
            f"{plan.patches} patches per bag, {plan.recipe.train_bags} training bags, "
            f"{plan.recipe.epochs} epochs, seeds {', '.join(map(str, seeds))}, up to "
            f"{plan.explained} positive test bags per seed. Mean over seeds, in brackets the worst "
            f"seed. AUC over test bags: {learnt}. Cost: CPU time as a multiple of one prediction.",
            "Area between the deletion curves (chance is 0):",
            table(own, "areas"),
            "AUC of planted patches against the others, without outliers (chance is 0.5):",
            table(own, "found"),
        ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument("--models", default="caprmil", help="default: %(default)s")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence.md"), help="the page")
    parser.add_argument("--record", type=Path, default=Path("docs/task-maps.jsonl"))
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    tasks, models, plan = args.tasks.split(","), args.models.split(","), Plan()
    try:
        for kind, names, allowed in (("task", tasks, TASKS), ("model", models, MODELS)):
            for name in names:
                if name not in allowed:
                    raise UnknownNameError(kind, name, allowed)
        page = Page(args.out, "benchmarks/task_maps.py", "Maps on five tasks")
        record = Record(args.record, Result, fingerprint(plan))
        seeds = [int(seed) for seed in args.seeds.split(",")]
        jobs = [Job(task, model, seed) for model in models for seed in seeds for task in tasks]
        made = list(record.complete(jobs, partial(run, plan), processes=args.processes))
        results = sorted(made, key=lambda result: jobs.index(result.job))
        command = "python benchmarks/task_maps.py"
        for option in ("tasks", "models", "seeds"):
            if (value := getattr(args, option)) != parser.get_default(option):
                command += f" --{option} {value}"
        text = report(results, command, plan)
        page.write(text)
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    print(text)


if __name__ == "__main__":
    main()
