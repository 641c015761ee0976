"""Slides whose bags cannot be read. A cohort that is only predicted can do without them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from caprmil.cohort.patient_units import slides_of_patients
from caprmil.errors import BagError
from caprmil.features import bags
from caprmil.io.tables import Row


def leave_out_unreadable(
    rows: Mapping[str, Row],
    located: Sequence[Mapping[str, Path]],
    patient: str | None,
    unreadable: dict[str, BagError],
) -> tuple[dict[str, Row], list[dict[str, Path]]]:
    """Return the rows and bags of slides whose bags can be opened; the others are reported.

    If none can, all stay. `patient` is a column if the slides of a patient are one bag: without one
    of them there is none.
    """
    found = _find_unreadable(located)
    if len(found) < len({slide for paths in located for slide in paths}):
        unreadable |= found
    gone = set(unreadable)
    if patient is not None:
        groups = slides_of_patients({slide: row[patient] for slide, row in rows.items()})
        gone = {slide for own in groups.values() if gone.intersection(own) for slide in own}
    kept = {slide: row for slide, row in rows.items() if slide not in gone}
    return kept, [{s: path for s, path in paths.items() if s not in gone} for paths in located]


def _find_unreadable(located: Sequence[Mapping[str, Path]]) -> dict[str, BagError]:
    """Return the slides of which a bag, of any source, cannot be opened."""
    found: dict[str, BagError] = {}
    for slide, path in (item for paths in located for item in paths.items()):
        try:
            bags.inspect(path)
        except BagError as problem:
            found.setdefault(slide, problem)
    return found
