"""The demo: a generated cohort, three models, and the paper's story told in numbers.

Plain averaging drowns a rare signal; with context before the average it is found, as by attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caprmil import config, cost, figures
from caprmil.errors import RunError
from caprmil.progress import bar
from caprmil.runs import Run
from caprmil.synthetic import RareSignal
from caprmil.training import Recipe, cross_validate

MODELS = {"Mean": "mean", "ABMIL": "abmil", "CAPRMIL + Mean": "caprmil"}
COHORT = RareSignal()
# The paper's recipe, shortened: fewer epochs at a higher rate, so that it ends in minutes.
SETTINGS = {
    "splits": {"folds": 3, "validation": 0.15},
    "train": {"epochs": 12, "warmup_epochs": 2, "lr": 5e-4},
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a model did in the demo."""

    name: str
    parameters: int
    run: Run

    def folds(self, metric: str) -> list[float]:
        return [fold[metric] for fold in self.run.scores["folds"].values()]


def demo(out: str | Path, *, device: str = "auto", progress: bool = True) -> list[Result]:
    """Generate the cohort, cross-validate each model on it, and draw their scores.

    What an earlier demo in the same folder has finished is not done again.
    """
    out = Path(out)
    with bar("Generating slides", shown=progress) as step:
        table = COHORT.write(out / "cohort", progress=step)
    results = []
    for title, name in MODELS.items():
        recipe = config.parse(
            {
                "cohort": str(table),
                "features": str(table.parent / "features"),
                "model": {"name": name},
                **SETTINGS,
            },
            into=Recipe,
        )
        run = _run(recipe, out / name, device=device, progress=progress)
        size = cost.parameters(run.model(run.splits[0].name))
        results.append(Result(name=title, parameters=size, run=run))
    if not (out / "demo.png").exists():
        draw(results, out / "demo.png")
    return results


def _run(recipe: Recipe, out: Path, *, device: str, progress: bool) -> Run:
    try:
        run = Run(out)
    except RunError:
        run = None
    if run is not None and run.finished and run.facts.digest == config.digest(recipe):
        return run
    return cross_validate(recipe, out, device=device, progress=progress)


def draw(results: Sequence[Result], path: Path) -> None:
    scores = {r.name: {metric: r.folds(metric) for metric in ("auc", "ace")} for r in results}
    figures.save(figures.model_bars(scores), path)
