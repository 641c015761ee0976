"""Running a protocol: each model in a run of its own, and the table that compares them."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from caprmil.cohort.cohort import find_bags
from caprmil.errors import CohortError, shorten
from caprmil.evaluation import comparison
from caprmil.executors import Executor
from caprmil.experiments import cost, paper
from caprmil.experiments.reproduce.protocols import (
    Protocol,
    Row,
    find_protocol,
    protocol_recipe,
    read_labels,
)
from caprmil.experiments.reproduce.result import Line, Reproduction
from caprmil.io.atomic import write_text
from caprmil.io.paths import as_path, require_local
from caprmil.runs.run import Run
from caprmil.targets.classification_metrics import ace_floor
from caprmil.targets.metric import mean_and_spread
from caprmil.training.cross_validation import complete_all
from caprmil.training.recipe import Recipe


def reproduce(
    name: str,
    labels: str | Path,
    features: str | Path,
    models: Sequence[str],
    out: str | Path,
    *,
    changes: Sequence[str] = (),
    device: str = "auto",
    progress: bool = True,
    executor: Executor | None = None,
) -> Reproduction:
    """Run a protocol for these models, each in a folder of `out`, and compare with the paper.

    What is finished there is not trained again. An executor runs the folds of all models.
    """
    protocol, out, features = find_protocol(name), require_local(out), as_path(features)
    rows = read_labels(name, labels)
    table = out / "cohort.csv"
    recipes = {model: protocol_recipe(name, model, table, features, changes) for model in models}
    for each in recipes.values():
        each.try_model()  # before anything is written or trained
    notes = _check_slides(protocol, rows, features, out, next(iter(recipes.values())))
    _write_cohort(table, rows)
    lines = []
    runs = complete_all(
        {out / model: each for model, each in recipes.items()},
        device=device,
        progress=progress,
        executor=executor,
    )
    for model, run in zip(recipes, runs.values(), strict=True):
        lines += _lines(name, protocol, model, run)
        if run.baselines:
            beside = comparison.compare_with_baselines(model, run.predictions, run.baselines)
            notes += beside.warnings()
    if protocol.remark:
        notes.append(protocol.remark)
    notes.append(
        "diff / std: ours less the paper's, in units of the paper's spread. floor: the ACE that a "
        "perfectly calibrated model with these probabilities would read."
    )
    notes.append(
        "Mean and sample standard deviation over folds or seeds. Each model has its own recipe, "
        "none was searched for on this cohort."
    )
    notes += [f"Changed: {change}." for change in changes]
    result = Reproduction(protocol=protocol, lines=lines, notes=notes)
    result.write(out)
    return result


def _write_cohort(path: Path, rows: Sequence[Row]) -> None:
    text = StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    if path.exists() and path.read_text(encoding="utf-8") != text.getvalue():
        raise CohortError(f"{path} was made from another table. Choose another folder with --out.")
    if not path.exists():
        write_text(path, text.getvalue())


def _check_slides(
    protocol: Protocol, rows: Sequence[Row], features: Path, out: Path, recipe: Recipe
) -> list[str]:
    """Name the slides that have no bag, and say how the cohort differs from the paper's."""
    found = find_bags([features])
    absent = [row["slide"] for row in rows if row["slide"] not in found]
    notes = []
    if absent:
        path = out / "missing.txt"
        write_text(path, "\n".join(absent) + "\n", replace=True)
        text = f"{len(absent)} of {len(rows)} slides have no bag in {features}: {shorten(absent)}."
        if recipe.data.missing != "skip":
            raise CohortError(
                f"{text} All of them are in {path}. Extract their features, or leave them out "
                "with --set data.missing=skip."
            )
        notes.append(f"{text} They were left out.")
    used = len(rows) - len(absent)
    if used != protocol.slides:
        notes.append(f"{used} slides; the paper has {protocol.slides:,}.")
    return notes


def _lines(name: str, protocol: Protocol, model: str, run: Run) -> list[Line]:
    scores = run.predictions.fold_scores()
    parts = run.predictions.labelled().by_fold().values()
    floors = [ace_floor(part.answers)[0] for part in parts]
    parameters = cost.parameters(run.model(run.splits[0].name))
    lines = []
    for metric in protocol.metrics:
        mean, std, _ = mean_and_spread(fold[metric] for fold in scores.values())
        lines.append(
            Line(
                model=model,
                metric=metric,
                parameters=parameters,
                printed=paper.SCORES.get(model, {}).get((name, metric)),
                ours=paper.Figure(mean, std),
                floor=mean_and_spread(floors).mean if metric == "ace" else float("nan"),
            )
        )
    return lines
