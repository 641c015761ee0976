"""A learned combination of the answers of a patient's slides: a weight for each slide.

The weights are a softmax over the slides, of a linear function of their answers. With the function
0 it is the mean, and the steeper the function is, the nearer to the highest answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import RecipeError
from caprmil.evaluation.predictions import Predictions
from caprmil.targets.target import Answers, Target, weighted_mean

SPREAD = 2.0  # standard deviation of the slopes that is expected before patients are seen
STEP = 1e-5  # of the slopes, for the derivatives of the loss
STEEPEST = 1e6  # a slope beyond is a damaged file
LEAST_SPREAD = 1e-30  # and so is a spread below, by which slopes are divided
EQUAL = 1e-12  # relative spread below which answers are equal, up to rounding


@dataclass(frozen=True, kw_only=True)
class LearnedCombination:
    """How the answers of slides become that of their patient, for the model of one fold."""

    slopes: dict[str, float]
    """The slope of each column of the answers, relative to its spread."""
    spreads: tuple[float, ...]
    """The standard deviation of each column over the slides that it was fitted on."""
    fitted_on: Literal["validation", "train"]
    patients: int
    """How many patients with several slides it was fitted on. With none it is the mean."""
    loss_of_mean: float
    loss: float
    groups: tuple[int, ...] = ()
    """How many columns each of several targets or labels has. Each has weights of its own."""

    def __post_init__(self) -> None:
        usable = all(LEAST_SPREAD <= spread < math.inf for spread in self.spreads)
        if len(self.slopes) != len(self.spreads) or not usable:
            raise RecipeError("each slope needs a positive spread")
        if self.groups and (min(self.groups) < 1 or sum(self.groups) != len(self.slopes)):
            raise RecipeError("the groups do not have all slopes")
        if not all(abs(slope) <= STEEPEST for slope in self.slopes.values()):
            raise RecipeError(f"a slope is beyond {STEEPEST:g}")
        if self.patients < 0:
            raise RecipeError(f"it cannot be fitted on {self.patients} patients")

    def weights(self, answers: Answers) -> NDArray[np.float64]:
        """Return the weight of each slide of a patient (rows) for each number of its answer."""
        steepness = np.array([*self.slopes.values()]) / np.array(self.spreads)
        ends = np.cumsum(self.groups or (len(steepness),))
        groups = [
            slice(end - n, end) for end, n in zip(ends, np.diff(ends, prepend=0), strict=True)
        ]
        own = [_weights(answers[:, group], steepness[group]) for group in groups]
        sizes = [group.stop - group.start for group in groups]
        return np.repeat(np.stack(own, axis=1), sizes, axis=1)

    def combine(self, answers: Answers) -> NDArray[np.float64]:
        """Return the answer of a patient."""
        return weighted_mean(self.weights(answers), answers)


def fit_combination(
    slides: Predictions,
    fitted_on: Literal["validation", "train"],
    *,
    fitted: Target | None = None,
) -> LearnedCombination:
    """Return the combination with the lowest loss for patients, by the answers of their slides.

    The loss is the mean over patients, with a normal distribution of the slopes around the mean of
    the slides: few patients change little. `fitted` is the target of the fold: its scale is the
    unit of errors. Several targets or labels are fitted one by one.
    """
    fitted = fitted or slides.target
    if slides.target.parts:
        own = {
            name: fit_combination(slides.part(name), fitted_on, fitted=part.target)
            for name, part in fitted.parts.items()
        }
        return _together(slides.target, own, fitted_on)
    target, of, labels, scale = slides.target, slides.patients, slides.labels, fitted.scale
    assert of is not None
    assert labels is not None
    rows: dict[str, list[int]] = {}
    for row in np.flatnonzero(target.known(labels)).tolist():
        rows.setdefault(of[row], []).append(row)
    bags = [slides.answers[own] for own in rows.values()]
    truth = labels[[own[0] for own in rows.values()]]
    several = sum(len(own) > 1 for own in bags)
    spreads = slides.answers.std(axis=0)
    least = np.maximum(EQUAL * np.abs(slides.answers).max(axis=0), LEAST_SPREAD)
    spreads = np.where(spreads > least, spreads, 1.0)

    def loss(slopes: NDArray[np.float64]) -> float:
        steepness = slopes / spreads
        answers = np.stack([_weights(own, steepness) @ own for own in bags])
        return target.answer_loss(truth, answers)

    def penalised(slopes: NDArray[np.float64]) -> float:
        return loss(slopes) / scale**2 + float(slopes @ slopes) / (2 * SPREAD**2 * len(bags))

    start = found = np.zeros(len(spreads))
    if several:
        from scipy.optimize import minimize  # here: predictions do not wait for it

        found = minimize(penalised, start, method="L-BFGS-B", options={"eps": STEP}).x
    return LearnedCombination(
        slopes=_named(target, found.tolist()),
        spreads=tuple(spreads.tolist()),
        fitted_on=fitted_on,
        patients=several,
        loss_of_mean=loss(start) if bags else 0.0,
        loss=loss(found) if bags else 0.0,
    )


def _together(
    target: Target,
    own: Mapping[str, LearnedCombination],
    fitted_on: Literal["validation", "train"],
) -> LearnedCombination:
    """Return the combinations of several targets or labels as one. Losses are means over them."""
    slopes = [slope for each in own.values() for slope in each.slopes.values()]
    return LearnedCombination(
        slopes=_named(target, slopes),
        spreads=tuple(spread for each in own.values() for spread in each.spreads),
        fitted_on=fitted_on,
        patients=max(each.patients for each in own.values()),
        loss_of_mean=float(np.mean([each.loss_of_mean for each in own.values()])),
        loss=float(np.mean([each.loss for each in own.values()])),
        groups=tuple(n for e in own.values() for n in e.groups or (len(e.slopes),)),
    )


def _named(target: Target, slopes: Sequence[float]) -> dict[str, float]:
    return dict(zip(target.columns, slopes, strict=True))


def describe_combinations(by_fold: Mapping[str, LearnedCombination]) -> str:
    """Return what was learned in each fold, as Markdown."""
    columns = list(next(iter(by_fold.values())).slopes)
    header = ["fold", "fitted on", *columns, "loss of the mean", "loss"]
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    for name, each in by_fold.items():
        cells: list[Any] = [name, f"{each.patients} patients ({each.fitted_on})"]
        cells += [f"{slope:+.2f}" for slope in each.slopes.values()]
        lines.append(" | ".join([*cells, f"{each.loss_of_mean:.4f}", f"{each.loss:.4f}"]))
    table = "\n".join(f"| {line} |" for line in lines)
    return (
        f"{table}\n\nA slide counts more, the higher its answer is times this slope, relative to "
        "the spread of the answers; 0 is the mean of the slides. The losses are those of the "
        "patients that the slopes were fitted on. The baseline `mean of slides` is the same model "
        "with the mean of the same answers.\n"
    )


def _weights(answers: Answers, steepness: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.special import softmax

    return np.asarray(softmax(answers.astype(np.float64) @ steepness))
