"""The predictions of a run for bags, known or new."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from caprmil.cohort.folds import Fold
from caprmil.errors import BagError
from caprmil.evaluation.patient_answers import combine_folds, combine_slides, mean_of_folds
from caprmil.evaluation.predictions import Predictions
from caprmil.features.bag_files import BagFiles, SlideBags
from caprmil.io.progress import Step
from caprmil.models.device import pick_device
from caprmil.runs import conformal_sets
from caprmil.runs.bag_checks import check_bags
from caprmil.runs.inference import predict_file, report_failed
from caprmil.runs.run import Run
from caprmil.runs.slide_covariates import check_known

SAW = " (all saw it in training)"


def predict_bags(
    run: Run,
    paths: Mapping[str, BagFiles],
    *,
    patients: Mapping[str, str],
    fold: str | None,
    force: bool,
    device: str,
    coverage: float | None,
    progress: Step | None,
    failed: dict[str, BagError] | None,
) -> Predictions:
    """Return the predictions of bags. For the arguments see `Run.predict`."""
    chosen = run.trained_folds(fold)
    check_bags(run, paths, force=force)
    if names := list(run.covariate_names):
        check_known(names, list(paths), run.covariates, run.unit)
    torch_device = pick_device(device)
    trained = {each.name: run.trained(each.name) for each in chosen}
    for each in trained.values():
        each.model.to(torch_device)
    rows: dict[str, NDArray[np.float64]] = {}
    by_fold: dict[str, dict[str, NDArray[np.float64]]] = {}
    extra: dict[str, list[str]] = {"models": [], "spread": []}
    problems: dict[str, BagError] = {}
    for number, (slide, path) in enumerate(paths.items(), 1):
        unseen = [each.name for each in chosen if not _saw(run, each, slide, path)]
        names = unseen or list(trained)
        try:
            models = [trained[name] for name in names]
            own = [m._replace(model=run.for_slide(m.model, slide)) for m in models]
            answers = predict_file(own, path, torch_device)
        except BagError as problem:
            problems[slide] = problem
            continue
        rows[slide] = answers.mean(axis=0)
        by_fold[slide] = dict(zip(names, answers, strict=True))
        spread = run.target.disagreement(answers) if len(names) > 1 else None
        extra["models"].append(f"{len(names)}{'' if unseen else SAW}")
        extra["spread"].append("" if spread is None else f"{spread:.4f}")
        if progress:
            progress(number, len(paths))
    report_failed(problems, failed, len(paths))
    owners = {slide: slide for slide in rows} | dict(patients)
    columns = {name: tuple(cells) for name, cells in extra.items()}
    shares = dict[str, str]()
    if run.novelty is not None:
        unlike = conformal_sets.novelty_column(run, {slide: paths[slide] for slide in rows})
        columns[conformal_sets.UNLIKE_COLUMN] = unlike
        shares = dict(zip(rows, unlike, strict=True))
    sets = dict[str, tuple[str, ...]]()
    if run.combine is not None and (run.combine == "learned" or coverage is not None):
        learned = run.combinations({name: None for own in by_fold.values() for name in own})
        of_patients = combine_folds(by_fold, owners, run.target, run.combine, learned)
        if coverage is not None:
            sets |= conformal_sets.set_columns(run, of_patients, coverage)
        cells = zip(rows, extra["models"], strict=True)
        seen = {owners[slide] for slide, cell in cells if SAW in cell}
        sets["models"] = tuple(
            f"{len(own)}{SAW if name in seen else ''}" for name, own in of_patients.items()
        )
        if run.combine == "learned":
            found = mean_of_folds(of_patients, run.target)
            return _with_highest(replace(found, extra=sets), shares, owners)
    elif coverage is not None:
        columns |= conformal_sets.set_columns(run, by_fold, coverage)
    found = Predictions(
        slides=tuple(rows),
        target=run.target,
        answers=np.stack(list(rows.values())),
        extra=columns,
        unit=run.unit,
    )
    if run.combine is None:
        return found
    combined = combine_slides(found, run.combine, owners)
    return _with_highest(replace(combined, extra=sets), shares, owners)


def _with_highest(
    table: Predictions, shares: Mapping[str, str], owners: Mapping[str, str]
) -> Predictions:
    """Return a table of patients with the highest share that is unlike training of their slides."""
    if not shares:
        return table
    highest = dict.fromkeys(table.slides, "")
    for slide, share in shares.items():  # numbers of equal length, or empty: compared as text
        highest[owners[slide]] = max(highest[owners[slide]], share)
    extra = {**table.extra, conformal_sets.UNLIKE_COLUMN: tuple(highest.values())}
    return replace(table, extra=extra)


def _saw(run: Run, fold: Fold, name: str, files: BagFiles) -> bool:
    """Return whether the model of a fold knows a bag, or one of the slides in it."""
    parts = files.slides if isinstance(files, SlideBags) else ()
    return any(fold.saw(run.unit_of(each)) for each in (name, *parts))
