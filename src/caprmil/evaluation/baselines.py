"""Baselines: predictions without a MIL model, on the same folds. A model has to beat them.

The number of patches of a slide; its site; its mean feature, in a linear model; and its covariates,
in a linear model, if a model reads any. Each is fitted to the train and validation parts of a fold,
and predicts its test part.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.covariates import Covariates, encode
from caprmil.cohort.folds import Fold
from caprmil.evaluation.patient_answers import combine_slides
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bag_files
from caprmil.features.source_bags import mean_patch
from caprmil.io import tables
from caprmil.io.progress import Step

SITE = (
    *("site", "site_id", "centre", "center", "centre_id", "center_id", "medical_centre"),
    *("medical_center", "institution", "institute", "hospital", "clinic", "lab", "laboratory"),
    *("data_provider", "provider", "tissue_source_site", "source_site", "tss"),
)
BARCODE = re.compile(r"TCGA-(\w{2})-", re.IGNORECASE)
PURE_CODES = (
    "The site is left out. It would be the code of the tissue source site, which TCGA gives per "
    "study: here every code has slides of one class only, so it names the class whatever the "
    "scanner or the stain. Add a column with the institution, and name it in [data] site."
)
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # inverse penalties of the linear model; less is simpler

Answers: TypeAlias = NDArray[np.floating]
Baseline: TypeAlias = Callable[[Cohort, Fold], Answers]


class Sites(NamedTuple):
    """The site of each slide, as far as it is known, and where that is from."""

    of: Mapping[str, str]
    remark: str


def predict_baselines(
    cohort: Cohort,
    folds: Sequence[Fold],
    *,
    means: Mapping[str, NDArray[np.float32]] | None = None,
    progress: Step | None = None,
) -> dict[str, Predictions]:
    """Predict the test part of every fold by each baseline that the cohort allows.

    `means` are those of `mean_features`, which reads every bag once. `find_sites` says why the site
    is missing, where it is.
    """
    means = mean_features(cohort, progress) if means is None else means
    counts = {name: float(bag.n_patches) for name, bag in cohort.bags.items()}
    baselines: dict[str, Baseline] = {"patch count": partial(_by_count, counts)}
    if sites := find_sites(cohort).of:
        baselines["site"] = partial(_by_site, sites)
    baselines["mean feature"] = partial(_by_linear_model, means)
    if cohort.covariates is not None:
        baselines["covariates"] = partial(_by_covariates, cohort.covariates)
    return {
        name: Predictions.concatenate(
            [_table(cohort, fold, _by_part(predict, cohort, fold)) for fold in folds]
        )
        for name, predict in baselines.items()
    }


def _by_part(predict: Baseline, cohort: Cohort, fold: Fold) -> Answers:
    """Predict each part of a target by itself, fitted to the slides that have its label."""
    if not cohort.target.parts:
        return predict(cohort, fold)
    found = []
    for part in cohort.target.parts.values():
        entries = tuple(
            replace(e, label=None if e.label is None else part.label_of(e.label))
            for e in cohort.entries
        )
        own = replace(cohort, target=part.target, entries=entries)
        known = replace(
            fold,
            train=tuple(name for name in fold.train if name in own.labels),
            validation=tuple(name for name in fold.validation if name in own.labels),
        )
        labels = _labels(own, (*known.train, *known.validation))
        if len(np.unique(labels, axis=0)) < 2:  # nothing can be fitted
            size = len(part.target.columns)
            constant: Answers = np.full(size, 1 / size)
            if len(labels):
                constant = part.target.group_answers(labels, [None] * len(labels))(None)
            found.append(np.tile(constant, (len(fold.test), 1)))
        else:
            found.append(_by_part(predict, own, known))
    return np.concatenate(found, axis=1)


def find_sites(cohort: Cohort) -> Sites:
    """Return the site of each slide: from a column that is called that, or from TCGA's barcodes.

    TCGA gives a code to a site for each study. If the classes are studies, every code has one
    class by construction, and says nothing about a confounder: it is no site then.
    """
    columns = [cohort.site] if cohort.site else []
    columns = columns or tables.matching_columns(cohort.entries[0].row, SITE)
    found = {entry.name: BARCODE.match(entry.name) for entry in cohort.entries}
    codes = {name: match[1].upper() for name, match in found.items() if match}
    if columns:
        cells = {entry.name: entry.row[columns[0]] for entry in cohort.entries}
        known, source = {n: c for n, c in cells.items() if tables.is_known(c)}, columns[0]
    elif len(codes) == len(cohort):
        known, source = codes, "the barcodes of TCGA"
    else:
        return Sites({}, "The table has no column for the site, and slides have no TCGA barcodes.")
    if len(set(known.values())) < 2:
        return Sites({}, f"By {source}, there are fewer than two sites.")
    # Tables of TCGA may have the code in a column, too.
    are_codes = all(site.upper() == codes.get(name) for name, site in known.items())
    if are_codes and _all_pure(known, cohort):
        return Sites({}, PURE_CODES)
    return Sites(known, f"The site is taken from {source}.")


def _all_pure(sites: Mapping[str, str], cohort: Cohort) -> bool:
    """Return whether the slides of every site are of one class."""
    labels = defaultdict(list)
    for name, site in sites.items():
        if (label := cohort[name].label) is not None:
            labels[site].append(label)
    return all(cohort.target.is_pure(own) for own in labels.values())


def mean_features(cohort: Cohort, progress: Step | None = None) -> dict[str, NDArray[np.float32]]:
    """Return the mean feature of each slide."""
    means = {}
    for done, entry in enumerate(cohort.entries, 1):
        means[entry.name] = mean_patch(bag_files.read(entry.path))
        if progress is not None:
            progress(done, len(cohort))
    return means


def _by_count(counts: Mapping[str, float], cohort: Cohort, fold: Fold) -> Answers:
    """Predict from the logarithm of the number of patches, and its square."""
    curve = FunctionTransformer(lambda column: np.hstack([column, column**2]))
    model = make_pipeline(StandardScaler(), curve, cohort.target.linear_model(1.0))
    known = (*fold.train, *fold.validation)
    logs = {name: np.log([count]) for name, count in counts.items()}
    return _predict(_fit(model, logs, cohort, known), logs, cohort, fold.test)


def _by_site(sites: Mapping[str, str], cohort: Cohort, fold: Fold) -> Answers:
    """Predict the mean answer of the slide's site; for a new site, that of all slides."""
    known = (*fold.train, *fold.validation)
    answer_of = cohort.target.group_answers(_labels(cohort, known), [*map(sites.get, known)])
    return np.stack([answer_of(sites.get(name)) for name in fold.test])


def _by_covariates(covariates: Covariates, cohort: Cohort, fold: Fold) -> Answers:
    """Predict by a linear model of the covariates, as models read them."""
    columns = covariates.fit(fold.train)
    names = (*fold.train, *fold.validation, *fold.test)
    values = {name: encode(columns, covariates.of(name)) for name in names}
    return _by_linear_model(values, cohort, fold)


def _by_linear_model(
    values: Mapping[str, NDArray[np.floating]], cohort: Cohort, fold: Fold
) -> Answers:
    """Predict by a linear model of numbers of slides; its strength is the best on validation."""
    target = cohort.target
    train, validation = fold.train, fold.validation
    if not validation:
        train, validation = _inner_split(cohort, fold.train)
    truth = _labels(cohort, validation)

    def loss(strength: float) -> float:
        model = make_pipeline(StandardScaler(), target.linear_model(strength))
        fitted = _fit(model, values, cohort, train)
        return target.answer_loss(truth, _predict(fitted, values, cohort, validation))

    best = min(STRENGTHS, key=loss) if validation else STRENGTHS[len(STRENGTHS) // 2]
    model = make_pipeline(StandardScaler(), target.linear_model(best))
    known = (*fold.train, *fold.validation)
    return _predict(_fit(model, values, cohort, known), values, cohort, fold.test)


def _inner_split(cohort: Cohort, slides: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return train and validation: every fifth patient of a stratum, but never all of a stratum."""
    labels = {name: cohort.labels[name] for name in slides}
    strata, _ = cohort.target.strata(labels)
    owners: dict[int, dict[str, None]] = defaultdict(dict)
    for name in sorted(slides):
        owners[strata[name]][cohort[name].patient] = None
    held = {patient for own in owners.values() for patient in list(own)[1::5]}
    inner = tuple(name for name in slides if cohort[name].patient in held)
    rest = tuple(name for name in slides if cohort[name].patient not in held)
    complete = {strata[name] for name in rest} == set(owners)  # patients may have two labels
    return (rest, inner) if complete else (tuple(slides), ())


def _labels(cohort: Cohort, names: Sequence[str]) -> NDArray[Any]:
    return cohort.target.as_labels(cohort[name].label for name in names)


def _fit(
    model: Pipeline, values: Mapping[str, NDArray[np.floating]], cohort: Cohort, on: Sequence[str]
) -> Pipeline:
    known = np.stack([values[name] for name in on]).astype(np.float64)
    return model.fit(known, _labels(cohort, on))


def _predict(
    model: Pipeline, values: Mapping[str, NDArray[np.floating]], cohort: Cohort, on: Sequence[str]
) -> Answers:
    features = np.stack([values[name] for name in on]).astype(np.float64)
    return cohort.target.linear_answers(model, features)


def _table(cohort: Cohort, fold: Fold, answers: Answers) -> Predictions:
    table = Predictions(
        slides=fold.test,
        target=cohort.target,
        answers=answers,
        labels=_labels(cohort, fold.test),
        patients=tuple(entry.patient for entry in cohort.subset(fold.test)),
        folds=(fold.name,) * len(fold.test),
        unit="patient" if cohort.joins else "slide",
    )
    # What was learned is of the answers of a model.
    return combine_slides(table, "mean" if cohort.combine == "learned" else cohort.combine)
