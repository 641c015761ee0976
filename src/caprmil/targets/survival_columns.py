"""The columns of time and event in a table: their names, and the unit of time."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from caprmil.errors import CohortError, suggest

ENDPOINTS = (
    *("os", "pfs", "dfs", "rfs", "efs", "dss", "css", "pfi", "dfi", "dmfs", "mfs", "lrfs", "bcr"),
    *("ttp", "survival", "overall_survival", "progression_free_survival"),
    *("disease_free_survival", "disease_specific_survival", "recurrence", "progression", "relapse"),
)
UNITS = {
    **dict.fromkeys(("day", "days", "d"), "days"),
    **dict.fromkeys(("week", "weeks", "wk"), "weeks"),
    **dict.fromkeys(("month", "months", "mo", "mos"), "months"),
    **dict.fromkeys(("year", "years", "yr", "yrs"), "years"),
}
TIME = (
    *("time", "survival_time", "time_to_event", "duration", "follow_up", "followup", "futime"),
    *("follow_up_time", "followup_time", "event_time", *UNITS),
    *(f"{word}_{unit}" for word in ("survival", "time", "follow_up") for unit in UNITS),
)
EVENT = (
    *("event", "status", "vital_status", "survival_status", "event_observed", "observed", "dead"),
    *("death", "died", "deceased", "fustat", "event_occurred"),
)
CENSORED = ("censorship", "censored", "censoring", "censor")
"""Columns that say 1 for a slide without the event."""
RISK = ("risk", "risk_score", "log_hazard", "pred_score", "predicted_risk")
SURVIVAL = "survival_"


class SurvivalColumns(NamedTuple):
    """The columns of a table that hold a survival label, by their names."""

    time: str
    event: str

    @property
    def unit(self) -> str:
        """The unit of time that the name of its column gives; "" if it gives none."""
        return next((UNITS[w] for w in reversed(spelling(self.time).split("_")) if w in UNITS), "")

    @property
    def says_censored(self) -> bool:
        """Whether the column of the event says 1 for a slide without it."""
        return any(word in CENSORED for word in spelling(self.event).split("_"))


def find_survival_columns(
    header: Sequence[str], time: str | None = None, event: str | None = None
) -> SurvivalColumns:
    """Return the columns of time and event: the named ones, or those with a known name."""
    for role, name in (("time", time), ("event", event)):
        if name is not None and name not in header:
            raise CohortError(
                f"[target] {role}: no column is '{name}'.{suggest(name, list(header))}"
            )
    times = {time: endpoint_of(time, TIME)} if time else dict(_known(header, is_time=True))
    events = {event: endpoint_of(event, EVENT)} if event else dict(_known(header, is_time=False))
    pairs = [
        SurvivalColumns(one, other)
        for one, first in times.items()
        for other, second in events.items()
        if one != other and (first == second or time or event or "" in (first, second))
    ]
    same = [p for p in pairs if times[p.time] == events[p.event]]
    pairs = same or pairs
    listed = f"Columns: {', '.join(header)}."
    if not pairs:
        missing = "time and event" if not (times or events) else "event" if times else "time"
        raise CohortError(
            f"No column is recognised as the {missing}. {listed} Name both in the recipe: [target] "
            'time = "...", event = "...".'
        )
    if len(pairs) > 1:
        several = "; ".join(f"{pair.time} and {pair.event}" for pair in pairs)
        raise CohortError(
            f"Several columns could be time and event: {several}. Choose one in the recipe: "
            '[target] time = "...", event = "...".'
        )
    return pairs[0]


def spelling(name: str) -> str:
    """Return the name of a column in lower case, its words separated by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _known(header: Iterable[str], *, is_time: bool) -> dict[str, str]:
    """Return the columns that look like times (or events), each with its endpoint."""
    words = TIME if is_time else (*EVENT, *CENSORED)
    found = {name: endpoint_of(name, words) for name in header}
    if not is_time:  # TCGA's tables: OS and OS.time
        found |= {name: spelling(name) for name in header if spelling(name) in ENDPOINTS}
    return {name: endpoint for name, endpoint in found.items() if endpoint is not None}


def endpoint_of(name: str, words: Sequence[str]) -> str | None:
    """Return the endpoint in the name of a column: os of OS_MONTHS; "" if there is none.

    None is returned for the name of something else.
    """
    text = spelling(name)
    if text in words:
        return ""
    for endpoint in ENDPOINTS:
        rest = {text.removeprefix(f"{endpoint}_"), text.removesuffix(f"_{endpoint}")} - {text}
        if any(word in words for word in rest):
            return "" if endpoint == "survival" else endpoint
    return None


def horizon_of(column: str) -> float | None:
    """Return the horizon of a column survival_<time>."""
    if not column.startswith(SURVIVAL):
        return None
    try:
        return float(column.removeprefix(SURVIVAL))
    except ValueError:
        return None
