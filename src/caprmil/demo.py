"""The demo: generated slides, features, three models, predictions of new slides, and reports.

The signal is rare. A plain mean loses it; attention finds it, and so does a mean after context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caprmil import config, encoders, explain, figures, report
from caprmil.evaluation.predictions import Predictions
from caprmil.experiments import cost
from caprmil.features.extract import Extraction
from caprmil.features.settings import configure
from caprmil.io.leftovers import clear_leftovers
from caprmil.io.paths import require_local
from caprmil.io.progress import bar
from caprmil.models.device import pick_device
from caprmil.runs.input_bags import bags_of
from caprmil.runs.run import Run
from caprmil.slides.slide import find_slides
from caprmil.synthetic import SlideCohort
from caprmil.training.cross_validation import complete
from caprmil.training.recipe import Recipe

MODELS = {"Mean": "mean", "ABMIL": "abmil", "CAPRMIL + Mean": "caprmil"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of the demo. The recipe is the paper's, shortened to end in minutes."""

    cohort: SlideCohort
    epochs: int
    lr: float

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "splits": {"folds": 3, "validation": 0.2},
            "train": {"epochs": self.epochs, "warmup_epochs": self.epochs // 8, "lr": self.lr},
        }


SHORT = Plan(
    cohort=SlideCohort(slides=42, width=2240, height=1792, tumour=0.06), epochs=20, lr=1e-3
)
FULL = Plan(cohort=SlideCohort(slides=60, tumour=0.04), epochs=20, lr=5e-4)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The run of a model in the demo."""

    name: str
    parameters: int
    run: Run

    def folds(self, metric: str) -> list[float]:
        return [fold[metric] for fold in self.run.scores["folds"].values()]


def demo(
    out: str | Path, *, plan: Plan = SHORT, device: str = "auto", progress: bool = True
) -> tuple[list[Result], Predictions, list[Path]]:
    """Generate and encode slides, cross-validate each model, and predict new slides with CAPRMIL.

    Returns the results of the models, the predictions of the new slides, and the paths of two
    reports: of the run, and of a new slide. An interrupted demo in the same folder is resumed;
    reports are written again.
    """
    out = require_local(out)
    clear_leftovers(out)
    with bar("Generating slides", shown=progress) as step:
        table = plan.cohort.write(out / "cohort", progress=step)
    features = out / "features"
    encoder = encoders.load(encoders.DEFAULT, device=pick_device(device))
    with bar("Encoding", shown=progress, eta=False) as step:
        job = Extraction(out=features, encoder=encoder, config=configure(encoder.card))
        job.run(find_slides([table.parent / "slides"]), progress=step)
    results = []
    for title, name in MODELS.items():
        files = {"cohort": str(table), "features": str(features), "model": {"name": name}}
        recipe = config.parse({**files, **plan.settings}, into=Recipe)
        run = complete(recipe, out / name, device=device, progress=progress)
        size = cost.parameters(run.model(run.splits[0].name))
        results.append(Result(name=title, parameters=size, run=run))
    if not (out / "demo.png").exists():
        draw(results, out / "demo.png")
    run, new = results[-1].run, out / "new"
    answers = _predict_new(plan, run, new, device=device)
    with bar("Reporting", shown=progress) as step:
        page, _, _ = report.write_run_report(run, device=device, progress=step)
    return results, answers, [page, _report_new(run, new, device=device)]


def _predict_new(plan: Plan, run: Run, folder: Path, *, device: str) -> Predictions:
    """Predict two new slides from their pixels, one of them with tumour."""
    slides = []
    for number, name in enumerate(("new_normal", "new_tumour")):
        slides.append(folder / f"{name}.tiff")
        if not slides[-1].exists():
            plan.cohort.section(plan.cohort.slides + number).write(slides[-1])
    found, _ = bags_of(run, slides, folder / "features", device=device)
    return run.predict(found, device=device)


def _report_new(run: Run, folder: Path, *, device: str) -> Path:
    """Write the report of the new slide with tumour, and return its path."""
    bag, slide = folder / "features" / "new_tumour.h5", folder / "new_tumour.tiff"
    case = explain.explain_slide(run, explain.locate_slide(run, bag, pixels=slide), device=device)
    (path,) = report.report_paths(run, [case.name], None).values()
    return report.write_slide_report(run, case, path, replace=True)


def draw(results: Sequence[Result], path: Path) -> None:
    target = results[0].run.target
    metrics = [target.metric(name) for name in (target.headline, target.second)]
    scores = {r.name: {metric.name: r.folds(metric.name) for metric in metrics} for r in results}
    figures.save(figures.model_bars(scores, metrics=metrics), path)
