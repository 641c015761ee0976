"""A run and its slides as the page lists them, before any slide is explained."""

from typing import Any

from caprmil.runs.run import Run
from caprmil.slides.qc import Record
from caprmil.viewer.answers import NO_PREDICTION, describe_target, list_predictions
from caprmil.viewer.library import Entry, Library


def describe_run(run: Run) -> dict[str, Any]:
    """Return the facts of a run that the page shows."""
    facts = run.facts
    return {
        "name": run.folder.resolve().name,
        "model": facts.model,
        "unit": run.unit,
        "encoder": facts.encoder,
        "mpp": facts.mpp,
        "folds": len(run.done),
        "finished": run.finished,
        "version": facts.version,
        **describe_target(run),
    }


def list_slides(library: Library) -> list[dict[str, Any]]:
    """Return a row for each slide, in the order of the run."""
    run = library.run
    predictions = list_predictions(run)
    return [
        _row(
            entry,
            predictions.get(run.owner(entry.name) if run.combine else entry.name, NO_PREDICTION),
            names=_other_names(run, entry.name),
        )
        for entry in library.entries.values()
    ]


def _other_names(run: Run, name: str) -> list[str]:
    """Return what else a slide is searched by: its patient, or the slides of a patient."""
    found = run.slides.get(name, ()) if run.unit == "patient" else (run.owner(name),)
    return [each for each in found if each != name]


def _row(entry: Entry, prediction: dict[str, Any], names: list[str]) -> dict[str, Any]:
    record: Record | None = entry.reference.record if entry.reference else None
    return {
        "id": entry.id,
        "name": entry.name,
        "names": names,
        **prediction,
        "patches": record.patches if record else None,
        "flags": record.flags if record else "",
        "pixels": bool(entry.reference and entry.reference.has_pixels),
        "problem": entry.problem,
    }
