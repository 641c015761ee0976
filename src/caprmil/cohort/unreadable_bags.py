"""Slides whose bags cannot be read. A cohort that is only predicted can do without them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from caprmil.cohort.patient_units import slides_of_patients
from caprmil.errors import BagError
from caprmil.features import bags
from caprmil.io.tables import Row


def find_unreadable(located: Sequence[Mapping[str, Path]]) -> dict[str, BagError]:
    """Return the slides of which a bag cannot be opened, unless none can. One dict per source."""
    found: dict[str, BagError] = {}
    slides = {slide for paths in located for slide in paths}
    for slide, path in (item for paths in located for item in paths.items()):
        try:
            bags.inspect(path)
        except BagError as problem:
            found.setdefault(slide, problem)
    return {} if len(found) == len(slides) else found


def with_same_patient(
    slides: Mapping[str, object], rows: Mapping[str, Row], column: str | None
) -> set[str]:
    """Return slides with all others of their patients, which are in one bag with them."""
    if column is None:
        return set(slides)
    groups = slides_of_patients({slide: row[column] for slide, row in rows.items()})
    return {slide for own in groups.values() if set(own) & slides.keys() for slide in own}
