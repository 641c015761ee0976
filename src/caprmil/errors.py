"""Errors that a user can put right. Each says what is wrong, what is allowed, and what to do next.

CaprmilError
├── BagError       a feature file or bag that cannot be used
├── CohortError    a table of slides, patients and labels that does not hold together
├── RecipeError    a setting that does not exist, or a value it cannot take
├── RunError       a run folder that is missing, unfinished or of another recipe
├── SlideError     a slide that cannot be opened, read, or whose scale is not known
├── EncoderError   an encoder that cannot be loaded, or whose answers cannot be used
├── ExportError    a model that cannot be exported, or a file that answers otherwise than it
├── StorageError   a place elsewhere, such as s3://, that cannot be reached, read or written
└── UnknownName    a model, encoder or metric nobody has heard of

The command line prints them as one line and leaves with 2; anything else is a bug and shows its
traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class CaprmilError(ValueError):
    """Base of all errors that a user can put right."""


class BagError(CaprmilError):
    """A feature file or bag that cannot be used."""


class CohortError(CaprmilError):
    """A table of slides, patients and labels that does not hold together."""


class RecipeError(CaprmilError):
    """A setting that does not exist, or a value that it cannot take."""


class RunError(CaprmilError):
    """A run folder that is missing, unfinished or of another recipe."""


class SlideError(CaprmilError):
    """A slide that cannot be opened or read, or whose scale is not known."""


class EncoderError(CaprmilError):
    """An encoder that cannot be loaded, or whose answers cannot be used."""


class ExportError(CaprmilError):
    """A model that cannot be exported, or a file that answers otherwise than the model."""


class StorageError(CaprmilError):
    """A place elsewhere, such as s3://, that cannot be reached, read or written."""


class UnknownName(CaprmilError):  # noqa: N818  reads as it is said
    """A name that nobody has heard of, with the nearest one that somebody has."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"There is no {what} called '{name}'.{suggest(name, known)}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean ...? Known: ...', to stand after a sentence about an unknown name."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1)
    return (f" Did you mean '{near[0]}'?" if near else "") + f" Known: {', '.join(known)}."


def some(names: Iterable[str], *, between: str = ", ") -> str:
    """Return the first ten names, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return between.join(names[:10]) + rest
