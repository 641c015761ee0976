"""The parts of reports by name. A target names those that show it: `Target.display`."""

from caprmil.errors import RunError
from caprmil.report.class_parts import ClassParts
from caprmil.report.grade_parts import GradeParts
from caprmil.report.label_parts import LabelParts
from caprmil.report.prediction_parts import PredictionParts
from caprmil.report.several_parts import SeveralParts
from caprmil.report.survival_parts import SurvivalParts
from caprmil.report.value_parts import ValueParts
from caprmil.runs.run import Run

PARTS: dict[str, type[PredictionParts]] = {
    "classes": ClassParts,
    "grades": GradeParts,
    "labels": LabelParts,
    "several": SeveralParts,
    "value": ValueParts,
    "survival": SurvivalParts,
}


def parts_of(run: Run) -> PredictionParts:
    """Return the parts that show what a run predicts."""
    name = run.target.display
    if name not in PARTS:
        raise RunError(
            f"Reports cannot show {run.target.in_words}: its display '{name}' is not among "
            f"{', '.join(PARTS)}. See scores.md and predictions.csv in {run.folder}."
        )
    return PARTS[name](run)
