"""Calibration: how often an answer of 0.8 is right. Reliability bins, one temperature per fold.

Temperature scaling: C. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caprmil import figures
from caprmil.errors import CohortError
from caprmil.evaluation.predictions import Predictions
from caprmil.figures import Bin, Reliability
from caprmil.io import tables
from caprmil.targets import Classification
from caprmil.targets.classification_metrics import ace_floor
from caprmil.targets.weighted_metrics import BINS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALLEST = 1e-12  # a probability of 0 would have an infinite log-loss
WIDEST = 20.0  # temperatures are searched between 1 / 20 and 20
SLIDES_PER_BIN = 10
TITLES = {
    "ace": "ACE",
    "ace_floor": "its floor",
    "ece": "ECE",
    "brier": "Brier",
    "log_loss": "log-loss",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Calibration:
    """The temperature of each fold, and its effect on slides that it was not fitted to."""

    temperatures: Mapping[str, float]
    scores: Mapping[str, Mapping[str, float]]
    """Errors `before` and `after`: the mean over folds of each."""
    before: Predictions
    after: Predictions
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the answers themselves."""
        return {"temperatures": self.temperatures, **self.scores, "notes": self.notes}

    def as_markdown(self) -> str:
        """Return a table of before and after, with the temperatures below it."""
        rows = [
            [when, *(f"{own[name]:.3f}" for name in TITLES)] for when, own in self.scores.items()
        ]
        shown = ", ".join(f"{fold} {value:.2f}" for fold, value in self.temperatures.items())
        notes = [
            f"Temperatures, fitted on the validation parts: {shown}. Above 1, the model was "
            "overconfident; below 1, underconfident.",
            "The floor is the ACE of a perfectly calibrated model with these answers.",
            *self.notes,
        ]
        return tables.markdown_table(["test part, mean over folds", *TITLES.values()], rows, notes)

    def draw(self) -> "Figure":
        """Draw the reliability of all test slides, before and after."""
        classes = _classes(self.before)
        other = f"the predicted {self.before.target.class_name}"
        event = classes[1] if len(classes) == 2 else other
        before = reliability(self.before, self.scores["before"]["ace"])
        after = reliability(self.after, self.scores["after"]["ace"])
        return figures.reliability(before, after, event=event, unit=self.before.unit)


def calibrate(test: Predictions, validation: Mapping[str, Predictions]) -> Calibration:
    """Fit a temperature to each fold's validation answers, and apply it to its test answers."""
    _classes(test)
    folds = test.labelled().by_fold()
    if not folds:
        raise CohortError(
            "Temperatures are fitted fold by fold, and these predictions have no folds."
        )
    temperatures, notes, calibrated = {}, [], []
    for name, part in folds.items():
        temperatures[name], note = _fit(validation.get(name))
        notes += [f"{name}: {note}, so T = 1."] if note else []
        answers = soften(part.answers, temperatures[name])
        calibrated.append(replace(part, answers=answers))
    before, after = (Predictions.concatenate(list(p)) for p in (folds.values(), calibrated))
    return Calibration(
        temperatures=temperatures,
        scores={"before": _mean_scores(before), "after": _mean_scores(after)},
        before=before,
        after=after,
        notes=tuple(notes),
    )


def calibrate_each(
    test: Predictions, validation: Mapping[str, Predictions]
) -> dict[str, Calibration]:
    """Calibrate each of several targets that has probabilities of classes; "" is the only one."""
    if not test.target.parts:
        return {"": calibrate(test, validation)}
    found = {}
    for name, part in test.target.parts.items():
        own = test.part(name)
        if not part.target.calibrates or not _has_labels(own):
            continue
        known = {fold: table.part(name) for fold, table in validation.items()}
        known = {fold: table for fold, table in known.items() if _has_labels(table)}
        found[name] = calibrate(own, known)
    if not found:
        _classes(test)  # raises
    return found


def _has_labels(table: Predictions) -> bool:
    return table.labels is not None and bool(table.target.known(table.labels).any())


def as_file(found: Mapping[str, Calibration]) -> dict[str, Any]:
    """Return calibrations as the file of a run has them."""
    if "" in found:
        return found[""].as_dict()
    return {"targets": {name: own.as_dict() for name, own in found.items()}}


def _classes(table: Predictions) -> tuple[str, ...]:
    if not isinstance(table.target, Classification):
        raise CohortError(
            f"A {table.target.kind} has no probabilities to calibrate. Only classifications have."
        )
    return table.target.classes


def _fit(answers: Predictions | None) -> tuple[float, str]:
    """Return the temperature of a fold; where none can be had, 1 and the reason."""
    if answers is None:
        return 1.0, "there is no validation part"
    labels, probabilities = answers.labelled().truth
    if len(set(labels.tolist())) < 2:
        return 1.0, "the validation part has one class only"
    found = temperature(labels, probabilities)
    if found is None:
        return (
            1.0,
            "the validation part is predicted too well, or too badly, for a best temperature",
        )
    return found, ""


def temperature(labels: NDArray[np.integer], probabilities: NDArray[np.floating]) -> float | None:
    """Return the T for which softmax(log p / T) has the least log-loss; None if there is none.

    If every slide is right, the least log-loss is that of T = 0; if most are wrong, that of an
    infinite T. Neither is of use for other slides.
    """
    from scipy.optimize import brentq  # here: predictions do not wait for SciPy
    from scipy.special import softmax

    logits = np.log(np.clip(probabilities, SMALLEST, 1))
    logits -= logits.max(axis=1, keepdims=True)
    own = logits[np.arange(len(labels)), labels]

    def derivative(log_t: float) -> float:
        """Return the derivative by 1 / T of the log-loss, which is convex in 1 / T.

        Where every slide is right it is never above 0, also after rounding.
        """
        sharper = softmax(logits / np.exp(log_t), axis=1)
        return float(np.mean((sharper * logits).sum(axis=1) - own))

    edge = np.log(WIDEST)
    if not derivative(edge) < 0 < derivative(-edge):
        return None
    return float(np.exp(brentq(derivative, -edge, edge)))


def soften(probabilities: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """Return softmax(log p / T); with T = 1, the probabilities as they were."""
    if temperature == 1:
        return probabilities.astype(np.float64)
    from scipy.special import softmax

    softened: NDArray[np.float64] = softmax(
        np.log(np.clip(probabilities, SMALLEST, 1)) / temperature, axis=1
    )
    return softened


def log_loss(labels: NDArray[np.integer], probabilities: NDArray[np.floating]) -> float:
    """Return the mean of -log p of the true class."""
    own = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.clip(own, SMALLEST, 1)).mean())


def _mean_scores(table: Predictions) -> dict[str, float]:
    """Return the mean over folds of each error, and of the floor of the ACE."""
    rows = []
    for part in table.by_fold().values():
        labels, p = part.truth
        own = {n: table.target.metric(n).function(labels, p) for n in ("ace", "ece", "brier")}
        floor = ace_floor(p)[0]
        rows.append({**own, "ace_floor": floor, "log_loss": log_loss(labels, p)})
    return {name: float(np.mean([row[name] for row in rows])) for name in TITLES}


def reliability(table: Predictions, ace: float) -> Reliability:
    """Return bins of equally many slides: mean confidence, and the share that is right.

    Confidence is that in the second of two classes; of more, in the predicted one. Equal answers
    stay in one bin. Intervals are Wilson's at 95 %, as if every slide were a patient of its own.
    """
    labels, p = table.labelled().truth
    two = p.shape[1] == 2
    scores = np.asarray(p[:, 1] if two else p.max(axis=1), dtype=np.float64)
    hits = labels == (1 if two else p.argmax(axis=1))
    number = int(np.clip(len(scores) // SLIDES_PER_BIN, 1, BINS))
    edges = np.rint(np.arange(1, number) * len(scores) / number).astype(int)
    owner = np.searchsorted(np.unique(np.sort(scores)[edges]), scores, side="right")
    bins = [_bin(scores[owner == b], hits[owner == b]) for b in np.unique(owner)]
    return Reliability(bins=tuple(bins), scores=scores, ace=ace)


def _bin(scores: NDArray[np.float64], hits: NDArray[np.bool_]) -> Bin:
    n, share = len(hits), float(hits.mean())
    z = NormalDist().inv_cdf(0.975)
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return Bin(float(scores.mean()), share, float(middle - reach), float(middle + reach), n)
