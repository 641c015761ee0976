"""The parts of a report for a run that predicts survival: risk groups, survival at horizons."""

from typing import ClassVar, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from caprmil import figures
from caprmil.evaluation.predictions import Predictions
from caprmil.explain import ExplainedSlide, Explanation
from caprmil.report.html_page import EMPTY, render
from caprmil.report.prediction_parts import Cell, PredictionParts, how_many
from caprmil.report.strip_chart import Axis, strip_chart
from caprmil.report.text_format import number, percent, signed
from caprmil.runs.run import Run
from caprmil.targets import Survival
from caprmil.targets.risk_groups import (
    GROUPS,
    calibration_panels,
    group_curves,
    log_rank_of_groups,
    risk_groups,
)

Values = NDArray[np.float64]


class GroupRow(NamedTuple):
    """A risk group in the table of results."""

    name: str
    patients: int
    events: int
    median: str
    survival: list[str]


class SurvivalParts(PredictionParts):
    """What a report shows of predicted survival."""

    headline_metrics: ClassVar[tuple[str, ...]] = ("c_index", "auc", "ibs")
    worst_title: ClassVar[str] = "Furthest from what happened"
    no_worst: ClassVar[str] = "There are no labels."
    marked_filter: ClassVar[str] = "high risk only"
    marked_note: ClassVar[str] = "of them with a high risk (shaded)"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        assert isinstance(run.target, Survival)
        self.target = run.target

    def when(self, time: float) -> str:
        """Return a time with its unit."""
        return f"{number(time)} {self.target.unit}".rstrip()

    # A slide report

    def prediction(self, explained: ExplainedSlide) -> Markup:
        """Return the risk, its group and the survival at horizons, among the test slides."""
        answer = explained.answer.mean
        others = self.other_slides(explained.name)
        risks = np.array([other.answer[0] for other in others], dtype=np.float64)
        died = np.array([other.label[1] > 0 for other in others], dtype=np.bool_)
        return render(
            "survival_prediction.html",
            unit=self.run.predicts,
            risk=float(answer[0]),
            shown=signed(float(answer[0])),
            ratio=f"{np.exp(np.clip(answer[0], -50, 50)):.3g}",
            group=self.target.predicted(answer[None])[0],
            label=self._label_text(explained.label),
            survival=[
                (title, percent(float(value)))
                for title, value in zip(self.target.titles[1:], answer[1:], strict=True)
            ],
            lower=how_many(risks < answer[0]) if len(others) else "",
            chart=self._chart(explained, risks, died) if len(others) else EMPTY,
            n_models=len(explained.answer.by_fold),
            models=" ".join(self.models(explained)),
        )

    def agreement(self, explained: ExplainedSlide) -> str:
        each = sorted(float(answer[0]) for answer in explained.answer.by_fold.values())
        low, high = signed(each[0]), signed(each[-1])
        agree = sum((risk > 0) == (explained.answer.mean[0] > 0) for risk in each)
        return (
            f"Mean of {len(each)} models; {agree} of them predict this risk group. Their risks "
            f"range from {low} to {high} (standard deviation {np.std(each, ddof=1):.3f})."
        )

    def own_answer(self, explained: ExplainedSlide) -> str:
        return f"Its risk is {signed(float(explained.explanation.answer[0]))}."

    def answer_text(self, value: float) -> str:
        return signed(value)

    def total_meaning(self, explanation: Explanation, total: float) -> str:
        """Return the risk that a sum stands for, unless it is an estimate."""
        if not explanation.exact or explanation.spread is not None:
            return ""
        risk = float(explanation.answer[0])
        return f"A log hazard of {signed(total)} corresponds to a risk of {signed(risk)}."

    def _chart(self, explained: ExplainedSlide, risks: Values, died: NDArray[np.bool_]) -> Markup:
        here = float(explained.answer.mean[0])
        models = [float(answer[0]) for answer in explained.answer.by_fold.values()]
        groups = {"event": risks[died], "censored": risks[~died]}
        return strip_chart(
            {name: own for name, own in groups.items() if len(own)},
            here=here,
            models=models,
            unit=self.run.predicts,
            axis=Axis.around([*risks, *models, here, 0.0]),
            title="Risk (log hazard ratio)",
            alt=f"Risks of the other test {self.run.predicts}s by event; this {self.run.predicts}: "
            f"{signed(here)}.",
        )

    def _label_text(self, label: str | None) -> str | None:
        """Return what happened, in words."""
        if label is None:
            return None
        time, event = self.target.parse_label(label)
        return f"{'event at' if event else 'censored at'} {self.when(time)}"

    # A run report

    @property
    def task(self) -> str:
        return "survival: the risk of an event, and its time"

    def figures(self, predictions: Predictions) -> dict[str, Markup]:
        """Return the survival curves of the risk groups, and calibration at horizons."""
        title = "Survival by risk group"
        if predictions.labels is None:
            return {title: Markup('<p class="quiet">There are no labels.</p>')}
        labels, answers = predictions.scored().truth
        curves, heading = group_curves(labels, answers)
        drawn = figures.survival_curves(curves, xlabel=self.target.time_title, title=heading)
        alt = "Kaplan-Meier curves of the risk groups, with the numbers at risk"
        found = {title: Markup(figures.as_svg(drawn, alt=alt))}
        if panels := calibration_panels(labels, answers, self.target.horizons, self.target.unit):
            alt = "Observed against predicted survival at each horizon"
            svg = figures.as_svg(figures.survival_calibration(panels), alt=alt)
            wide = f'<div class="wide"><div class="wide-figure">{svg}</div></div>'
            found["Calibration at horizons"] = Markup(wide)
        return found

    def results(self, predictions: Predictions) -> Markup:
        """Return the events and the survival of each risk group."""
        if predictions.labels is None:
            return render("survival_groups.html", rows=[])
        labels, answers = predictions.scored().truth
        rows = []
        for group in risk_groups(labels, answers):
            median = group.curve.median
            followed = group.labels[:, 0].max()
            rows.append(
                GroupRow(
                    name=group.name,
                    patients=len(group.labels),
                    events=group.events,
                    median="not reached" if median is None else self.when(median),
                    survival=[
                        percent(float(group.curve.at([time])[0])) if time < followed else "–"
                        for time in self.target.horizons
                    ],
                )
            )
        p = log_rank_of_groups(labels, answers)
        return render(
            "survival_groups.html",
            rows=rows,
            horizons=[f"at {self.when(time)}" for time in self.target.horizons],
            p="" if np.isnan(p) else "p < 0.001" if p < 0.001 else f"p = {p:.3f}",
        )

    def worst(self, predictions: Predictions, most: int) -> list[int]:
        """Return early events at a low risk and late censorings at a high one, the worst first."""
        rows, apart = self._apart(predictions)
        return [int(row) for row in rows[np.argsort(-apart, kind="stable")][:most]]

    def best(self, predictions: Predictions) -> list[int]:
        """Return an event at a high risk, and a slide that was followed for long at a low one."""
        rows, _ = self._apart(predictions)
        if not len(rows):
            return []
        labels, risks = np.asarray(predictions.labels)[rows], predictions.answers[rows, 0]
        died = np.flatnonzero((labels[:, 1] > 0) & (risks > 0))
        lived = np.flatnonzero((labels[:, 0] > np.median(labels[:, 0])) & (risks <= 0))
        found = []
        if len(died):
            found.append(int(rows[died[risks[died].argmax()]]))
        if len(lived):
            found.append(int(rows[lived[risks[lived].argmin()]]))
        return found or [int(rows[risks.argmax()])]

    def _apart(self, predictions: Predictions) -> tuple[NDArray[np.int64], Values]:
        """Return the labelled rows, and how far each is from what happened.

        It is the share of the other slides that are comparable and in the wrong order.
        """
        if predictions.labels is None:
            return np.array([], dtype=np.int64), np.zeros(0)
        rows = np.flatnonzero(predictions.target.known(predictions.labels))
        labels, risks = np.asarray(predictions.labels)[rows], predictions.answers[rows, 0]
        times, died = labels[:, 0], labels[:, 1] > 0
        before = died[:, None] & (times[:, None] < times)  # the first of a pair has the event
        wrong = before & (risks[:, None] < risks)
        pairs = before.sum(axis=0) + before.sum(axis=1)
        return rows, (wrong.sum(axis=0) + wrong.sum(axis=1)) / np.maximum(pairs, 1)

    def mistake(self, predictions: Predictions, row: int) -> str:
        answer = predictions.answers[row]
        label = self.target.show_label(np.asarray(predictions.labels)[row].tolist())
        fold = f", {predictions.folds[row]}" if predictions.folds else ""
        text = str(self._label_text(label))
        return f"{text[0].upper()}{text[1:]}, {self.target.predicted(answer[None])[0]} " + (
            f"({signed(float(answer[0]))}){fold}"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.target.time_title, "Event", "Group", "Risk", *self.target.titles[1:])

    def cells(self, predictions: Predictions, row: int) -> tuple[Cell, ...]:
        answer = predictions.answers[row]
        time, event = Cell(text="–", value=float("nan")), Cell(text="–")
        known = predictions.labels is not None and bool(
            predictions.target.known(predictions.labels[row : row + 1])[0]
        )
        if known:
            label = np.asarray(predictions.labels)[row]
            time = Cell(text=number(float(label[0])), value=float(label[0]))
            event = Cell(text="event" if label[1] else "censored")
        return (
            time,
            event,
            Cell(text=GROUPS[int(answer[0] > 0)]),
            Cell(text=signed(float(answer[0])), value=float(answer[0])),
            *(Cell(text=percent(float(value)), value=float(value)) for value in answer[1:]),
        )

    def marked(self, predictions: Predictions) -> set[int]:
        """Return the rows of the group of high risk."""
        return {int(row) for row in np.flatnonzero(predictions.answers[:, 0] > 0)}
