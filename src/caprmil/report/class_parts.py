"""The parts of a report for a run that predicts classes: probabilities, confusion, mistakes."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from caprmil import figures
from caprmil.errors import CohortError, count
from caprmil.evaluation.predictions import Predictions
from caprmil.explain import KINDS, ExplainedSlide, Explanation
from caprmil.report.html_page import EMPTY, render
from caprmil.report.prediction_parts import Cell, PredictionParts, how_many
from caprmil.report.strip_chart import strip_chart
from caprmil.report.text_format import percent, signed
from caprmil.runs.run import Run
from caprmil.runs.scores import CALIBRATION
from caprmil.targets.reliability_bins import reliability as bins_of

MAX_CONTRASTS = 4  # classes whose evidence is shown

Groups = Mapping[str, NDArray[np.float64]]


class ConfusionCell(NamedTuple):
    """How often a label (row) was predicted as a class (column)."""

    slides: int
    share: float  # of the slides with that label
    is_right: bool


class ClassParts(PredictionParts):
    """What a report shows of predicted classes."""

    headline_metrics: ClassVar[tuple[str, ...]] = ("auc", "balanced_accuracy", "ace")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.classes = run.target.titles

    # A slide report

    def prediction(self, explained: ExplainedSlide) -> Markup:
        """Return the predicted class, its probability, the models, and the other test slides."""
        best, answer = likeliest(explained), explained.answer
        shown = answer.mean if answer.calibrated is None else answer.calibrated
        return render(
            "class_prediction.html",
            unit=self.run.predicts,
            predicted=self.classes[best],
            label=explained.label,
            probability=float(shown[best]),
            is_calibrated=answer.calibrated is not None,
            calibration=self.calibration(explained),
            bars=[(self.classes[n], float(shown[n])) for n in self.bar_order(shown)],
            models=" ".join(self.models(explained)),
            **self._cohort(explained),
        )

    def bar_order(self, shown: NDArray[np.float64]) -> list[int]:
        """Return the classes in the order of their bars: the likeliest first."""
        return [int(n) for n in np.argsort(-shown, kind="stable")]

    def calibration(self, explained: ExplainedSlide) -> str:
        """Return how the probability was calibrated, or why it was not."""
        answer, known = explained.answer, self.run.temperatures
        if answer.calibrated is not None:
            used = ", ".join(f"{known[fold]:.2f}" for fold in answer.by_fold)
            before = percent(float(answer.mean[likeliest(explained)]))
            return (
                f"Calibrated with the temperature of the fold ({used}), which was fitted on its "
                f"validation {self.run.predicts}s. Before calibration: {before}."
            )
        path = self.run.folder / CALIBRATION
        if not path.exists():
            return "Not calibrated: the run has no temperatures. It is unfinished, or an older one."
        missing = [fold for fold in answer.by_fold if fold not in known]
        reasons: dict[str, list[str]] = {}
        for note in self.run.calibration.notes:
            fold, _, reason = note.partition(": ")
            if fold in missing:
                reasons.setdefault(reason, []).append(fold)
        why = [f"{', '.join(folds)}: {reason}" for reason, folds in reasons.items()]
        return f"Not calibrated. {' '.join(why) or 'A fold has no temperature.'}"

    def agreement(self, explained: ExplainedSlide) -> str:
        best, by_fold = likeliest(explained), explained.answer.by_fold
        name = self.classes[best]
        each = sorted(float(p[best]) for p in by_fold.values())
        agree = sum(int(p.argmax()) == best for p in by_fold.values())
        same = "all" if agree == len(by_fold) else f"{agree}"
        return (
            f"Mean of {len(by_fold)} models; {same} of them predict {name}. Their probabilities "
            f"of {name} range from {percent(each[0])} to {percent(each[-1])} (standard "
            f"deviation {np.std(each, ddof=1):.3f}, before calibration)."
        )

    def own_answer(self, explained: ExplainedSlide) -> str:
        best, explanation = likeliest(explained), explained.explanation
        name, own = self.classes[best], self.classes[explanation.predicted]
        text = f"Its probability of {name} is {percent(float(explanation.answer[best]))}."
        return text if own == name else f"{text} That model alone predicts {own}."

    def _cohort(self, explained: ExplainedSlide) -> dict[str, object]:
        """Return how the slide compares with the run's test slides, as a chart and a sentence."""
        best = likeliest(explained)
        name, here = self.classes[best], float(explained.answer.mean[best])
        groups = self.test_slides(explained.name, best)
        models = [float(p[best]) for p in explained.answer.by_fold.values()]
        lower = [f"{how_many(values < here)} labelled {own}" for own, values in groups.items()]
        chart, unit = EMPTY, self.run.predicts
        if groups:
            chart = strip_chart(
                groups,
                here=here,
                models=models,
                unit=unit,
                title=f"Probability of {name}",
                alt=f"Probabilities of {name} of the test {unit}s by label; this {unit}: "
                f"{here:.3f}.",
            )
        return {"chart": chart, "lower": ", ".join(lower), "n_models": len(models)}

    def test_slides(self, name: str, number: int) -> Groups:
        """Return the probabilities of a class for all other test slides, by their label."""
        others = self.other_slides(name)
        groups = {}
        for code, label in enumerate(self.classes):
            own = [other.answer[number] for other in others if other.label == code]
            if own:
                groups[label] = np.array(own, dtype=np.float64)
        return groups

    def contrasts(self, explained: ExplainedSlide) -> list[int]:
        """Return the predicted class and, of more than two, the next likely ones."""
        order = np.argsort(-explained.answer.mean, kind="stable")[:MAX_CONTRASTS]
        two = len(explained.explanation.names) == 2
        return [likeliest(explained)] if two else [int(n) for n in order]

    def answer_text(self, value: float) -> str:
        return percent(value)

    def total_meaning(self, explanation: Explanation, total: float) -> str:
        """Return the probability of a lead, if it has one: two classes, and not an estimate."""
        estimated = explanation.method == "integrated gradients" or explanation.spread is not None
        if len(explanation.names) > 2 or estimated:
            return ""
        probability = percent(float(1 / (1 + np.exp(-total))))
        return f"A lead of {signed(total)} corresponds to a probability of {probability}."

    def evidence_remark(self, explained: ExplainedSlide) -> str:
        """Return what the evidence for one class says about the others."""
        classes, contrasts = explained.explanation.names, self.contrasts(explained)
        if len(classes) == 2:
            name = classes[contrasts[0]]
            (other,) = (c for c in classes if c != name)
            return f"Evidence against {name} is evidence for {other} of the same size."
        remark = "Evidence is for the lead of a class over the mean of the others."
        left = len(classes) - len(contrasts)
        verb = "is" if left == 1 else "are"
        more = f" {count(left, 'less likely class')} {verb} shown on the map only." if left else ""
        return remark + more

    def repeated_layers(self, explained: ExplainedSlide) -> list[str]:
        """Of two classes, a map of one is that of the other with its sign reversed."""
        two = len(explained.explanation.names) == 2
        kinds = ["evidence", *(KINDS[name].key for name in explained.explanation.maps)]
        return [f"{key}-{1 - likeliest(explained)}" for key in kinds] if two else []

    # A run report

    @property
    def task(self) -> str:
        """The classes."""
        return " or ".join(self.classes)

    def figures(self, predictions: Predictions) -> dict[str, Markup]:
        """Return ROC curves and the reliability of probabilities."""
        if predictions.labels is None:
            return {"ROC": Markup('<p class="quiet">There are no labels.</p>')}
        labelled = predictions.labelled()
        return {"ROC": roc(labelled), "Reliability": reliability(labelled)}

    def results(self, predictions: Predictions) -> Markup:
        """Return the confusion matrix."""
        cells: list[list[ConfusionCell]] = []
        if predictions.labels is not None:
            for label, row in enumerate(confusion(predictions.labelled())):
                whole = max(int(row.sum()), 1)
                cells.append(
                    [ConfusionCell(int(n), n / whole, label == at) for at, n in enumerate(row)]
                )
        return render("confusion.html", classes=predictions.target.titles, cells=cells)

    def worst(self, predictions: Predictions, most: int) -> list[int]:
        """Return the rows of mistakes: the lower the probability of the label, the worse."""
        if predictions.labels is None:
            return []
        labels = np.asarray(predictions.labels)
        best = predictions.answers.argmax(axis=1)
        wrong = np.flatnonzero((labels >= 0) & (labels != best))
        own = predictions.answers[wrong, labels[wrong]]
        return [int(row) for row in wrong[np.argsort(own, kind="stable")][:most]]

    def best(self, predictions: Predictions) -> list[int]:
        """Return, for each class, the correct prediction with the highest probability."""
        if predictions.labels is None:
            return []
        best = predictions.answers.argmax(axis=1)
        found = []
        for code in range(len(predictions.target.titles)):
            right = np.flatnonzero((np.asarray(predictions.labels) == code) & (best == code))
            if len(right):
                found.append(int(right[predictions.answers[right, code].argmax()]))
        return found

    def mistake(self, predictions: Predictions, row: int) -> str:
        """Return label, predicted class and its probability."""
        probabilities = predictions.answers[row]
        best = int(probabilities.argmax())
        label = self._label(predictions, row)
        fold = f", {predictions.folds[row]}" if predictions.folds else ""
        chance = percent(probabilities[best])
        return f"Labelled {label}, predicted {self.classes[best]} ({chance}){fold}"

    @property
    def columns(self) -> tuple[str, ...]:
        two = len(self.classes) == 2
        return (
            "Label",
            "Predicted",
            f"Probability of {self.classes[1]}" if two else "Its probability",
        )

    def cells(self, predictions: Predictions, row: int) -> tuple[Cell, ...]:
        """Return label, predicted class and probability: of two classes, that of the second."""
        probabilities = predictions.answers[row]
        best = int(probabilities.argmax())
        value = float(probabilities[1 if len(self.classes) == 2 else best])
        hidden = " wrong" if self._is_wrong(predictions, row) else ""
        return (
            Cell(text=self._label(predictions, row) or "–"),
            Cell(text=self.classes[best], hidden=hidden),
            Cell(text=f"{value:.4f}", value=value, hint=percent(value)),
        )

    def marked(self, predictions: Predictions) -> set[int]:
        """Return the rows whose predicted class is not the label."""
        return {row for row in range(len(predictions)) if self._is_wrong(predictions, row)}

    def _is_wrong(self, predictions: Predictions, row: int) -> bool:
        best = self.classes[int(predictions.answers[row].argmax())]
        return self._label(predictions, row) not in ("", best)

    def _label(self, predictions: Predictions, row: int) -> str:
        code = -1 if predictions.labels is None else int(predictions.labels[row])
        return self.classes[code] if code >= 0 else ""


def likeliest(explained: ExplainedSlide) -> int:
    """Return the class with the highest mean probability over the models of a run."""
    return int(explained.answer.mean.argmax())


def roc(predictions: Predictions) -> Markup:
    """Return ROC curves: of two classes by fold, of more by class."""
    folds = predictions.by_fold() or {f"all {predictions.unit}s": predictions}
    target = predictions.target
    truth = {name: (np.asarray(fold.labels), fold.answers) for name, fold in folds.items()}
    try:
        figure = figures.roc_curves(truth, target.titles, name=target.class_name)
    except CohortError as problem:
        return Markup('<p class="quiet">{}</p>').format(str(problem))
    return Markup(figures.as_svg(figure, alt="ROC curves"))


def reliability(predictions: Predictions) -> Markup:
    """Return observed frequency against predicted probability, for each fold and for all slides."""
    two = len(predictions.target.titles) == 2
    event = (
        predictions.target.titles[1] if two else f"the predicted {predictions.target.class_name}"
    )
    folds = {name: bins_of(*fold.labelled().truth) for name, fold in predictions.by_fold().items()}
    everything = bins_of(*predictions.labelled().truth)
    figure = figures.reliability(everything, event=event, folds=folds, unit=predictions.unit)
    return Markup(figures.as_svg(figure, alt="Reliability of the predicted probabilities"))


def confusion(predictions: Predictions) -> NDArray[np.int64]:
    """Return the number of slides by label (row) and prediction (column), over all folds."""
    size = len(predictions.target.titles)
    counts = np.zeros((size, size), dtype=np.int64)
    predicted = predictions.answers.argmax(axis=1)
    np.add.at(counts, (np.asarray(predictions.labels), predicted), 1)
    return counts
