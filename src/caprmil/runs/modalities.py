"""What each modality adds: a model of all of them beside those of each alone, on the same folds.

Modalities are the patches, those of each of several sources, columns of the table, and vectors of
slides. Each model of one modality is a run in a folder of the run of all.
"""

from collections.abc import Mapping, Sequence

from caprmil.cohort.covariates import VECTOR
from caprmil.evaluation.comparison import compare
from caprmil.evaluation.differences import Comparison, show_p
from caprmil.evaluation.predictions import Predictions
from caprmil.runs.remote import COLUMNS_ONLY, COVARIATES_ONLY, IMAGE_ONLY, SOURCE_ONLY, VECTORS_ONLY
from caprmil.runs.run import Run

TITLE = "## What each modality adds\n\n"
TITLES = {
    IMAGE_ONLY: "image only",
    COVARIATES_ONLY: "covariates only",
    COLUMNS_ONLY: "columns only",
    VECTORS_ONLY: "vectors only",
}
OTHERS = {IMAGE_ONLY: "The covariates", COVARIATES_ONLY: "The patches"}
"""What the other one of two modalities is called."""


def modalities_of(sources: Sequence[str], *, columns: bool, vectors: bool) -> dict[str, str]:
    """Return the title of each modality alone, by the folder of its run; nothing for one alone.

    `sources` are the names of several sources of features.
    """
    found = {f"{SOURCE_ONLY}{name}": f"{name} only" for name in sources}
    if columns or vectors:
        both = columns and vectors
        alone = (COLUMNS_ONLY, VECTORS_ONLY) if both else (COVARIATES_ONLY,)
        found |= {name: TITLES[name] for name in (IMAGE_ONLY, *alone)}
    return found


def read_beside(run: Run, name: str) -> Predictions | None:
    """Return the test predictions of a run that was trained in the folder of another, if it was."""
    if not (run.folder / name).is_dir():
        return None
    beside = Run(run.folder / name)
    if len(beside.done) < len(beside.splits):
        return None
    folds = [beside.fold_folder(fold.name) for fold in beside.splits]
    return Predictions.concatenate([beside.read_predictions(own / "test.csv") for own in folds])


def compare_modalities(run: Run, answers: Predictions) -> tuple[Comparison, str] | None:
    """Compare a model with those of one modality on the same folds, if they were trained.

    The second value says it in sentences, with a table.
    """
    columns = any(name != VECTOR for name in run.covariate_names)
    vectors = VECTOR in run.covariate_names
    titles = modalities_of([*run.sources], columns=columns, vectors=vectors)
    alone = {titles[name]: read_beside(run, name) for name in titles}
    found = {title: table for title, table in alone.items() if table is not None}
    if not found or len(found) < len(alone):
        return None
    together = _together(titles)
    compared = compare({together: answers, **found}, names=[answers.target.headline])
    return compared, _describe(compared, together, titles)


def _together(titles: Mapping[str, str]) -> str:
    """Return what the model of all modalities is called."""
    if set(titles) == {IMAGE_ONLY, COVARIATES_ONLY}:
        return "image and covariates"
    return "everything" if IMAGE_ONLY in titles else "all sources"


def _describe(compared: Comparison, together: str, titles: Mapping[str, str]) -> str:
    """Return the scores and their differences, in sentences and as a table."""
    others = dict.fromkeys(titles.values(), "The other modalities")
    if set(titles) == {*OTHERS}:
        others = {titles[name]: text for name, text in OTHERS.items()}
    elif len(titles) == 2:
        names = [title.removesuffix(" only") for title in titles.values()]
        others = dict(
            zip(titles.values(), (f"The patches of {n}" for n in names[::-1]), strict=True)
        )
    lines = []
    for d in compared.differences:
        if d.first != together:
            continue
        low, high = d.interval
        gain = "they add something" if d.better == together else "they cost something"
        words = NOT_REAL.get(d.verdict, gain)
        lines.append(
            f"{others[d.second]} change the {d.metric} by {d.difference:+.3f} ({low:+.3f} to "
            f"{high:+.3f}, p {show_p(d.corrected_p)}), from {d.of_second.mean:.3f} ({d.second}) to "
            f"{d.of_first.mean:.3f}: {words}."
        )
    return "\n\n".join([*lines, compared.as_markdown()])


NOT_REAL = {
    "not shown": "it is not shown that they add anything",
    "not known": "there are too few slides to know",
}
