"""Scoring: the folds of a run become predictions, baselines, calibration, figures and scores."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil import figures
from caprmil.cohort.cohort import Cohort
from caprmil.evaluation import calibration, score_summary
from caprmil.evaluation.baselines import find_sites, mean_features, predict_baselines
from caprmil.evaluation.comparison import compare_with_baselines
from caprmil.evaluation.differences import Comparison
from caprmil.evaluation.learned_combination import describe_combinations
from caprmil.evaluation.predictions import Predictions
from caprmil.executors import job_status
from caprmil.features.description import describe_features
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.io.progress import bar
from caprmil.runs.conformal_sets import score_guarantees
from caprmil.runs.facts import SourceFacts, read_fold_facts
from caprmil.runs.history import HISTORY, read_history
from caprmil.runs.modalities import TITLE, compare_modalities, read_beside
from caprmil.runs.remote import MEAN
from caprmil.runs.run import BASELINES, MEAN_OF_SLIDES, PREDICTIONS, Run, reliability_file
from caprmil.runs.scores import CALIBRATION, SCORES

_log = logging.getLogger("caprmil")


def score_run(run: Run, cohort: Cohort, *, progress: bool = True) -> None:
    """Score a run whose folds are all trained. The scores are written last: they finish the run."""
    folders = {fold.name: run.fold_folder(fold.name) for fold in run.splits}
    tables = {name: run.read_predictions(path / "test.csv") for name, path in folders.items()}
    everything = Predictions.concatenate(list(tables.values()))
    _write_again(everything, run.folder / PREDICTIONS)
    _draw(run, folders, tables)
    summary = score_summary.summary(everything)
    with bar("Reading bags for baselines", shown=progress) as step:
        means = mean_features(cohort, step)
    compared, remarks = _compare_with_baselines(run, cohort, everything, means)
    facts = run.facts
    features = "\n\n".join(
        (f"{each.name}. " if isinstance(each, SourceFacts) else "")
        + describe_features(each.encoder, each.in_dim, each.mpp, each.patch_px)
        for each in facts.sources or (facts,)
    )
    sections = {
        "": f"{features}\n\n{summary.as_markdown()}",
        "## Comparison with baselines\n\n": f"{remarks}\n\n{compared.as_markdown()}",
    }
    scores: dict[str, Any] = summary.as_dict() | {"baselines": compared.as_dict()}
    if combinations := run.combinations(folders):
        sections["## Combination of slides\n\n"] = describe_combinations(combinations)
    if modalities := compare_modalities(run, everything):
        scores["modalities"], sections[TITLE] = modalities[0].as_dict(), modalities[1]
    if run.target.calibrates:
        calibrated = calibration.calibrate_each(everything, run.validation)
        scores["calibration"] = calibration.as_file(calibrated)
        write_text(run.folder / CALIBRATION, as_json(scores["calibration"]), replace=True)
        for name, own in calibrated.items():
            if (drawn := own.draw()) is not None:
                figures.save(drawn, run.folder / reliability_file(name), replace=True)
            title = f"## Calibration of {name}\n\n" if name else "## Calibration\n\n"
            sections[title] = own.as_markdown()
    for name, measured in score_guarantees(run, means, find_sites(cohort).of).items():
        if measured.rows:
            title = f"## Prediction sets of {name}" if name else "## Prediction sets"
            sections[f"{title}\n\n"] = measured.as_markdown()
    text = "\n".join(title + section for title, section in sections.items())
    write_text(run.folder / "scores.md", text, replace=True)
    with suppress(OSError):
        (run.folder / job_status.FOLDER).rmdir()  # empty: no task is running
    write_text(run.folder / SCORES, as_json(scores))


def _write_again(table: Predictions, path: Path) -> None:
    """Write a table of a run without scores, which is unfinished: an earlier one is replaced."""
    path.unlink(missing_ok=True)
    table.write(path)


def _draw(run: Run, folders: Mapping[str, Path], tables: Mapping[str, Predictions]) -> None:
    histories = {name: read_history(folder / HISTORY) for name, folder in folders.items()}
    kept = {name: read_fold_facts(folder).kept_epoch for name, folder in folders.items()}
    curves = figures.learning_curves(
        histories, kept=kept, metric=run.target.headline, title=run.target.headline_metric.title
    )
    figures.save(curves, run.folder / "curves.png", replace=True)
    truth = {name: table.scored().truth for name, table in tables.items()}
    for name, figure in run.target.figures(truth).items():
        figures.save(figure, run.folder / name, replace=True)


def _compare_with_baselines(
    run: Run, cohort: Cohort, answers: Predictions, means: Mapping[str, NDArray[np.float32]]
) -> tuple[Comparison, str]:
    """Predict the same slides without a model, and list the baselines that it does not beat."""
    found = predict_baselines(cohort, run.splits, means=means) | _mean_model(run)
    if run.combine == "learned":
        found["mean of slides"] = _mean_of_slides(run)
    for name, table in found.items():
        _write_again(table, run.folder / BASELINES / f"{name.replace(' ', '_')}.csv")
    compared = compare_with_baselines("The model", answers, found)
    remarks = list(compared.warnings()) or ["The model beats every baseline."]
    return compared, "\n\n".join([*remarks, find_sites(cohort).remark])


def _mean_of_slides(run: Run) -> Predictions:
    """Return the predictions of the same models with the mean of the slides' answers."""
    paths = [run.fold_folder(fold.name) / MEAN_OF_SLIDES for fold in run.splits]
    return Predictions.concatenate([run.read_predictions(path) for path in paths])


def _mean_model(run: Run) -> dict[str, Predictions]:
    """Return the predictions of the Mean that was trained on the same folds, if it was."""
    table = read_beside(run, MEAN)
    return {} if table is None else {"mean model": table}
