"""Guarantees of a run: sets for new slides, how they did on its test slides, and its novelty file.

guarantees.json      coverage of sets by class and site, and the risk of the most certain answers
novelty.safetensors  the mean features of its slides, and how far held-out slides are from them
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caprmil import config
from caprmil.errors import BagError, CohortError, count, shorten
from caprmil.evaluation.guarantees import (
    Guarantees,
    combined_sets,
    guaranteed,
    measure_guarantees,
    thresholds,
)
from caprmil.evaluation.novelty import FILE, UNLIKE, Features, make_reference
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bag_files
from caprmil.features.bag_files import BagFiles
from caprmil.features.bags import Bag, Stream
from caprmil.features.source_bags import mean_patch, means_by_source, sums_by_source
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.runs.run import Run
from caprmil.targets.conformal import YES

GUARANTEES = "guarantees.json"
UNLIKE_COLUMN = "unlike_training"
ADVICE = "Sets are calibrated on them. Omit --coverage, or train with splits.validation above 0."


def read_guarantees(folder: Path) -> Guarantees | None:
    """Return what was measured on the test slides of a run; None if nothing was."""
    path = folder / GUARANTEES
    if not path.exists():
        return None
    return config.load_json(path, into=Guarantees, advice="Restore it from a copy.")


def score_guarantees(
    run: Run, means: Mapping[str, Features], sites: Mapping[str, str]
) -> Guarantees | None:
    """Measure and write the guarantees of a run that is being scored. None if it has no sets."""
    for name in (FILE, GUARANTEES):
        (run.folder / name).unlink(missing_ok=True)  # of a scoring that was interrupted
    if reference := make_reference(means, run.splits):
        reference.write(run.folder / FILE)
    try:
        found = measure_guarantees(run.all_tested, run.validation, sites=sites)
    except CohortError:  # the target has no sets, or there are no validation slides
        return None
    write_text(run.folder / GUARANTEES, as_json(found.as_dict()))
    return found


def set_columns(
    run: Run, answers: Mapping[str, Mapping[str, NDArray[np.float64]]], coverage: float
) -> dict[str, tuple[str, ...]]:
    """Return the columns of the sets of slides, from the answer of each fold's model to each."""
    limits = thresholds(run.validation, coverage)
    missing = sorted({fold for own in answers.values() for fold in own} - set(limits))
    if missing:
        raise CohortError(f"{missing[0]} has no validation slides. {ADVICE}")
    sets = [combined_sets(run.target, own, limits) for own in answers.values()]
    return run.target.conformal.columns(np.concatenate(sets))


def check(run: Run, coverage: float) -> None:
    """Raise if a run has no sets of this coverage."""
    if run.combine:
        raise CohortError(
            f"{run.folder} combines the answers of slides, and sets are of one answer. Omit "
            '--coverage, or train with [data] combine = "bag".'
        )
    _ = run.target.conformal
    if not thresholds(run.validation, coverage):
        raise CohortError(f"{run.folder} has no validation slides. {ADVICE}")


def summary(run: Run, table: Predictions, coverage: float | None) -> Iterator[str]:
    """Yield what a reader of predictions should know: what sets promise, and unlike slides."""
    if coverage is not None:
        models = {int(cell.partition(" ")[0]) for cell in table.extra["models"]}
        yield promise(coverage, max(models))
        if abstained := list(table.extra.get("abstain", ())):
            of = count(len(table), table.unit)
            yield f"The models abstain on {abstained.count(YES)} of {of}."
        cells = zip(table.slides, table.extra["models"], strict=True)
        if seen := [slide for slide, cell in cells if "saw" in cell]:
            yield f"Nothing is promised for {table.unit}s that all models saw: {shorten(seen)}."
    shares = table.extra.get(UNLIKE_COLUMN, ())
    unlike = [
        slide
        for slide, cell in zip(table.slides, shares, strict=False)
        if cell and is_unlike(float(cell))
    ]
    if unlike:
        which = " with a slide" if run.combine else ""
        yield (
            f"Caution: {count(len(unlike), table.unit)}{which} unlike the training {run.unit}s of "
            f"{run.folder}: "
            f"{shorten(unlike)}. Scores and guarantees may not hold for them."
        )


def promise(coverage: float, models: int) -> str:
    """Return what the sets of a number of models promise, in sentences."""
    text = (
        f"A set holds the label with a probability of {coverage:g}, for a slide of a new patient "
        "that is exchangeable with the validation patients; not for each class or site."
    )
    if models == 1:
        return text
    return (
        f"Each model alone: {text[0].lower()}{text[1:]} A label is in the set if more than half "
        f"of the {models} models have it, which guarantees {guaranteed(coverage, models):.3f}."
    )


def unlike_training(run: Run, slide: str, bag: Bag | Stream | BagFiles) -> float | None:
    """Return the share of held-out slides that are more like the training slides than this one.

    None for a slide of the run itself, and for a run without a reference.
    """
    if slide in run.bags or slide in run.paths or run.novelty is None:
        return None
    return run.novelty.share_below(mean_feature(bag))


def is_unlike(share: float | None) -> bool:
    """Return whether a slide is to be warned of."""
    return share is not None and share > UNLIKE


def warning(share: float) -> str:
    """Return a warning on a slide that is unlike the training slides, in a sentence."""
    return (
        f"This slide is unlike the training slides: by its mean feature it is farther from them "
        f"than {100 * share:.3g} % of the held-out slides. Scores and guarantees may not hold."
    )


def novelty_column(run: Run, paths: Mapping[str, BagFiles]) -> tuple[str, ...]:
    """Return the share for each slide as a column; empty where it is not known."""
    found = []
    for slide, path in paths.items():
        share = unlike_training(run, slide, path)
        found.append("" if share is None else f"{share:.4f}")
    return tuple(found)


def mean_feature(bag: Bag | Stream | BagFiles) -> NDArray[np.float32]:
    """Return the mean feature of a bag, in memory or in chunks."""
    if isinstance(bag, Bag):
        return mean_patch(bag)
    if isinstance(bag, Stream) and bag.info.widths:
        widths = bag.info.widths
        sums = np.sum([sums_by_source(chunk, widths) for chunk in bag()], axis=0)
        return means_by_source(sums, widths)
    if isinstance(bag, Stream):
        total = np.zeros(bag.info.width)
        for chunk in bag():
            total += chunk.sum(axis=0, dtype=np.float64)
        if not bag.info.n_patches:
            raise BagError("A bag has no patches.")
        return (total / bag.info.n_patches).astype(np.float32)
    with bag_files.streaming(bag) as stream:
        return mean_feature(stream)
