"""The parts of a report for a run that predicts a number: predicted against true, errors."""

from typing import ClassVar

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from caprmil import figures
from caprmil.evaluation.predictions import Predictions
from caprmil.explain import ExplainedSlide, Explanation
from caprmil.report.html_page import EMPTY, render
from caprmil.report.prediction_parts import Cell, PredictionParts, how_many
from caprmil.report.strip_chart import Axis, strip_chart
from caprmil.report.text_format import decimals, fixed, signed, signed_fixed
from caprmil.runs.run import Run

LARGE = 0.9  # errors above this quantile of all errors are marked

Values = NDArray[np.float64]


class ValueParts(PredictionParts):
    """What a report shows of predicted numbers."""

    headline_metrics: ClassVar[tuple[str, ...]] = ("r2", "mae", "spearman")
    worst_title: ClassVar[str] = "Largest errors"
    no_worst: ClassVar[str] = "There are no labels."
    marked_filter: ClassVar[str] = "largest errors only"
    marked_note: ClassVar[str] = "of them with the largest errors (shaded)"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        labels = [float(run.target.parse_label(cell)) for cell in run.labels.values()]
        self.decimals = decimals(float(np.std(labels)) if labels else 0.0)

    def number(self, value: float) -> str:
        """Return a number with the decimals that matter, given how far labels differ."""
        return fixed(value, self.decimals)

    def signed(self, value: float) -> str:
        """Return a number with its sign."""
        return signed_fixed(value, self.decimals)

    # A slide report

    def prediction(self, explained: ExplainedSlide) -> Markup:
        """Return the predicted and the true number, and where they lie among the test slides."""
        value, true = float(explained.answer.mean[0]), self._true(explained)
        others = self.other_slides(explained.name)
        labels = np.array([other.label for other in others], dtype=np.float64)
        predicted = np.array([other.answer[0] for other in others], dtype=np.float64)
        larger = ""
        if true is not None and len(others):
            larger = how_many(np.abs(predicted - labels) < abs(value - true))
        return render(
            "value_prediction.html",
            unit=self.run.predicts,
            value=value,
            shown=self.number(value),
            interval=self._interval(explained),
            label=None if true is None else self.number(true),
            error=None if true is None else self.signed(value - true),
            larger=larger,
            lower=how_many(predicted < value) if len(others) else "",
            lower_labels=how_many(labels < value) if len(others) else "",
            outside=_outside(labels, value) if len(others) else "",
            chart=self._chart(explained, predicted, labels) if len(others) else EMPTY,
            n_models=len(explained.answer.by_fold),
            models=" ".join(self.models(explained)),
        )

    def _interval(self, explained: ExplainedSlide) -> str:
        """Return the predicted interval, if the run has some."""
        if len(explained.answer.mean) == 1:
            return ""
        low, high = (self.number(float(end)) for end in explained.answer.mean[1:])
        level = self.run.target.columns[1].partition("_")[2]
        return f"{level} % interval: {low} to {high}."

    def agreement(self, explained: ExplainedSlide) -> str:
        each = sorted(float(answer[0]) for answer in explained.answer.by_fold.values())
        low, high, spread = map(self.number, (each[0], each[-1], float(np.std(each, ddof=1))))
        return (
            f"Mean of {len(each)} models. Their predictions range from {low} to {high} (standard "
            f"deviation {spread})."
        )

    def own_answer(self, explained: ExplainedSlide) -> str:
        return f"It predicts {self.number(float(explained.explanation.answer[0]))}."

    def answer_text(self, value: float) -> str:
        return self.number(value)

    def total_meaning(self, explanation: Explanation, total: float) -> str:
        """Return the predicted number that a sum stands for, unless it is an estimate."""
        if not explanation.exact or explanation.spread is not None:
            return ""
        value = self.number(float(explanation.answer[0]))
        return f"A difference of {signed(total)} corresponds to a predicted value of {value}."

    def _chart(self, explained: ExplainedSlide, predicted: Values, labels: Values) -> Markup:
        here = float(explained.answer.mean[0])
        models = [float(answer[0]) for answer in explained.answer.by_fold.values()]
        unit = self.run.predicts
        alt = f"Predicted and true values of the other test {unit}s"
        return strip_chart(
            {"predicted": predicted, "true value": labels},
            here=here,
            models=models,
            unit=unit,
            axis=Axis.around([*predicted, *labels, *models, here]),
            title="Value",
            alt=f"{alt}; this {unit}: {self.number(here)}.",
        )

    def _true(self, explained: ExplainedSlide) -> float | None:
        return None if explained.label is None else float(explained.label)

    # A run report

    @property
    def task(self) -> str:
        return f"{self.run.target.kind}, a number per {self.run.predicts}"

    def figures(self, predictions: Predictions) -> dict[str, Markup]:
        """Return predicted against true numbers, and residuals."""
        if predictions.labels is None:
            return {"Predicted and true": Markup('<p class="quiet">There are no labels.</p>')}
        table = predictions.labelled()
        folds = table.by_fold() or {f"all {table.unit}s": table}
        points = {name: (fold.truth[0], fold.answers[:, 0]) for name, fold in folds.items()}
        scatter = figures.predicted_against_true(points, title=f"Test {table.unit}s")
        residuals = figures.residuals(points, title=f"Test {table.unit}s")
        return {
            "Predicted and true": Markup(
                figures.as_svg(
                    scatter, alt=f"Predicted against true value of each test {table.unit}"
                )
            ),
            "Errors": Markup(figures.as_svg(residuals, alt="Error against true value")),
        }

    def results(self, predictions: Predictions) -> Markup:
        """Return the errors by quarter of the true value: low ones are often predicted too high."""
        if predictions.labels is None:
            return render("value_errors.html", unit=predictions.unit, rows=[])
        table = predictions.labelled()
        labels, errors = table.truth[0], _errors(table)
        codes, _ = table.target.strata({str(n): v for n, v in enumerate(labels.tolist())})
        strata = np.array(list(codes.values()))
        rows = []
        for code in np.unique(strata):
            own = strata == code
            low, high = (self.number(float(end)) for end in (labels[own].min(), labels[own].max()))
            mean, size = float(errors[own].mean()), float(np.abs(errors[own]).mean())
            rows.append((f"{low} to {high}", int(own.sum()), self.signed(mean), self.number(size)))
        return render("value_errors.html", unit=predictions.unit, rows=rows)

    def worst(self, predictions: Predictions, most: int) -> list[int]:
        """Return the rows of the largest errors."""
        rows = self._labelled_rows(predictions)
        sizes = np.abs(_errors(predictions))[rows]
        return [int(row) for row in rows[np.argsort(-sizes, kind="stable")][:most]]

    def best(self, predictions: Predictions) -> list[int]:
        """Return the smallest error in the lower half of the labels, and in the upper half."""
        rows = self._labelled_rows(predictions)
        if not len(rows):
            return []
        labels, sizes = np.asarray(predictions.labels)[rows], np.abs(_errors(predictions))[rows]
        middle = np.median(labels)
        halves = [np.flatnonzero(labels <= middle), np.flatnonzero(labels > middle)]
        return [int(rows[half[sizes[half].argmin()]]) for half in halves if len(half)]

    def mistake(self, predictions: Predictions, row: int) -> str:
        true, value = self._label(predictions, row), float(predictions.answers[row, 0])
        assert true is not None
        fold = f", {predictions.folds[row]}" if predictions.folds else ""
        shown = f"True value {self.number(true)}, predicted {self.number(value)}"
        return f"{shown} (error {self.signed(value - true)}){fold}"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("True value", "Predicted", "Error")

    def cells(self, predictions: Predictions, row: int) -> tuple[Cell, ...]:
        true, value = self._label(predictions, row), float(predictions.answers[row, 0])
        if true is None:
            unknown = Cell(text="–", value=float("nan"))
            return unknown, Cell(text=self.number(value), value=value), unknown
        return (
            Cell(text=self.number(true), value=true),
            Cell(text=self.number(value), value=value),
            Cell(text=self.signed(value - true), value=value - true),
        )

    def marked(self, predictions: Predictions) -> set[int]:
        """Return the rows of the largest tenth of errors."""
        rows = self._labelled_rows(predictions)
        if not len(rows):
            return set()
        sizes = np.abs(_errors(predictions))[rows]
        return {int(row) for row in rows[sizes > np.quantile(sizes, LARGE)]}

    def _label(self, predictions: Predictions, row: int) -> float | None:
        value = np.nan if predictions.labels is None else float(predictions.labels[row])
        return None if np.isnan(value) else value

    def _labelled_rows(self, predictions: Predictions) -> NDArray[np.int64]:
        if predictions.labels is None:
            return np.array([], dtype=np.int64)
        return np.flatnonzero(predictions.target.known(predictions.labels))


def _errors(predictions: Predictions) -> Values:
    """Return predicted minus true numbers."""
    if predictions.labels is None:
        return np.full(len(predictions), np.nan)
    return np.asarray(predictions.answers[:, 0] - predictions.labels, dtype=np.float64)


def _outside(labels: Values, value: float) -> str:
    """Return a warning if a number is outside of the range of labels."""
    low, high = float(labels.min()), float(labels.max())
    if low <= value <= high:
        return ""
    side = "below" if value < low else "above"
    return f"The predicted value is {side} all of their true values."
