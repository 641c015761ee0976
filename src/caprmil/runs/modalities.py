"""What each modality adds: a model beside those of the patches and of the covariates alone."""

from caprmil.evaluation.comparison import compare
from caprmil.evaluation.differences import Comparison, show_p
from caprmil.evaluation.predictions import Predictions
from caprmil.runs.remote import COVARIATES_ONLY, IMAGE_ONLY
from caprmil.runs.run import Run

BOTH, IMAGE, COVARIATES = "image and covariates", "image only", "covariates only"
TITLE = "## What each modality adds\n\n"


def read_beside(run: Run, name: str) -> Predictions | None:
    """Return the test predictions of a run that was trained in the folder of another, if it was."""
    if not (run.folder / name).is_dir():
        return None
    beside = Run(run.folder / name)
    if len(beside.done) < len(beside.splits):
        return None
    folds = [beside.fold_folder(fold.name) for fold in beside.splits]
    return Predictions.concatenate([beside.read_predictions(own / "test.csv") for own in folds])


def compare_modalities(run: Run, answers: Predictions) -> Comparison | None:
    """Compare a model with those of one modality on the same folds, if they were trained."""
    alone = {IMAGE: read_beside(run, IMAGE_ONLY), COVARIATES: read_beside(run, COVARIATES_ONLY)}
    found = {name: table for name, table in alone.items() if table is not None}
    if len(found) < len(alone):
        return None
    return compare({BOTH: answers, **found}, names=[answers.target.headline])


def describe_modalities(compared: Comparison) -> str:
    """Return the three scores and their differences, in sentences and as a table."""
    adds = {IMAGE: "The covariates", COVARIATES: "The patches"}
    lines = []
    for d in compared.differences:
        if d.first != BOTH:
            continue
        low, high = d.interval
        lines.append(
            f"{adds[d.second]} change the {d.metric} by {d.difference:+.3f} ({low:+.3f} to "
            f"{high:+.3f}, p {show_p(d.corrected_p)}), from {d.of_second.mean:.3f} to "
            f"{d.of_first.mean:.3f}: {WORDS.get(d.better or d.verdict, 'they cost something')}."
        )
    return "\n\n".join([*lines, compared.as_markdown()])


WORDS = {
    BOTH: "they add something",
    "not shown": "it is not shown that they add anything",
    "not known": "there are too few slides to know",
}
