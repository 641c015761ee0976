"""Patients as the unit of prediction: which slides are one unit, and what is said about it."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from caprmil.cohort.folds import Listing
from caprmil.errors import count, shorten
from caprmil.io.findings import Findings
from caprmil.io.tables import Row, is_known
from caprmil.targets import Target


def slides_of_patients(patients: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the slides of each patient, in the order of the table."""
    found: dict[str, list[str]] = defaultdict(list)
    for slide, patient in patients.items():
        found[patient].append(slide)
    return {patient: tuple(own) for patient, own in found.items()}


def join_rows(rows: Sequence[Row]) -> Row:
    """Return the cells of a patient. Slides with different cells have them all, e.g. two sites."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [row.get(name, "") for row in rows] for name in names}
    return {
        name: " + ".join(sorted({cell for cell in own if is_known(cell)}) or own[:1])
        for name, own in cells.items()
    }


def join_labels(
    units: Mapping[str, Sequence[str]], labels: Mapping[str, Any], target: Target
) -> dict[str, Any]:
    """Return the label of each unit, from those of its slides that have one."""
    known = {unit: [labels[s] for s in own if s in labels] for unit, own in units.items()}
    return {unit: target.merge(own) for unit, own in known.items() if own}


def join_listings(
    listings: Mapping[str, Listing], patients: Mapping[str, str]
) -> dict[str, Listing]:
    """Return the parts of patients, from those of their slides. Patients may be listed as well."""
    return {
        source: list(dict.fromkeys((patients.get(name, name), part) for name, part in listing))
        for source, listing in listings.items()
    }


def note_lost_slides(listed: Mapping[str, str], kept: Collection[str], found: Findings) -> None:
    """Note how many slides each patient lost, since they have no bag."""
    slides = Counter(listed.values())
    lost = Counter(patient for slide, patient in listed.items() if slide not in kept)
    left = [f"{p} ({n} of {slides[p]})" for p, n in lost.items() if n < slides[p]]
    gone = [f"{p} ({count(n, 'slide')})" for p, n in lost.items() if n == slides[p]]
    found.note("Patients that lost slides", left, "They are predicted from the others.")
    found.note("Patients without any bag", gone, "They were left out.")


def propose_patients(
    patients: Mapping[str, str], labels: Mapping[str, Any], target: Target, found: Findings
) -> None:
    """Note that patients could be predicted, if they have several slides and one label."""
    units = slides_of_patients({slide: p for slide, p in patients.items() if slide in labels})
    several = [patient for patient, own in units.items() if len(own) > 1]
    alike = all(len({target.show_label(labels[s]) for s in own}) == 1 for own in units.values())
    if several and alike:
        found.notes.append(
            f"{len(several)} of {count(len(units), 'patient')} have several slides and one label "
            f"({shorten(several[:3])}{', ...' if len(several) > 3 else ''}). Set [data] unit = "
            '"patient" (--set data.unit=patient) to predict patients instead of slides.'
        )
