"""Shortcuts: answers that need no model, on the same folds. What does not beat them is no finding.

Three: how many patches a slide has; which site it is from; the mean of its features, in a logistic
regression. Each learns from the train and validation parts of a fold, and answers its test part.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.folds import Fold
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bags
from caprmil.io import tables
from caprmil.io.progress import Step

SITE = (
    *("site", "site_id", "centre", "center", "centre_id", "center_id", "medical_centre"),
    *("medical_center", "institution", "institute", "hospital", "clinic", "lab", "laboratory"),
    *("data_provider", "provider", "tissue_source_site", "source_site", "tss"),
)
BARCODE = re.compile(r"TCGA-(\w{2})-", re.IGNORECASE)
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # C of the logistic regression; less is simpler
ITERATIONS = 10_000  # far more than it takes: a fit that stops early would warn

Answers: TypeAlias = NDArray[np.float64]
Shortcut: TypeAlias = Callable[[Cohort, Fold], Answers]


class Sites(NamedTuple):
    """The site of each slide, as far as it is known, and where that is from."""

    of: Mapping[str, str]
    remark: str


def predict_baselines(
    cohort: Cohort, folds: Sequence[Fold], *, progress: Step | None = None
) -> dict[str, Predictions]:
    """Answer the test part of every fold by each shortcut that the cohort allows.

    Every bag is read once. `find_sites` says why the site is missing, where it is.
    """
    means = _mean_features(cohort, progress)
    counts = {name: float(bag.n_patches) for name, bag in cohort.bags.items()}
    shortcuts: dict[str, Shortcut] = {"patch count": partial(_by_count, counts)}
    if sites := find_sites(cohort).of:
        shortcuts["site"] = partial(_by_site, sites)
    shortcuts["mean feature"] = partial(_by_mean, means)
    return {
        name: Predictions.concatenate([_table(cohort, fold, ask(cohort, fold)) for fold in folds])
        for name, ask in shortcuts.items()
    }


def find_sites(cohort: Cohort) -> Sites:
    """Return the site of each slide: from a column that is called so, or from TCGA's barcodes."""
    columns = tables.called(cohort.entries[0].row, SITE)
    barcodes = {entry.name: BARCODE.match(entry.name) for entry in cohort.entries}
    if columns:
        cells = {entry.name: entry.row[columns[0]] for entry in cohort.entries}
        known, source = {n: c for n, c in cells.items() if tables.is_known(c)}, columns[0]
    elif all(barcodes.values()):
        known = {name: found[1].upper() for name, found in barcodes.items() if found}
        source = "the barcodes of TCGA"
    else:
        return Sites({}, "The table has no column for the site, and slides have no TCGA barcodes.")
    if len(set(known.values())) < 2:
        return Sites({}, f"By {source}, there are fewer than two sites.")
    return Sites(known, f"The site is taken from {source}.")


def _mean_features(cohort: Cohort, progress: Step | None) -> dict[str, NDArray[np.float32]]:
    means = {}
    for done, entry in enumerate(cohort.entries, 1):
        means[entry.name] = bags.read(entry.path).features.mean(axis=0, dtype=np.float32)
        if progress is not None:
            progress(done, len(cohort))
    return means


def _by_count(counts: Mapping[str, float], cohort: Cohort, fold: Fold) -> Answers:
    """Answer from the logarithm of the number of patches, and its square."""
    curve = FunctionTransformer(lambda column: np.hstack([column, column**2]))
    model = make_pipeline(StandardScaler(), curve, _regression())
    known = (*fold.train, *fold.validation)
    logs = {name: np.log([count]) for name, count in counts.items()}
    return _ask(_learn(model, logs, cohort, known), logs, fold.test, len(cohort.classes))


def _by_site(sites: Mapping[str, str], cohort: Cohort, fold: Fold) -> Answers:
    """Answer with the class shares of the slide's site; of a site that is new, those of all.

    Each site is smoothed by as many slides as there are classes, spread as all slides are.
    """
    size, known = len(cohort.classes), (*fold.train, *fold.validation)
    everywhere = np.bincount(_labels(cohort, known), minlength=size)
    shares = everywhere / everywhere.sum()
    here: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(size))
    for name, label in zip(known, _labels(cohort, known), strict=True):
        if name in sites:
            here[sites[name]][label] += 1
    found = np.stack([here[sites[name]] if name in sites else 0 * shares for name in fold.test])
    smoothed: Answers = (found + size * shares) / (found.sum(axis=1, keepdims=True) + size)
    return smoothed


def _by_mean(means: Mapping[str, NDArray[np.float32]], cohort: Cohort, fold: Fold) -> Answers:
    """Answer by logistic regression on the mean feature; its C is the best on the validation."""
    size = len(cohort.classes)
    train, validation = fold.train, fold.validation
    if not validation:
        train, validation = _inner_split(cohort, fold.train)
    truth = _labels(cohort, validation)

    def loss(penalty: float) -> float:
        model = _learn(make_pipeline(StandardScaler(), _regression(penalty)), means, cohort, train)
        return float(log_loss(truth, _ask(model, means, validation, size), labels=range(size)))

    best = min(PENALTIES, key=loss) if validation else PENALTIES[len(PENALTIES) // 2]
    model = make_pipeline(StandardScaler(), _regression(best))
    known = (*fold.train, *fold.validation)
    return _ask(_learn(model, means, cohort, known), means, fold.test, size)


def _inner_split(cohort: Cohort, slides: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return train and validation: every fifth patient of each class, but never all of a class."""
    owners: dict[int | None, dict[str, None]] = defaultdict(dict)
    for name in sorted(slides):
        owners[cohort[name].label][cohort[name].patient] = None
    held = {who for own in owners.values() for who in list(own)[1::5]}
    inner = tuple(name for name in slides if cohort[name].patient in held)
    rest = tuple(name for name in slides if cohort[name].patient not in held)
    whole = {cohort[name].label for name in rest} == set(owners)  # patients may have two labels
    return (rest, inner) if whole else (tuple(slides), ())


def _labels(cohort: Cohort, names: Sequence[str]) -> NDArray[np.int64]:
    return np.array([cohort[name].label for name in names])


def _regression(penalty: float = 1.0) -> LogisticRegression:
    return LogisticRegression(C=penalty, max_iter=ITERATIONS)


def _learn(
    model: Pipeline, values: Mapping[str, NDArray[np.floating]], cohort: Cohort, on: Sequence[str]
) -> Pipeline:
    known = np.stack([values[name] for name in on]).astype(np.float64)
    return model.fit(known, _labels(cohort, on))


def _ask(
    model: Pipeline, values: Mapping[str, NDArray[np.floating]], on: Sequence[str], classes: int
) -> Answers:
    """Return the probabilities of all classes: 0 for one that was not there to be learnt."""
    answers = np.zeros((len(on), classes))
    asked = np.stack([values[name] for name in on]).astype(np.float64)
    answers[:, model.classes_] = model.predict_proba(asked)
    return answers


def _table(cohort: Cohort, fold: Fold, answers: Answers) -> Predictions:
    return Predictions(
        slides=fold.test,
        classes=cohort.classes,
        probabilities=answers,
        labels=_labels(cohort, fold.test),
        patients=tuple(entry.patient for entry in cohort.subset(fold.test)),
        folds=(fold.name,) * len(fold.test),
    )
