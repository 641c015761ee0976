"""Guarantees of a run: sets for new slides, how they did on its test slides, and its novelty file.

guarantees.json      coverage of sets by class and site, and the risk of the most certain answers
novelty.safetensors  the mean features of its slides, and how far held-out slides are from them
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caprmil import config
from caprmil.errors import BagError, CohortError, count, shorten
from caprmil.evaluation.guarantees import (
    Guarantees,
    check_coverage,
    combined_sets,
    guaranteed,
    has_sets,
    measure_each,
    thresholds,
)
from caprmil.evaluation.novelty import FILE, UNLIKE, Features, make_reference
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bag_files
from caprmil.features.bag_files import BagFiles
from caprmil.features.bags import Bag, Stream
from caprmil.features.source_bags import mean_patch, means_by_source, sums_by_source
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json, read_json
from caprmil.runs.run import Run
from caprmil.targets.conformal import YES

GUARANTEES = "guarantees.json"
UNLIKE_COLUMN = "unlike_training"
ADVICE = "Sets are calibrated on them. Omit --coverage, or train with splits.validation above 0."


@dataclass(frozen=True, kw_only=True)
class SeveralGuarantees:
    """What was measured of each of several targets."""

    targets: dict[str, Guarantees]


def read_guarantees(folder: Path) -> dict[str, Guarantees]:
    """Return what was measured on the test slides of a run, for each target; "" is the only one."""
    path, advice = folder / GUARANTEES, "Restore it from a copy."
    if not path.exists():
        return {}
    if "targets" in read_json(path, advice=advice):
        return config.load_json(path, into=SeveralGuarantees, advice=advice).targets
    return {"": config.load_json(path, into=Guarantees, advice=advice)}


def score_guarantees(
    run: Run, means: Mapping[str, Features], sites: Mapping[str, str]
) -> dict[str, Guarantees]:
    """Measure and write the guarantees of a run that is being scored, for each of its targets."""
    for name in (FILE, GUARANTEES):
        (run.folder / name).unlink(missing_ok=True)  # of a scoring that was interrupted
    if reference := make_reference(means, run.splits):
        reference.write(run.folder / FILE)
    found = measure_each(run.all_tested, run.validation, sites=sites)
    if found:
        tables = {name: own.as_dict() for name, own in found.items()}
        only = tables.get("")
        write_text(run.folder / GUARANTEES, as_json(only or {"targets": tables}))
    return found


def set_columns(
    run: Run, answers: Mapping[str, Mapping[str, NDArray[np.floating]]], coverage: float
) -> dict[str, tuple[str, ...]]:
    """Return the columns of the sets, from the answers of each fold's model to slides or patients.

    Of several targets, those that have sets have their columns with the name before a dot.
    """
    held = {fold: table.leaves() for fold, table in run.validation.items()}
    missing = sorted({fold for own in answers.values() for fold in own} - set(held))
    if missing:
        raise CohortError(f"{missing[0]} has no validation slides. {ADVICE}")
    rows = [(name, fold, answer) for name, own in answers.items() for fold, answer in own.items()]
    everything = Predictions(
        slides=tuple(name for name, _, _ in rows),
        target=run.target,
        answers=np.stack([answer for _, _, answer in rows]),
        folds=tuple(fold for _, fold, _ in rows),
    )
    columns = dict[str, tuple[str, ...]]()
    for leaf, table in everything.leaves().items():
        if has_sets(table.target):
            limits = thresholds({fold: own[leaf] for fold, own in held.items()}, coverage)
            by_name: dict[str, dict[str, NDArray[np.float64]]] = {}
            for (name, fold, _), answer in zip(rows, table.answers, strict=True):
                by_name.setdefault(name, {})[fold] = answer
            sets = [combined_sets(table.target, own, limits) for own in by_name.values()]
            own = table.target.conformal.columns(np.concatenate(sets))
            columns |= {f"{leaf}.{key}" if leaf else key: cells for key, cells in own.items()}
    return columns


def check(run: Run, coverage: float) -> None:
    """Raise if a run has no sets of this coverage."""
    check_coverage(coverage)
    if not any(has_sets(target) for target in run.target.leaves):
        _ = run.target.conformal  # says why
    if not run.validation:
        raise CohortError(f"{run.folder} has no validation slides. {ADVICE}")


def summary(run: Run, table: Predictions, coverage: float | None) -> Iterator[str]:
    """Yield what a reader of predictions should know: what sets promise, and unlike slides."""
    if coverage is not None:
        models = {int(cell.partition(" ")[0]) for cell in table.extra["models"]}
        yield promise(coverage, max(models), table.unit)
        if run.target.parts:
            yield "It is for each target by itself, not for all of them together."
        for name, cells in table.extra.items():
            target, _, column = name.rpartition(".")
            if column == "abstain":
                of = f"{cells.count(YES)} of {count(len(table), table.unit)}"
                who = f"{target}: the models" if target else "The models"
                yield f"{who} abstain on {of}."
        named = zip(table.slides, table.extra["models"], strict=True)
        if seen := [slide for slide, cell in named if "saw" in cell]:
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


def promise(coverage: float, models: int, unit: str = "slide") -> str:
    """Return what the sets of a number of models promise, in sentences."""
    of = "a new patient" if unit == "patient" else "a slide of a new patient"
    text = (
        f"A set holds the label with a probability of {coverage:g}, for {of} "
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
