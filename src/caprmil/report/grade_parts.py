"""The parts of a report for a run that predicts grades: as for classes, but in their order."""

from typing import Any, ClassVar

import numpy as np

from caprmil.evaluation.predictions import Predictions
from caprmil.explain import ExplainedSlide, Explanation
from caprmil.report.class_parts import ClassParts, likeliest
from caprmil.report.text_format import percent, signed


class GradeParts(ClassParts):
    """What a report shows of predicted grades."""

    headline_metrics: ClassVar[tuple[str, ...]] = ("kappa", "grade_mae", "adjacent_accuracy")

    # A slide report

    def bar_order(self, shown: np.ndarray[Any, Any]) -> list[int]:
        """Return the grades from low to high."""
        return list(range(len(shown)))

    def own_answer(self, explained: ExplainedSlide) -> str:
        best, explanation = likeliest(explained), explained.explanation
        name, own = self.classes[best], self.classes[int(explanation.answer.argmax())]
        text = f"Its probability of {name} is {percent(float(explanation.answer[best]))}."
        return text if own == name else f"{text} That model alone predicts {own}."

    def contrasts(self, explained: ExplainedSlide) -> list[int]:
        """Return the step to the predicted grade, and the one from it to the next."""
        best, steps = likeliest(explained), len(explained.explanation.names)
        return [step for step in (best - 1, best) if 0 <= step < steps]

    def total_meaning(self, explanation: Explanation, total: float) -> str:
        """Return the probability of a step, unless its sum is an estimate."""
        if not explanation.exact or explanation.spread is not None:
            return ""
        probability = percent(float(1 / (1 + np.exp(-total))))
        return f"Log odds of {signed(total)} correspond to a probability of {probability}."

    def evidence_remark(self, explained: ExplainedSlide) -> str:  # noqa: ARG002
        return (
            "Each step between two grades has its own evidence: for a grade above, among slides "
            "that have at least the grade below. The steps to and from the predicted grade are "
            "shown; the others are on the map."
        )

    def repeated_layers(self, explained: ExplainedSlide) -> list[str]:  # noqa: ARG002
        return []

    # A run report

    @property
    def task(self) -> str:
        """The grades."""
        return f"grades {', '.join(self.classes)}"

    def worst(self, predictions: Predictions, most: int) -> list[int]:
        """Return the rows of mistakes: those off by most grades first, then the most certain."""
        wrong = super().worst(predictions, len(predictions))
        apart = {row: self._apart(predictions, row) for row in wrong}
        return sorted(wrong, key=lambda row: -apart[row])[:most]

    def mistake(self, predictions: Predictions, row: int) -> str:
        text, apart = super().mistake(predictions, row), self._apart(predictions, row)
        return f"{text}, {apart} grades apart" if apart > 1 else text

    def _apart(self, predictions: Predictions, row: int) -> int:
        label = -1 if predictions.labels is None else int(predictions.labels[row])
        return abs(int(predictions.answers[row].argmax()) - label)
