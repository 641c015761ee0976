"""Errors that a user can fix. Each names what is wrong, what is allowed and what to do next.

CaprmilError
├── BagError           a feature file or bag that cannot be used
├── CohortError        an inconsistent table of slides, patients and labels
├── EncoderError       an encoder that cannot be loaded, or returns unusable features
├── ExportError        a model that cannot be exported, or an export that differs from its model
├── RecipeError        an unknown setting, or a value that a setting cannot have
├── RunError           a run folder that is missing, unfinished, in use or from another recipe
├── SlideError         a slide that cannot be opened or read, or whose scale is unknown
├── StorageError       a remote path, such as s3://, that cannot be reached, read or written
└── UnknownNameError   an unknown model, encoder, metric, ..., with the nearest known name

The command line prints them as one line and exits with 2. Anything else is a bug and shows its
traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class CaprmilError(ValueError):
    """Base class of all errors that a user can fix."""


class BagError(CaprmilError):
    """A feature file or bag that cannot be used."""


class CohortError(CaprmilError):
    """An inconsistent table of slides, patients and labels."""


class EncoderError(CaprmilError):
    """An encoder that cannot be loaded, or returns unusable features."""


class ExportError(CaprmilError):
    """A model that cannot be exported, or an export that differs from its model."""


class RecipeError(CaprmilError):
    """An unknown setting, or a value that a setting cannot have."""


class RunError(CaprmilError):
    """A run folder that is missing, unfinished, in use or from another recipe."""


class SlideError(CaprmilError):
    """A slide that cannot be opened or read, or whose scale is unknown."""


class StorageError(CaprmilError):
    """A remote path, such as s3://, that cannot be reached, read or written."""


class UnknownNameError(CaprmilError):
    """An unknown model, encoder, metric, ..., with the nearest known name."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"There is no {what} called '{name}'.{suggest(name, known)}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean ...? Known: ...', to append to a sentence about an unknown name."""
    known = sorted(known)
    if not known:
        return ""
    near = get_close_matches(name, known, n=1)
    return (f" Did you mean '{near[0]}'?" if near else "") + f" Known: {', '.join(known)}."


OUT_OF_MEMORY = (
    "There is not enough memory. Free some, raise the limit (ulimit -v), or ask for less: fewer "
    "workers, smaller bags, a lower train.cache_gb."
)


def is_out_of_memory(problem: BaseException) -> bool:
    """Return whether an error says, in any library's words, that memory has run out."""
    if isinstance(problem, MemoryError):
        return True
    text = str(problem).lower()
    words = (
        *("can't allocate memory", "cannot allocate memory", "not enough memory"),
        *("out of memory", "bad_alloc", "failed to map segment", "can't start new thread"),
    )
    return any(word in text for word in words)


def plural(noun: str) -> str:
    """Return patches for patch, classes for class, slides for slide."""
    return f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"


def count(n: int, noun: str) -> str:
    """Return 1 patch, 2 patches, 20,000 patches."""
    return f"{n:,} {noun if n == 1 else plural(noun)}"


def one_line(text: object, most: int = 80) -> str:
    """Return a text from a file in one line of an error, at most this long."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[:most]}..."


def shorten(names: Iterable[str], *, separator: str = ", ") -> str:
    """Return the first ten names in one text, followed by the number of the others."""
    names = list(names)
    rest = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return separator.join(names[:10]) + rest
