"""Bags for a prediction, grouped by patient: by a table, by a name, or as in the run."""

import logging
from collections.abc import Mapping

from caprmil.cohort.patient_units import slides_of_patients
from caprmil.errors import CohortError, RunError, shorten
from caprmil.features.bag_files import BagFiles, SlideBags
from caprmil.features.source_bags import SlideFiles
from caprmil.io import tables
from caprmil.io.tables import TableLike, find_column, is_known
from caprmil.runs.run import Run
from caprmil.slides.names import slide_name

_log = logging.getLogger("caprmil")


def group_bags(
    run: Run,
    paths: Mapping[str, SlideFiles],
    *,
    table: TableLike | None = None,
    patient: str | None = None,
) -> tuple[dict[str, BagFiles], dict[str, str]]:
    """Return bags as the models of a run take them, and the patient of each slide.

    If the run joins slides, there is a bag for each patient. The patient of a slide is that in the
    table, or the given one, or that of the run. A single slide may be its own patient.
    """
    if run.predicts == "slide":
        if table is not None or patient is not None:
            raise RunError(
                f"The models of {run.folder} predict slides. --table and --patient need a run with "
                '[data] unit = "patient".'
            )
        return dict(paths), {}
    owners = _owners(run, paths, table, patient)
    own = {slide: path for slide, path in paths.items() if slide in owners}
    if run.combine:
        return dict(own), owners
    ordered = {slide: owners[slide] for slide in owners if slide in own}
    return {
        name: SlideBags.of({slide: own[slide] for slide in slides})
        for name, slides in slides_of_patients(ordered).items()
    }, owners


def _owners(
    run: Run, paths: Mapping[str, SlideFiles], table: TableLike | None, patient: str | None
) -> dict[str, str]:
    """Return the patient of each slide that is predicted."""
    if table is not None and patient is not None:
        raise CohortError("--table and --patient both name patients. Leave one out.")
    if table is not None:
        return _read_owners(run, paths, table)
    if patient is not None:
        return dict.fromkeys(paths, patient)
    unknown = [slide for slide in paths if slide not in run.patients]
    if unknown and len(paths) > 1:
        raise CohortError(
            f"{run.folder} predicts patients, and the patient of these slides is not known: "
            f"{shorten(unknown)}. Pass --table with the columns slide and patient, or "
            "--patient NAME if all are of one."
        )
    known = {slide: run.patients[slide] for slide in run.paths if slide in paths}
    return known | {slide: slide for slide in unknown}


def _read_owners(run: Run, paths: Mapping[str, SlideFiles], table: TableLike) -> dict[str, str]:
    """Return the patients of slides in a table. Slides that it does not list are left out."""
    frame, name = tables.read_table(table, pad=True), tables.table_name(table)
    columns = {}
    for role in ("slide", "patient"):
        named = run.columns.get(role)
        column = named if named in frame.columns else find_column(frame, tables.COLUMNS[role])
        if column is None:
            raise CohortError(
                f"{name} has no column for the {role}. Its columns are "
                f"{', '.join(frame.columns)}. Rename one of them to {role}."
            )
        columns[role] = column
    cells = zip(frame[columns["slide"]], frame[columns["patient"]], strict=True)
    listed = {slide_name(slide): patient for slide, patient in cells if is_known(slide)}
    if not listed.keys() & paths.keys():
        raise CohortError(
            f"{name} lists none of these slides: {shorten(paths)}. It lists {shorten(listed)}."
        )
    wanted = {listed[slide] for slide in paths if slide in listed}
    missing = [slide for slide in listed if slide not in paths and listed[slide] in wanted]
    if missing:
        raise CohortError(
            f"{name} lists further slides of these patients: {shorten(missing)}. Pass their bags "
            "too, or remove their rows: a patient is predicted from all slides."
        )
    listed = {slide: patient for slide, patient in listed.items() if slide in paths}
    nameless = [slide for slide, patient in listed.items() if not is_known(patient)]
    if nameless:
        raise CohortError(f"{name} has slides without a patient: {shorten(nameless)}. Fill them.")
    left = [slide for slide in paths if slide not in listed]
    if left:
        _log.warning("note: not in %s, and left out (%d): %s.", name, len(left), shorten(left))
    return listed
