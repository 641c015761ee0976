"""An external cohort: read as the run read its own, and answered by the model of each fold."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from caprmil.cohort.cohort import Cohort, load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.covariates import VECTOR, Covariates
from caprmil.cohort.peer_tables import read_cohort_table
from caprmil.cohort.sources import Folders
from caprmil.errors import BagError, RunError, shorten
from caprmil.evaluation.external_scores import mean_over_models
from caprmil.evaluation.patient_answers import combine_slides
from caprmil.evaluation.predictions import Predictions
from caprmil.features.batches import Cache, Sample
from caprmil.io.findings import Findings
from caprmil.io.progress import Step
from caprmil.io.tables import TableLike
from caprmil.models import MILModel
from caprmil.models.device import pick_device
from caprmil.runs.bag_checks import check_bag
from caprmil.runs.inference import predict_each, report_failed
from caprmil.runs.run import Run
from caprmil.runs.slide_covariates import encoded
from caprmil.runs.source_inputs import order_folders


def read_external(
    run: Run,
    table: TableLike,
    features: Folders | None = None,
    *,
    label: str | None = None,
    vectors: str | Path | None = None,
    force: bool = False,
    failed: dict[str, BagError] | None = None,
) -> Cohort:
    """Return a cohort that no model of a run has seen, with bags as the run's own.

    Slides whose bags cannot be read are left out, and added to `failed`, or logged.
    Columns have the names that they have in the run, where the table has them. If the run has
    several sources, `features` is a folder for each.
    """
    folders = order_folders(run.facts, features, run.folder)
    frame = read_cohort_table(table, Findings())
    columns: dict[str, Any] = {
        role: name for role, name in run.columns.items() if name in frame.columns
    }
    if label is not None:
        columns["label"] = label
    read = tuple(name for name in run.covariate_names if name != VECTOR)
    columns |= {"covariates": read or None, "vectors": vectors and str(vectors)}
    if VECTOR in run.covariate_names and vectors is None:
        raise RunError(f"The models of {run.folder} read a vector of each slide: --vectors.")
    unit: dict[str, Any] = {"mixed_patients": True}
    if run.predicts == "patient":
        unit = {"unit": "patient", "combine": run.combine or "bag"}
    settings = CohortConfig(**columns, **unit, scan=False)
    problems: dict[str, BagError] = {}
    options: dict[str, Any] = {"join": run.facts.join or "auto", "unreadable": problems}
    cohort, _ = load_cohort(table, folders, settings, target=run.target, **options)
    report_failed(problems, failed, len(problems) + len(cohort))
    slides = {slide.name: slide.patient for slide in cohort.slides}
    check_unseen(run, slides if cohort.joins else cohort.patients)
    for slide, info in cohort.bags.items():
        check_bag(run, slide, info, force=force)
    return cohort


def check_unseen(run: Run, patients: Mapping[str, str]) -> None:
    """Refuse to score slides or patients that a model was trained or validated on."""
    units = {unit for fold in run.splits for unit in (*fold.train, *fold.validation)}
    seen = {slide for unit in units for slide in run.slides[unit]}
    owners = {run.patients[slide] for slide in seen}
    known = [name for name, patient in patients.items() if name in seen or patient in owners]
    if known:
        raise RunError(
            f"The models of {run.folder} were trained on {len(known)} of these slides, or on "
            f"their patients: {shorten(known)}. Leave them out. For the scores on test slides: "
            f"caprmil evaluate {run.folder}"
        )


def answer_cohort(
    run: Run,
    cohort: Cohort,
    *,
    device: str = "auto",
    progress: Step | None = None,
    failed: dict[str, BagError] | None = None,
) -> Predictions:
    """Return the answers of each fold's model for a cohort, not yet combined by patient.

    Slides without an answer are left out, and added to `failed`, or logged.
    """
    samples = [Sample(e.name, e.path) for e in cohort.entries]
    cache, chosen, problems = Cache(4.0), pick_device(device), dict[str, BagError]()
    by_fold = {}
    for number, fold in enumerate(run.trained_folds(), 1):
        trained = run.trained(fold.name)
        samples = [sample for sample in samples if sample.slide not in problems]
        if cohort.covariates is not None:
            samples = list(_with_covariates(samples, trained.model, cohort.covariates, problems))
        by_fold[fold.name] = predict_each(trained, samples, problems, cache=cache, device=chosen)
        if progress:
            progress(number, len(run.done))
    report_failed(problems, failed, len(cohort))
    kept = [entry for entry in cohort.entries if entry.name not in problems]
    tables = [
        Predictions(
            slides=tuple(entry.name for entry in kept),
            target=run.target,
            answers=np.stack([answers[entry.name] for entry in kept]),
            labels=run.target.as_labels(entry.label for entry in kept),
            patients=tuple(entry.patient for entry in kept),
            folds=(fold,) * len(kept),
            unit=run.unit,
        )
        for fold, answers in by_fold.items()
    ]
    return Predictions.concatenate(tables)


def _with_covariates(
    samples: Sequence[Sample],
    model: MILModel,
    covariates: Covariates,
    problems: dict[str, BagError],
) -> Iterator[Sample]:
    """Yield slides with their covariates as a model reads them. Others are added to `problems`."""
    for sample in samples:
        try:
            numbers = encoded(model, covariates.of(sample.slide))
        except BagError as problem:
            problems[sample.slide] = problem
            continue
        yield sample._replace(covariates=numbers)


def combine_answers(run: Run, answers: Predictions) -> tuple[Predictions, Predictions]:
    """Return the answers of each fold's model by patient, and those of all models together.

    The latter are what a prediction has. Without patients, only the models are averaged.
    """
    learned = run.combinations(dict.fromkeys(answers.folds or ()))
    each = combine_slides(answers, run.combine, learned=learned)
    if run.combine == "learned":  # each model has its own combination
        return each, mean_over_models(each)
    return each, combine_slides(mean_over_models(answers), run.combine)
