"""The parts of a report for a run that predicts several labels: a probability for each of them."""

from typing import Any, ClassVar, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from caprmil import figures
from caprmil.evaluation.predictions import Predictions
from caprmil.explain import ExplainedSlide, Explanation
from caprmil.report.html_page import EMPTY, render
from caprmil.report.prediction_parts import Cell, PredictionParts, how_many
from caprmil.report.strip_chart import strip_chart
from caprmil.report.text_format import percent, signed
from caprmil.runs.run import Run
from caprmil.targets.target import Label

MAX_CONTRASTS = 4  # labels whose evidence is shown
SIDES = ("negative", "positive")


class LabelRow(NamedTuple):
    """One label of a slide: its name, its probability, and whether it is positive, if known."""

    name: str
    probability: float
    truth: str
    is_right: bool | None


class LabelParts(PredictionParts):
    """What a report shows of several labels."""

    headline_metrics: ClassVar[tuple[str, ...]] = ("auc", "average_precision", "balanced_accuracy")
    no_worst: ClassVar[str] = "There are none: every known label was predicted correctly."
    marked_note: ClassVar[str] = "of them with a wrong label (shaded)"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.names = run.target.names

    # A slide report

    def prediction(self, explained: ExplainedSlide) -> Markup:
        """Return the probability of each label, the models, and the other test slides."""
        mean = explained.answer.mean
        known = self._parsed(explained.label)
        rows = [
            LabelRow(name, float(p), *_judged(float(p), true))
            for name, p, true in zip(self.names, mean, known, strict=True)
        ]
        order = np.argsort(-mean, kind="stable")
        best = int(order[0])
        groups = self._groups(explained.name, best)
        here = float(mean[best])
        chart, unit = EMPTY, self.run.predicts
        if groups:
            chart = strip_chart(
                groups,
                here=here,
                models=[float(p[best]) for p in explained.answer.by_fold.values()],
                unit=unit,
                title=f"Probability of {self.names[best]}",
                alt=f"Probabilities of {self.names[best]} of the test {unit}s; this {unit}: "
                f"{here:.3f}.",
            )
        lower = [f"{how_many(values < here)} {side}" for side, values in groups.items()]
        return render(
            "label_prediction.html",
            unit=unit,
            predicted=self.run.target.predicted(mean[None])[0],
            rows=[rows[n] for n in order],
            first=self.names[best],
            chart=chart,
            lower=", ".join(lower),
            n_models=len(explained.answer.by_fold),
            models=" ".join(self.models(explained)),
        )

    def agreement(self, explained: ExplainedSlide) -> str:
        by_fold = explained.answer.by_fold
        best = int(explained.answer.mean.argmax())
        each = sorted(float(p[best]) for p in by_fold.values())
        return (
            f"Mean of {len(by_fold)} models. Their probabilities of {self.names[best]} range from "
            f"{percent(each[0])} to {percent(each[-1])} (standard deviation "
            f"{np.std(each, ddof=1):.3f})."
        )

    def own_answer(self, explained: ExplainedSlide) -> str:
        best = int(explained.answer.mean.argmax())
        own = percent(float(explained.explanation.answer[best]))
        return f"Its probability of {self.names[best]} is {own}."

    def contrasts(self, explained: ExplainedSlide) -> list[int]:
        """Return the explained label, and the next likely ones."""
        first = explained.explanation.predicted
        order = np.argsort(-explained.answer.mean, kind="stable")
        return [first, *(int(n) for n in order if n != first)][:MAX_CONTRASTS]

    def answer_text(self, value: float) -> str:
        return percent(value)

    def total_meaning(self, explanation: Explanation, total: float) -> str:
        """Return the probability of a logit, unless it is an estimate."""
        if explanation.method == "integrated gradients" or explanation.spread is not None:
            return ""
        probability = percent(float(1 / (1 + np.exp(-total))))
        return f"A logit of {signed(total)} corresponds to a probability of {probability}."

    def evidence_remark(self, explained: ExplainedSlide) -> str:
        left = len(self.names) - len(self.contrasts(explained))
        remark = "Labels are independent: evidence for one is not evidence against another."
        return remark + (f" The other {left} are shown on the map only." if left > 0 else "")

    def _groups(self, name: str, number: int) -> dict[str, NDArray[np.float64]]:
        """Return the probabilities of a label for the other test slides, by their label."""
        others = self.other_slides(name)
        found = {}
        for code, side in enumerate(SIDES):
            own = [other.answer[number] for other in others if other.label[number] == code]
            if own:
                found[side] = np.array(own, dtype=np.float64)
        return found

    def _parsed(self, text: str | None) -> Label:
        return self.run.target.missing if not text else self.run.target.parse_label(text)

    # A run report

    @property
    def task(self) -> str:
        shown = ", ".join(self.names[:6]) + (", ..." if len(self.names) > 6 else "")
        return f"{len(self.names)} labels: {shown}"

    def figures(self, predictions: Predictions) -> dict[str, Markup]:
        """Return ROC curves of each label, the folds pooled."""
        if predictions.labels is None:
            return {"ROC": Markup('<p class="quiet">There are no labels.</p>')}
        curves = predictions.target.figures({"all": predictions.labelled().truth})
        if not curves:
            return {"ROC": Markup('<p class="quiet">No label is both positive and negative.</p>')}
        drawn = {"ROC": curves["roc.png"]}
        return {
            n: Markup(figures.as_svg(own, alt=f"{n} of each label")) for n, own in drawn.items()
        }

    def results(self, predictions: Predictions) -> Markup:
        """Return how often each label is positive, and how often it was found."""
        rows = []
        if predictions.labels is not None:
            for name, part in predictions.target.parts.items():
                labels, answers = part.known_of(*predictions.labelled().truth)
                said = answers[:, 0] > 0.5
                found, missed = (
                    int((said & (labels == 1)).sum()),
                    int((~said & (labels == 1)).sum()),
                )
                false, none = int((said & (labels == 0)).sum()), int((~said & (labels == 0)).sum())
                rows.append([name, len(labels), found + missed, found, missed, false, none])
        return render("label_results.html", unit=predictions.unit, rows=rows)

    def worst(self, predictions: Predictions, most: int) -> list[int]:
        """Return the rows with a wrong label, the most certain mistakes first."""
        errors = self._errors(predictions).max(axis=1, initial=0)
        wrong = np.flatnonzero(errors > 0.5)
        return [int(row) for row in wrong[np.argsort(-errors[wrong], kind="stable")][:most]]

    def best(self, predictions: Predictions) -> list[int]:
        """Return, for each label, the positive slide with the highest probability of it."""
        if predictions.labels is None:
            return []
        found = dict[int, None]()
        for number in range(len(self.names)):
            own = np.flatnonzero(predictions.labels[:, number] == 1)
            if len(own):
                found[int(own[predictions.answers[own, number].argmax()])] = None
        return list(found)

    def mistake(self, predictions: Predictions, row: int) -> str:
        """Return the wrong labels with their probabilities."""
        errors = self._errors(predictions)[row]
        wrong = [n for n in np.argsort(-errors, kind="stable") if errors[n] > 0.5]
        texts = [
            f"{self.names[n]} is {SIDES[int(predictions.labels[row, n])]}, predicted with a "
            f"probability of {percent(float(predictions.answers[row, n]))}"
            for n in wrong
            if predictions.labels is not None
        ]
        fold = f" ({predictions.folds[row]})" if predictions.folds else ""
        return "; ".join(texts) + fold

    @property
    def columns(self) -> tuple[str, ...]:
        return ("Positive labels", "Predicted", "Wrong labels")

    def cells(self, predictions: Predictions, row: int) -> tuple[Cell, ...]:
        truth: Any = self.run.target.missing
        if predictions.labels is not None:
            truth = predictions.labels[row]
        names = zip(self.names, truth, strict=True)
        positive = ", ".join(name for name, label in names if label == 1)
        answer = predictions.answers[row]
        shown = ", ".join(
            f"{n} {percent(float(p))}" for n, p in zip(self.names, answer, strict=True)
        )
        wrong = int((self._errors(predictions)[row] > 0.5).sum())
        known = any(label >= 0 for label in truth)
        return (
            Cell(text=positive or ("none" if known else "–")),
            Cell(text=self.run.target.predicted(answer[None])[0], hint=shown),
            Cell(text=str(wrong) if known else "–", value=wrong if known else float("nan")),
        )

    def marked(self, predictions: Predictions) -> set[int]:
        """Return the rows with a wrong label."""
        wrong = (self._errors(predictions) > 0.5).any(axis=1)
        return set(np.flatnonzero(wrong).tolist())

    def _errors(self, predictions: Predictions) -> NDArray[np.float64]:
        """Return how far each probability is from its label; 0 if that is not known."""
        if predictions.labels is None:
            return np.zeros(predictions.answers.shape)
        known = predictions.labels >= 0
        return np.where(known, np.abs(predictions.answers - predictions.labels), 0.0)


def _judged(probability: float, true: float) -> tuple[str, bool | None]:
    """Return the label in words, and whether the probability is on its side of 0.5."""
    if true < 0:
        return "not known", None
    return SIDES[int(true)], (probability > 0.5) == bool(true)
