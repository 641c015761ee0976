"""What the viewer sends of predictions: labels, answers and scores, for any target.

The page shows it with the parts that the target names (`Target.display`): see `static/parts.js`.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.explain.browser import totals
from caprmil.models.base import Output
from caprmil.runs.run import Run
from caprmil.targets.part import Part
from caprmil.targets.temperature import soften


def describe_target(run: Run) -> dict[str, Any]:
    """Return what a run predicts, and its headline score if it is finished."""
    target = run.target
    metric, score = target.headline_metric, None
    if run.finished:
        value = run.scores["metrics"][metric.name]["all_slides_pooled"]
        score = None if value is None else f"{metric.title} {value:.3f}"
    facts: dict[str, Any] = {
        "kind": target.kind,
        "display": target.display,
        "titles": target.titles,
    }
    if target.parts:
        facts |= {"parts": [_describe_part(part) for part in target.parts.values()]}
    return {"target": facts, "score": score}


def _describe_part(part: Part) -> dict[str, Any]:
    """Return one of several targets, and which numbers are its own."""
    return {
        "name": part.name,
        "kind": part.target.kind,
        "display": part.target.display,
        "titles": part.target.titles,
        "answers": [part.answers.start, part.answers.stop],
        "contrasts": [part.contrasts.start, part.contrasts.stop],
    }


def list_predictions(run: Run) -> dict[str, dict[str, Any]]:
    """Return label and mean answer of each slide that the run has tested.

    `group` is the stratum of the label, by which the page filters: its class, or its quarter.
    """
    if not run.finished:
        return {}
    table, target = run.predictions, run.predictions.target
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, slide in enumerate(table.slides):
        rows_of[slide].append(row)
    labels = {}
    if table.labels is not None:
        known = target.known(table.labels)
        labels = {
            slide: table.labels[first].tolist()
            for slide, (first, *_) in rows_of.items()
            if known[first]
        }
    strata, names = target.strata(labels)
    found = {}
    for slide, rows in rows_of.items():
        mean = table.answers[rows].mean(axis=0)
        folds = dict.fromkeys(table.folds[n] for n in rows) if table.folds else {}
        found[slide] = {
            "label": target.show_label(labels[slide]) if slide in labels else None,
            "group": names[strata[slide]] if slide in labels else None,
            "predicted": target.predicted(mean[None])[0],
            "answer": mean.tolist(),
            "fold": ", ".join(folds) or None,
        }
    return found


NO_PREDICTION: dict[str, Any] = dict.fromkeys(("label", "group", "predicted", "answer", "fold"))


def summarise(
    run: Run, outputs: Mapping[str, Output], *, explained: str, exact: bool
) -> dict[str, Any]:
    """Return the prediction of a run from the outputs of its models, by fold.

    It has the form of `explain.browser`: `answer` is that of the run, `model` is the one of the
    fold `explained`. If its evidence is exact, its logits are those that the evidence adds up to.
    """
    targets = {fold: run.fold_target(fold) for fold in outputs}
    by_fold = {
        fold: targets[fold].answer(output.logits[0].cpu().double()).numpy()
        for fold, output in outputs.items()
    }
    own = outputs[explained]
    logits = (own.aux.get("mean_logits", own.logits) if exact else own.logits)[0].cpu().numpy()
    return {
        "answer": {
            "mean": np.mean(list(by_fold.values()), axis=0).tolist(),
            "calibrated": calibrated_numbers(run, by_fold),
        },
        "model": {
            "answer": by_fold[explained].tolist(),
            "logits": logits.tolist(),
            "totals": totals(targets[explained], logits),
        },
    }


def calibrated_numbers(
    run: Run, by_fold: Mapping[str, NDArray[np.float64]]
) -> list[float | None] | None:
    """Return the calibrated answer of a run. Of several targets, some may have None as numbers."""
    if not run.target.parts:
        found = run.calibrate(by_fold)
        return None if found is None else list(found.tolist())
    numbers: list[float | None] = [None] * len(next(iter(by_fold.values())))
    for name, own in run.calibration.targets.items():
        if set(by_fold) <= set(own.used):
            place = run.target.parts[name].answers
            folds = [soften(p[None, place], own.used[fold])[0] for fold, p in by_fold.items()]
            numbers[place] = np.mean(folds, axis=0).tolist()
    return None if set(numbers) == {None} else numbers
