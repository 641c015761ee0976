"""Calibration: does 0.8 mean eight of ten? Reliability bins, and one temperature for each fold.

Temperature scaling: C. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import softmax
from scipy.stats import norm

from caprmil import figures
from caprmil.errors import CohortError
from caprmil.evaluation import metrics
from caprmil.evaluation.predictions import Predictions
from caprmil.figures import Bin, Reliability
from caprmil.io import tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 1e-12  # a probability of 0 would cost an infinite log-loss
WIDEST = 20.0  # temperatures are looked for between 1 / 20 and 20
SLIDES_A_BIN = 10
TITLES = {
    "ace": "ACE",
    "ace_floor": "its floor",
    "ece": "ECE",
    "brier": "Brier",
    "log_loss": "log-loss",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Calibration:
    """The temperature of each fold, and what it does to answers on slides it was not fitted to."""

    temperatures: Mapping[str, float]
    scores: Mapping[str, Mapping[str, float]]
    """Errors `before` and `after`: the mean over folds of each."""
    before: Predictions
    after: Predictions
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return all but the answers themselves."""
        return {"temperatures": self.temperatures, **self.scores, "notes": self.notes}

    def as_markdown(self) -> str:
        """Return a table of before and after, with the temperatures below it."""
        rows = [
            [when, *(f"{own[name]:.3f}" for name in TITLES)] for when, own in self.scores.items()
        ]
        told = ", ".join(f"{fold} {value:.2f}" for fold, value in self.temperatures.items())
        notes = [
            f"Temperatures, fitted on the validation parts: {told}. Above 1, the model was too "
            "sure of itself; below 1, not sure enough.",
            "The floor is the ACE that a perfectly calibrated model with these answers would read.",
            *self.notes,
        ]
        return tables.markdown(["test part, mean over folds", *TITLES.values()], rows, notes)

    def draw(self) -> "Figure":
        """Draw the reliability of all test slides, before and after."""
        classes = self.before.classes
        event = classes[1] if len(classes) == 2 else "the predicted class"
        before = reliability(self.before, self.scores["before"]["ace"])
        after = reliability(self.after, self.scores["after"]["ace"])
        return figures.reliability(before, after, event=event)


def calibrate(test: Predictions, validation: Mapping[str, Predictions]) -> Calibration:
    """Fit a temperature to each fold's validation answers, and apply it to its test answers."""
    folds = test.labelled().by_fold()
    if not folds:
        raise CohortError("Temperatures are fitted fold by fold, and these answers have no folds.")
    temperatures, notes, softened = {}, [], []
    for name, part in folds.items():
        temperatures[name], note = _fit(validation.get(name))
        notes += [f"{name}: {note}, so T = 1."] if note else []
        answers = soften(part.probabilities, temperatures[name])
        softened.append(replace(part, probabilities=answers))
    before, after = (Predictions.concatenate(list(p)) for p in (folds.values(), softened))
    return Calibration(
        temperatures=temperatures,
        scores={"before": _mean_scores(before), "after": _mean_scores(after)},
        before=before,
        after=after,
        notes=tuple(notes),
    )


def _fit(answers: Predictions | None) -> tuple[float, str]:
    """Return the temperature of a fold; where none can be had, 1 and the reason."""
    if answers is None:
        return 1.0, "there is no validation part"
    labels = np.asarray(answers.labelled().labels)
    if len(set(labels.tolist())) < 2:
        return 1.0, "the validation part has one class only"
    found = temperature(labels, answers.labelled().probabilities)
    if found is None:
        return 1.0, "the validation part is answered too well, or too badly, for a best temperature"
    return found, ""


def temperature(labels: NDArray[np.integer], probabilities: NDArray[np.floating]) -> float | None:
    """Return the T for which softmax(log p / T) has the least log-loss; None if there is none.

    If every slide is right, the least log-loss is that of T = 0; if most are wrong, that of an
    infinite T. Neither says anything of other slides.
    """
    logits = np.log(np.clip(probabilities, LEAST, 1))
    logits -= logits.max(axis=1, keepdims=True)
    own = logits[np.arange(len(labels)), labels]

    def slope(log_t: float) -> float:
        """Return how the log-loss, which is convex in 1 / T, grows with 1 / T.

        Where every slide is right it is never above 0, however it is rounded.
        """
        sharper = softmax(logits / np.exp(log_t), axis=1)
        return float(np.mean((sharper * logits).sum(axis=1) - own))

    edge = np.log(WIDEST)
    if not slope(edge) < 0 < slope(-edge):
        return None
    return float(np.exp(brentq(slope, -edge, edge)))


def soften(probabilities: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """Return softmax(log p / T); with T = 1, the probabilities as they were."""
    if temperature == 1:
        return probabilities.astype(np.float64)
    softened: NDArray[np.float64] = softmax(
        np.log(np.clip(probabilities, LEAST, 1)) / temperature, axis=1
    )
    return softened


def log_loss(labels: NDArray[np.integer], probabilities: NDArray[np.floating]) -> float:
    """Return the mean of -log p of the true class."""
    own = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.clip(own, LEAST, 1)).mean())


def _mean_scores(table: Predictions) -> dict[str, float]:
    """Return the mean over folds of each error, and of the floor of the ACE."""
    rows = []
    for part in table.by_fold().values():
        labels, p = np.asarray(part.labels), part.probabilities
        own = {name: metrics.METRICS[name](labels, p) for name in ("ace", "ece", "brier")}
        floor = metrics.ace_floor(p)[0]
        rows.append({**own, "ace_floor": floor, "log_loss": log_loss(labels, p)})
    return {name: float(np.mean([row[name] for row in rows])) for name in TITLES}


def reliability(table: Predictions, ace: float) -> Reliability:
    """Return bins of equally many slides: how sure the model was, and how often it was right.

    Of two classes, how sure of the second; of more, of the one it predicts. Equal answers stay in
    one bin. Intervals are Wilson's at 95 %, as if every slide were a patient of its own.
    """
    labels, p = np.asarray(table.labelled().labels), table.labelled().probabilities
    two = p.shape[1] == 2
    scores = np.asarray(p[:, 1] if two else p.max(axis=1), dtype=np.float64)
    hits = labels == (1 if two else p.argmax(axis=1))
    number = int(np.clip(len(scores) // SLIDES_A_BIN, 1, metrics.BINS))
    places = np.rint(np.arange(1, number) * len(scores) / number).astype(int)
    owner = np.searchsorted(np.unique(np.sort(scores)[places]), scores, side="right")
    bins = [_bin(scores[owner == b], hits[owner == b]) for b in np.unique(owner)]
    return Reliability(bins=tuple(bins), scores=scores, ace=ace)


def _bin(scores: NDArray[np.float64], hits: NDArray[np.bool_]) -> Bin:
    n, share = len(hits), float(hits.mean())
    z = float(norm.ppf(0.975))
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return Bin(float(scores.mean()), share, float(middle - reach), float(middle + reach), n)
