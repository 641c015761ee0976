"""Listing: a run and its slides in a few words each, before anything is explained."""

from collections import defaultdict
from typing import Any

import numpy as np

from caprmil.runs.run import Run
from caprmil.slides.qc import Record
from caprmil.viewer.library import Entry, Library


def describe_run(run: Run) -> dict[str, Any]:
    """Return what a run is, and its scores if it is finished."""
    facts = run.facts
    scores = run.scores["metrics"] if run.finished else {}
    shown = {name: scores[name]["all_slides_pooled"] for name in SHOWN if name in scores}
    return {
        "name": run.folder.resolve().name,
        "model": facts.model,
        "classes": run.target.names,
        "encoder": facts.encoder,
        "mpp": facts.mpp,
        "folds": len(run.done),
        "finished": run.finished,
        "scores": shown,
        "version": facts.version,
    }


SHOWN = ("auc", "balanced_accuracy", "accuracy")


def list_slides(library: Library) -> list[dict[str, Any]]:
    """Return a row for each slide, in the order of the run."""
    answered = _answers(library.run)
    return [_row(entry, answered.get(entry.name, {})) for entry in library.entries.values()]


def _row(entry: Entry, answered: dict[str, Any]) -> dict[str, Any]:
    record: Record | None = entry.subject.record if entry.subject else None
    label, predicted = answered.get("label"), answered.get("predicted")
    return {
        "id": entry.id,
        "name": entry.name,
        "label": label,
        "predicted": predicted,
        "probabilities": answered.get("probabilities"),
        "right": None if label is None or predicted is None else label == predicted,
        "fold": answered.get("fold"),
        "patches": record.patches if record else None,
        "flags": record.flags if record else "",
        "pixels": bool(entry.subject and entry.subject.pixels),
        "problem": entry.problem,
    }


def _answers(run: Run) -> dict[str, dict[str, Any]]:
    """Return label, mean probabilities and folds of each slide that the run has tested."""
    if not run.finished:
        return {}
    table = run.predictions
    places: dict[str, list[int]] = defaultdict(list)
    for place, slide in enumerate(table.slides):
        places[slide].append(place)
    found = {}
    for slide, own in places.items():
        mean = table.answers[own].mean(axis=0)
        code = -1 if table.labels is None else int(table.labels[own[0]])
        found[slide] = {
            "label": table.target.names[code] if code >= 0 else None,
            "predicted": table.target.names[int(np.argmax(mean))],
            "probabilities": mean.tolist(),
            "fold": ", ".join(dict.fromkeys(table.folds[n] for n in own)) if table.folds else None,
        }
    return found
