"""The parts of a report for a run that predicts several targets: those of each, one by one."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import ClassVar

from markupsafe import Markup

from caprmil.evaluation.predictions import Predictions
from caprmil.explain import ExplainedSlide, Explanation
from caprmil.report.html_page import render
from caprmil.report.prediction_parts import Cell, PredictionParts
from caprmil.runs.run import Run
from caprmil.targets.part import Part

IDS = re.compile(r' id="[a-z]+"')


class SeveralParts(PredictionParts):
    """What a report shows of several targets."""

    worst_title: ClassVar[str] = "Worst predictions"
    no_worst: ClassVar[str] = "There are none."
    marked_filter: ClassVar[str] = "mistakes and largest errors only"
    marked_note: ClassVar[str] = "of them with a mistake or a large error (shaded)"

    def __init__(self, run: Run) -> None:
        from caprmil.report.parts_registry import parts_of

        super().__init__(run)
        self.parts = {name: parts_of(run.part(name)) for name in run.target.parts}
        self.first = next(iter(self.parts.values()))
        self._split: tuple[Predictions, dict[str, Predictions]] | None = None

    @property
    def headline_metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"{name}.{own.run.target.headline}" for name, own in self.parts.items())

    # A slide report

    def prediction(self, explained: ExplainedSlide) -> Markup:
        shown = {n: own.prediction(part_of(explained, n, own.run)) for n, own in self.parts.items()}
        # An id is only once on a page.
        targets = [(name, Markup(IDS.sub("", text))) for name, text in shown.items()]
        return render("several_predictions.html", targets=targets)

    def agreement(self, explained: ExplainedSlide) -> str:
        return self.first.agreement(part_of(explained, next(iter(self.parts))))

    def own_answer(self, explained: ExplainedSlide) -> str:
        return self.first.own_answer(part_of(explained, next(iter(self.parts))))

    def contrasts(self, explained: ExplainedSlide) -> list[int]:
        """Return those of the first target, then the first one of each other target."""
        found: list[int] = []
        for number, (name, own) in enumerate(self.parts.items()):
            view = part_of(explained, name)
            start = explained.explanation.target.parts[name].contrasts.start
            shown = own.contrasts(view) if number == 0 else [view.explanation.predicted]
            found += [start + contrast for contrast in shown]
        return found

    def answer_text(self, value: float) -> str:
        """Return a number of the first target: the one that regions are measured for."""
        return self.first.answer_text(value)

    def total_meaning(self, explanation: Explanation, total: float) -> str:  # noqa: ARG002
        return ""

    def evidence_remark(self, explained: ExplainedSlide) -> str:  # noqa: ARG002
        first, *others = self.parts
        return f"Shown for {first}, the first target; {', '.join(others)} below, folded away."

    # A run report

    @property
    def task(self) -> str:
        return "; ".join(f"{name}: {own.task}" for name, own in self.parts.items())

    def figures(self, predictions: Predictions) -> dict[str, Markup]:
        return {
            f"{name}: {title}": figure
            for name, own in self.parts.items()
            for title, figure in own.figures(self._of(predictions, name)).items()
        }

    def results(self, predictions: Predictions) -> Markup:
        return render(
            "several_results.html",
            targets=[(n, own.results(self._of(predictions, n))) for n, own in self.parts.items()],
        )

    def worst(self, predictions: Predictions, most: int) -> list[int]:
        """Return the worst predictions of each target in turn."""
        rows = [own.worst(self._of(predictions, n), most) for n, own in self.parts.items()]
        return _in_turn(rows)[:most]

    def best(self, predictions: Predictions) -> list[int]:
        return _in_turn([own.best(self._of(predictions, n)) for n, own in self.parts.items()])

    def mistake(self, predictions: Predictions, row: int) -> str:
        """Return what is wrong, for the targets whose label is known."""
        texts = []
        for name, own in self.parts.items():
            table = self._of(predictions, name)
            if row in own.worst(table, len(table)):
                texts.append(f"{name}: {own.mistake(table, row)}")
        return ". ".join(texts)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(
            f"{name}: {title}" for name, own in self.parts.items() for title in own.columns
        )

    def cells(self, predictions: Predictions, row: int) -> tuple[Cell, ...]:
        return tuple(self._cells(predictions, row))

    def _cells(self, predictions: Predictions, row: int) -> Iterator[Cell]:
        for name, own in self.parts.items():
            yield from own.cells(self._of(predictions, name), row)

    def marked(self, predictions: Predictions) -> set[int]:
        own = (own.marked(self._of(predictions, name)) for name, own in self.parts.items())
        return set[int]().union(*own)

    def _of(self, predictions: Predictions, name: str) -> Predictions:
        """Return the predictions of a target; split once for a table."""
        if self._split is None or self._split[0] is not predictions:
            self._split = predictions, {each: predictions.part(each) for each in self.parts}
        return self._split[1][name]


def part_of(explained: ExplainedSlide, name: str, run: Run | None = None) -> ExplainedSlide:
    """Return an explained slide as if only one of its several targets were predicted.

    `run` is that of the target, and calibrates the answers if it is given.
    """
    explanation, answer = explained.explanation, explained.answer
    part = explanation.target.parts[name]
    label, by_fold = None, {fold: own[part.answers] for fold, own in answer.by_fold.items()}
    if explained.label is not None:
        own = part.label_of(explanation.target.parse_label(explained.label))
        label = None if own is None else part.target.show_label(own)
    return replace(
        explained,
        label=label,
        answer=replace(
            answer,
            mean=answer.mean[part.answers],
            calibrated=None if run is None else run.calibrate(by_fold),
            by_fold=by_fold,
        ),
        explanation=_explanation_of(explanation, part),
        regions=None,
    )


def _explanation_of(explanation: Explanation, part: Part) -> Explanation:
    attention, scores = explanation.class_attention, explanation.scores
    return replace(
        explanation,
        target=part.target,
        answer=explanation.answer[part.answers],
        logits=explanation.logits[part.outputs],
        rest=explanation.rest[part.outputs],
        evidence=explanation.evidence[:, part.outputs],
        class_attention=None if attention is None else attention[part.outputs],
        scores=None if scores is None else scores[:, part.outputs],
        maps={name: values[:, part.contrasts] for name, values in explanation.maps.items()},
    )


def _in_turn(rows: Iterable[list[int]]) -> list[int]:
    """Return the first of each list, then the second of each, without repetition."""
    found = (row for turn in zip_longest(*rows) for row in turn if row is not None)
    return list(dict.fromkeys(found))
