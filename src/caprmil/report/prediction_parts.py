"""The parts of a report that depend on what is predicted: the base of all of them.

To show another kind of answer, write a subclass in its own file, and add its line to
`parts_registry.PARTS`. A target says by `Target.display` which parts show it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from caprmil.evaluation.predictions import Predictions
from caprmil.explain import ExplainedSlide, Explanation
from caprmil.report.text_format import number, share
from caprmil.runs.conformal_sets import is_unlike, warning
from caprmil.runs.run import Run
from caprmil.targets.target import Label


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of the table of all slides."""

    text: str
    value: float | None = None  # to sort by, if it is a number
    hint: str = ""  # tooltip
    hidden: str = ""  # text to search for that is not shown


class OtherSlide(NamedTuple):
    """A test slide of the run, to compare another slide with."""

    label: Label
    answer: NDArray[np.float64]  # the mean, if several folds tested it


class PredictionParts(ABC):
    """What a report shows of predictions."""

    headline_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that are shown first, after the target's own headline."""
    worst_title: ClassVar[str] = "Worst mistakes"
    no_worst: ClassVar[str] = "There are none: every labelled slide was predicted correctly."
    marked_filter: ClassVar[str] = "mistakes only"
    """Title of the filter that shows only the marked rows of the table of all slides."""
    marked_note: ClassVar[str] = "of them wrong (shaded)"
    """What a marked row is; the number of them comes before it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    # A slide report

    @abstractmethod
    def prediction(self, explained: ExplainedSlide) -> Markup:
        """Return the first section: what is predicted, by which models, and how certain it is."""

    @abstractmethod
    def agreement(self, explained: ExplainedSlide) -> str:
        """Return how far several models agree, in a sentence."""

    @abstractmethod
    def own_answer(self, explained: ExplainedSlide) -> str:
        """Return what the explained model predicts alone, in a sentence."""

    def contrasts(self, explained: ExplainedSlide) -> list[int]:
        """Return the numbers of the contrasts to show evidence for, the most important first."""
        return [explained.explanation.predicted]

    def answer_text(self, value: float) -> str:
        """Return one number of an answer as text."""
        return number(value)

    @abstractmethod
    def total_meaning(self, explanation: Explanation, total: float) -> str:
        """Return a sentence on what the value of a contrast means, or nothing."""

    def evidence_remark(self, explained: ExplainedSlide) -> str:  # noqa: ARG002
        """Return what a reader of the evidence should know, or nothing."""
        return ""

    def repeated_layers(self, explained: ExplainedSlide) -> list[str]:  # noqa: ARG002
        """Return the keys of layers that repeat those of the first contrast."""
        return []

    def models(self, explained: ExplainedSlide) -> Iterator[str]:
        """Yield which models predict, how far they agree, and which one is explained."""
        answer, explanation = explained.answer, explained.explanation
        what = "patient" if explained.reference.slides else "slide"
        folds = list(answer.by_fold)
        if not answer.unseen:
            yield f"Caution: every model of this prediction has seen this {what} in training."
        if explained.unlike is not None and is_unlike(explained.unlike):
            yield f"Caution: {warning(explained.unlike)}"
        if len(folds) == 1:
            unseen = answer.unseen and explained.name in self.run.names and len(self.run.done) > 1
            yield f"Predicted by the model of {folds[0]}" + (
                f", which has not seen this {what} in training." if unseen else "."
            )
        else:
            yield self.agreement(explained)
        nearest = ", which is closest to the mean" if len(folds) > 1 else ""
        yield f"Explained below: {explanation.model} of {explanation.fold}{nearest}."
        yield self.own_answer(explained)

    def other_slides(self, name: str) -> list[OtherSlide]:
        """Return the labelled test slides of the run, without that slide; none if unfinished.

        A slide that several folds tested counts once, with the mean of their answers.
        """
        if not self.run.finished or self.run.predictions.labels is None:
            return []
        table = self.run.predictions.labelled()
        labels, answers = table.truth
        found: dict[str, tuple[Label, list[NDArray[np.floating]]]] = {}
        for slide, label, row in zip(table.slides, labels.tolist(), answers, strict=True):
            if slide != name:
                found.setdefault(slide, (label, []))[1].append(row)
        return [OtherSlide(label, np.mean(rows, axis=0)) for label, rows in found.values()]

    # A run report

    @property
    @abstractmethod
    def task(self) -> str:
        """What is predicted, in a few words."""

    @abstractmethod
    def figures(self, predictions: Predictions) -> dict[str, Markup]:
        """Return figures of the test slides by title; a sentence where one cannot be drawn."""

    @abstractmethod
    def results(self, predictions: Predictions) -> Markup:
        """Return a table of predictions against labels, with its heading."""

    @abstractmethod
    def worst(self, predictions: Predictions, most: int) -> list[int]:
        """Return the rows of the worst predictions, the worst first."""

    @abstractmethod
    def best(self, predictions: Predictions) -> list[int]:
        """Return the rows of a few good predictions that are worth a report."""

    @abstractmethod
    def mistake(self, predictions: Predictions, row: int) -> str:
        """Return a prediction and its label in words."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Titles of the columns of the table of all slides that depend on the target."""

    @abstractmethod
    def cells(self, predictions: Predictions, row: int) -> Sequence[Cell]:
        """Return the cells of these columns."""

    @abstractmethod
    def marked(self, predictions: Predictions) -> set[int]:
        """Return the rows of the table of all slides that are marked."""


def how_many(values: NDArray[np.bool_]) -> str:
    """Return how many of several are true, in words."""
    true, n = int(values.sum()), len(values)
    if true == n:
        return f"all {n:,}" if n > 1 else "the only one"
    return f"{true:,} of {n:,} ({share(true / n)})" if true else f"none of {n:,}"
