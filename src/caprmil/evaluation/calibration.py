"""Calibration: how often an answer of 0.8 is right, and a correction that is fitted to each fold.

The target says what is corrected and measured: see `Target.calibration`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from caprmil.errors import CohortError
from caprmil.evaluation.predictions import Predictions
from caprmil.io import tables
from caprmil.targets.calibration_method import CalibrationMethod, CalibrationSide
from caprmil.targets.metric import mean_and_spread
from caprmil.targets.recalibration import Recalibration

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, kw_only=True)
class Calibration:
    """The correction of each fold, and its effect on slides that it was not fitted to."""

    fitted: Mapping[str, Recalibration]
    scores: Mapping[str, Mapping[str, float]]
    """Errors `before` and `after`: the mean over folds of each."""
    before: Predictions
    after: Predictions
    notes: tuple[str, ...]
    method: CalibrationMethod
    """Of the target."""

    @property
    def temperatures(self) -> dict[str, float]:
        """The temperature of each fold; empty if something else was fitted."""
        known = {fold: own.temperature for fold, own in self.fitted.items()}
        return {fold: t for fold, t in known.items() if t is not None}

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the answers themselves.

        Reports and viewer use the temperatures of targets that they show calibrated.
        """
        fitted: dict[str, Any] = {"temperatures": self.temperatures}
        if not self.before.target.calibrates:
            words = {fold: own.words for fold, own in self.fitted.items()}
            fitted = {"method": self.method.title, "corrections": words}
        return {**fitted, **self.scores, "notes": self.notes}

    def as_markdown(self) -> str:
        """Return a table of before and after, with what was fitted below it."""
        errors = self.method.errors
        rows = [
            [when, *(f"{own[name]:.3f}" for name in errors)] for when, own in self.scores.items()
        ]
        shown = ", ".join(f"{fold} {own.words}" for fold, own in self.fitted.items())
        first, *others = self.method.notes
        notes = [
            f"{self.method.name}, fitted on the validation parts: {shown}. {first}",
            *others,
            *self.notes,
        ]
        titles = [error.title for error in errors.values()]
        return tables.markdown_table(["test part, mean over folds", *titles], rows, notes)

    def draw(self) -> "Figure | None":
        """Draw predicted against observed on all test slides, before and after."""
        sides = [
            CalibrationSide(*table.truth, self.scores[when])
            for when, table in (("before", self.before), ("after", self.after))
        ]
        how, unit = self.method.title, self.before.unit
        return self.method.draw(sides[0], sides[1], how=how, unit=unit)


def calibrate(test: Predictions, validation: Mapping[str, Predictions]) -> Calibration:
    """Fit a correction to each fold's validation answers, and apply it to its test answers."""
    method = test.target.calibration
    if method is None or not method.errors:
        raise CohortError(f"There is no calibration for {test.target.in_words}.")
    folds = test.scored().by_fold()
    if not folds:
        raise CohortError(
            f"{method.name} are fitted fold by fold, and these predictions have no folds."
        )
    fitted, notes, calibrated = {}, [], []
    for name, part in folds.items():
        fitted[name] = found = _fit(method, validation.get(name))
        if found.why:
            change = "so nothing is corrected" if found.temperature is None else "so T = 1"
            notes.append(f"{name}: {found.why}, {change}.")
        calibrated.append(replace(part, answers=found.apply(part.answers)))
    before, after = (Predictions.concatenate(list(p)) for p in (folds.values(), calibrated))
    return Calibration(
        fitted=fitted,
        scores={"before": _mean_scores(before, method), "after": _mean_scores(after, method)},
        before=before,
        after=after,
        notes=tuple(notes),
        method=method,
    )


def calibrate_each(
    test: Predictions, validation: Mapping[str, Predictions], *, every: bool = False
) -> dict[str, Calibration]:
    """Calibrate each of several targets that reports show calibrated, or `every` one.

    The name "" is that of the only target; labels among several targets have `target.label`.
    """
    if not test.target.parts:
        return {"": calibrate(test, validation)}
    held = {fold: table.leaves() for fold, table in validation.items()}
    found = {}
    for name, own in test.leaves().items():
        method = own.target.calibration
        wanted = (every or own.target.calibrates) and method is not None and method.errors
        if wanted and own.has_labels:
            known = {fold: tables[name] for fold, tables in held.items()}
            known = {fold: table for fold, table in known.items() if table.has_labels}
            found[name] = calibrate(own, known)
    if not found:
        raise CohortError(f"No part of {test.target.in_words} has labels and is calibrated.")
    return found


def as_file(found: Mapping[str, Calibration]) -> dict[str, Any]:
    """Return calibrations as the file of a run has them."""
    if "" in found:
        return found[""].as_dict()
    return {"targets": {name: own.as_dict() for name, own in found.items()}}


def _fit(method: CalibrationMethod, answers: Predictions | None) -> Recalibration:
    """Return the correction of a fold; one that does nothing where there is no validation part."""
    if answers is not None:
        return method.fit(*answers.scored().truth)
    return method.nothing("there is no validation part")


def _mean_scores(table: Predictions, method: CalibrationMethod) -> dict[str, float]:
    """Return the mean over folds of each error, over those in which it has a value."""
    parts = table.by_fold().values()
    return {
        name: mean_and_spread(error.function(*part.truth) for part in parts).mean
        for name, error in method.errors.items()
    }
