"""Patients: the column that names them, and what is wrong with it."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from caprmil.errors import shorten
from caprmil.io.findings import Findings
from caprmil.io.tables import Row, is_known
from caprmil.targets import Target
from caprmil.targets.target import Label


def patient_column(
    rows: Mapping[str, Row], columns: Mapping[str, str], *, chosen: bool, found: Findings
) -> str | None:
    """Return the column of the patient; None, with a note, for an empty one that nobody chose."""
    column = columns.get("patient")
    if column is None or chosen or not rows or any(is_known(row[column]) for row in rows.values()):
        return column
    found.notes.append(f"Column {column} is empty, and is left out.")
    return None


def read_patients(rows: Mapping[str, Row], column: str | None, found: Findings) -> dict[str, str]:
    """Return the patient of each slide that has one."""
    if column is None:
        found.notes.append("No patient column: every slide counts as its own patient.")
        return {name: name for name in rows}
    patients = {name: row[column] for name, row in rows.items()}
    unknown = [name for name, patient in patients.items() if not is_known(patient)]
    advice = (
        f"Fill column {column}, remove their rows, or delete the column if every slide is of "
        "another patient."
    )
    found.problem("Slides without a patient", unknown, advice)
    return {name: patient for name, patient in patients.items() if is_known(patient)}


def check_patients(
    patients: Mapping[str, str],
    labels: Mapping[str, Label],
    target: Target,
    found: Findings,
    *,
    unit: str = "slide",
) -> set[str]:
    """Check that every patient has one label, and return those that have several."""
    seen = _labels_of(patients, labels)
    mixed = {
        patient: [target.show_label(label) for label in sorted(set(own))]
        for patient, own in sorted(seen.items())
        if not target.agree(own)
    }
    remedy = "mixed_patients = true"
    if unit == "patient":
        remedy = f'unit = "slide" and {remedy}'
    found.problem(
        "Patients with more than one label",
        [f"{patient} ({', '.join(own)})" for patient, own in mixed.items()],
        f"Correct them, or set [data] {remedy} if the label belongs to the slide.",
    )
    return set(mixed)


def presumed_patients(
    units: Iterable[str], owners: Mapping[str, str], mixed: Collection[str]
) -> dict[str, str]:
    """Return the patient of each slide, and the slide itself where its patient is missing or wrong.

    A class is then too small only if it is so by itself, and not as a consequence of another error.
    """
    known = {unit: owners.get(unit, unit) for unit in units}
    return {unit: unit if owner in mixed else owner for unit, owner in known.items()}


def are_labels(patients: Mapping[str, str], labels: Mapping[str, Label], target: Target) -> bool:
    """Return whether the column of the patient only repeats the label: one value for each class.

    Some tables of other tools are like that, with patient_0 for normal slides and patient_1 for
    those with a tumour. Such patients cannot be split.
    """
    groups = _labels_of(patients, labels)
    return (
        1 < len(groups) < len(patients)
        and all(target.is_pure(own) for own in groups.values())
        and len(groups) == len({own[0] for own in groups.values()})
    )


def not_patients(column: str, patients: Mapping[str, str]) -> str:
    """Return the text of an error about such a column, with what to do."""
    values = shorten(sorted(set(patients.values())))
    return (
        f"Column {column} does not name patients: it has one value for all slides of a class "
        f"({values}). Fill it with the patients, or set [data] patient to the column that has "
        f"them (--set data.patient=COLUMN). If every slide is of another patient, remove column "
        f"{column}."
    )


def _labels_of(patients: Mapping[str, str], labels: Mapping[str, Label]) -> dict[str, list[Label]]:
    """Return the labels of the slides of each patient."""
    found: dict[str, list[Label]] = defaultdict(list)
    for name in patients.keys() & labels.keys():
        found[patients[name]].append(labels[name])
    return found
