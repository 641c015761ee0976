"""Labels of survival: a time and an event as one text, the words for an event, and their errors."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from caprmil.errors import shorten
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.tables import is_known, is_number
from caprmil.targets.target import Label

HAPPENED = (
    *(
        "1",
        "1.0",
        "true",
        "t",
        "yes",
        "y",
        "event",
        "dead",
        "died",
        "death",
        "deceased",
        "observed",
    ),
    *("recurred", "relapse", "relapsed", "recurrence", "progression", "progressed"),
    *("recurred/progressed", "uncensored", "dead of disease", "dead with tumor"),
)
NOT_HAPPENED = (
    *("0", "0.0", "false", "f", "no", "n", "censored", "censor", "alive", "living", "no event"),
    *("diseasefree", "disease free", "disease-free", "none observed", "event free", "event-free"),
    *("lost to follow-up", "lost to follow up"),
)
WORDS = "1 or 0, true or false, yes or no, event or censored, dead or alive"
FLAGS = ("0", "1", "0.0", "1.0", "true", "false", "t", "f", "yes", "no", "y", "n")
"""Words that mean the opposite in a column that says who is censored."""


def happened(word: str) -> bool | None:
    """Return whether a word says that the event happened; None if it says neither.

    cBioPortal writes 1:DECEASED and 0:LIVING.
    """
    word = word.strip().lower()
    number, colon, _ = word.partition(":")
    word = number if colon and number in ("0", "1") else word
    if word in HAPPENED:
        return True
    return False if word in NOT_HAPPENED else None


def is_survival_label(cell: str) -> bool:
    """Return whether a text has both a time and an event."""
    return all(map(is_known, cell.rpartition(", ")[::2]))


def parse_label(cell: str) -> Label:
    """Return time and event of a text such as "12.5, dead"."""
    time, _, event = cell.rpartition(", ")
    if not is_number(time) or not 0 <= float(time) < np.inf:
        raise ValueError(f"time '{time}' is not a number of 0 or more.")
    found = happened(event)
    if found is None:
        raise ValueError(f"event '{event}' is not known. Use {WORDS}.")
    return float(time), float(found)


def read_labels(
    cells: Mapping[str, str], column: str, found: Findings, *, required: bool
) -> dict[str, Label]:
    """Return the label of each slide that has one; what is wrong is added to `found`."""
    labels: dict[str, Label] = {}
    blank: dict[str, str] = {}
    odd_times: list[str] = []
    odd_events: list[str] = []
    negative: list[str] = []
    for name, cell in cells.items():
        time, _, event = cell.rpartition(", ")
        if not is_survival_label(cell):
            blank[name] = cell
        elif not is_number(time) or not np.isfinite(float(time)):
            odd_times.append(f"{name} ({time})")
        elif happened(event) is None:
            odd_events.append(f"{name} ({event})")
        elif float(time) < 0:
            negative.append(f"{name} ({time})")
        else:
            labels[name] = parse_label(cell)
    report = found.problem if required else found.note
    advice = f"Fill {column}, or remove their rows."
    report("Slides without a time or event", tables.with_cells(blank), advice)
    found.problem("Slides with a time that is not a number", odd_times, "Correct them.")
    found.problem("Slides with a negative time", negative, "Correct them, or remove their rows.")
    advice = f"Use {WORDS}; or name another column in [target] event."
    found.problem("Slides with an event that is not known", odd_events, advice)
    return labels


def check_whole(labels: Sequence[Label], column: str, horizons: Sequence[float]) -> Iterator[str]:
    """Yield why nothing can be learned from the labels of a cohort."""
    times, events = np.array(labels).T
    if not events.any():
        yield f"No slide has the event, by {column}. Set [target] event to another column."
    elif len(set(times.tolist())) == 1:
        yield (
            f"All slides have the same time, {times[0]:g}, by {column}. Set [target] time to "
            "another column."
        )
    if beyond := [f"{time:g}" for time in horizons if time >= times.max()]:
        yield (
            f"[target] horizons: no slide is followed beyond {shorten(beyond)}; the longest "
            f"time is {times.max():g}. Choose earlier ones, in the unit of {column}."
        )
