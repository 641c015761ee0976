"""The parts of a report that depend on what is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from caprmil.errors import RunError
from caprmil.evaluation.predictions import Predictions
from caprmil.explain import ExplainedSlide, Explanation
from caprmil.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """What a table of evidence is about, in words. E.g. one class against the others."""

    number: int  # as in `Explanation.evidence_for`
    name: str  # tumour
    positive: str  # for tumour
    negative: str  # against tumour
    total: str  # lead of tumour over normal


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of the table of all slides."""

    text: str
    value: float | None = None  # to sort by, if it is a number
    hint: str = ""  # tooltip
    hidden: str = ""  # text to search for that is not shown


class PredictionParts(Protocol):
    """What a report shows of predictions. There is one implementation for each kind of target."""

    # A slide report

    def prediction(self, explained: ExplainedSlide) -> Markup:
        """Return the first section: what is predicted, by which models, and how certain it is."""

    def contrasts(self, explained: ExplainedSlide) -> list[Contrast]:
        """Return what evidence is shown for, the most important first."""

    def total(self, outputs: NDArray[np.floating], number: int) -> float:
        """Return the value of a contrast, given the outputs of a model."""

    def total_meaning(self, explanation: Explanation, total: float) -> str:
        """Return a sentence on what the value of a contrast means, or nothing."""

    def evidence_remark(self, explained: ExplainedSlide) -> str:
        """Return what a reader of the evidence should know."""

    def repeated_layers(self, explained: ExplainedSlide) -> list[str]:
        """Return the keys of layers that say nothing new beside those of the first contrast."""

    # A run report

    @property
    def task(self) -> str:
        """What is predicted, in a few words."""

    @property
    def headline_metrics(self) -> tuple[str, ...]:
        """The metrics that are shown first."""

    def figures(self, predictions: Predictions) -> dict[str, Markup]:
        """Return figures of the test slides by title; a sentence where one cannot be drawn."""

    def results(self, predictions: Predictions) -> Markup:
        """Return a table of predictions against labels, with its heading."""

    def worst(self, predictions: Predictions, most: int) -> list[int]:
        """Return the rows of the worst mistakes, the worst first."""

    def best(self, predictions: Predictions) -> list[int]:
        """Return the rows of a few good predictions that are worth a report."""

    def mistake(self, predictions: Predictions, row: int) -> str:
        """Return a mistake in words."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Titles of the columns of the table of all slides that depend on the target."""

    def cells(self, predictions: Predictions, row: int) -> Sequence[Cell]:
        """Return the cells of these columns."""

    def is_wrong(self, predictions: Predictions, row: int) -> bool:
        """Return whether a prediction is marked as wrong."""


def parts_of(run: Run) -> PredictionParts:
    """Return the parts for what a run predicts."""
    if not run.target.has_classes:
        raise RunError(
            f"A report of a {run.target.kind} cannot be written yet: reports show classes. See "
            f"scores.md and predictions.csv in {run.folder}, or use caprmil explain."
        )
    from caprmil.report.class_parts import ClassParts

    return ClassParts(run)
