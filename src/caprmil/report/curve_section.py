"""The section of curves in a run report: figures of the test slides, and learning curves."""

from typing import Any

from markupsafe import Markup

from caprmil import figures
from caprmil.figures.learning_curves import RATE, panels_of
from caprmil.report.html_page import render
from caprmil.report.report_inputs import RunInputs
from caprmil.runs.facts import read_fold_facts
from caprmil.runs.history import HISTORY, read_history
from caprmil.runs.remote import FOLD
from caprmil.runs.run import Run


def curve_section(inputs: RunInputs) -> Markup:
    """Return the figures of the test slides, and the learning curves."""
    return render(
        "curves.html",
        figures=inputs.parts.figures(inputs.run.predictions),
        learning=learning_curves(inputs.run),
    )


def learning_curves(run: Run) -> list[Markup]:
    """Return losses and validation metric over epochs, by fold. A figure has its own title."""
    histories, kept = read_histories(run)
    columns = {name for history in histories.values() for name in history}
    drawn = []
    metric = run.target.headline_metric
    for title, curves in panels_of(metric.name, metric.title).items():
        if title != RATE and columns & {curve.column for curve in curves}:
            figure = figures.learning_curves(
                histories, metric=metric.name, title=metric.title, kept=kept, panels=(title,)
            )
            drawn.append(Markup(figures.as_svg(figure, alt=f"{title} over epochs, by fold")))
    return drawn or [Markup('<p class="quiet">There is no training history.</p>')]


def read_histories(run: Run) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Return the training history of each fold, and the epoch whose weights were kept."""
    histories, kept = {}, {}
    for fold in run.done:
        folder = run.fold_folder(fold.name)
        if (folder / HISTORY).exists():
            histories[fold.name] = read_history(folder / HISTORY)
        if (folder / FOLD).exists():
            kept[fold.name] = read_fold_facts(folder).kept_epoch
    return histories, kept
