"""A time and an event per slide: the labels of survival."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.survival_columns import UNITS, find_survival_columns
from caprmil.targets.survival_labels import FLAGS, happened, is_survival_label, parse_label
from caprmil.targets.target import Label, Labels, Target


@dataclass(frozen=True, kw_only=True)
class TimeToEvent(Target):
    """A target whose label is a time, and whether the event happened then."""

    time: str | None = None
    """Column of the time, where its name is not recognised."""
    event: str | None = None
    """Column that says whether the event was seen (1) or not (0), likewise."""
    unit: str = ""
    """Of time: days, months, ... By default as in the name of its column."""
    says_censored: bool = False
    """Whether the column of the event says who is censored. Set from its name, not in a recipe."""

    missing: ClassVar[Label] = (float("nan"), float("nan"))
    strata_title: ClassVar[str] = "Slides with and without the event"

    @property
    def label_names(self) -> tuple[str, ...]:
        return (f"time_{self.unit}" if self.unit in UNITS else "time", "event")

    def find_columns(self, header: Sequence[str]) -> tuple[str, ...]:
        return tuple(find_survival_columns(header, self.time, self.event))

    def named(self, columns: Sequence[str]) -> Self:
        found = find_survival_columns(columns, *columns)
        return replace(self, unit=self.unit or found.unit, says_censored=found.says_censored)

    def join_cells(self, cells: Sequence[str]) -> str:
        time, event = cells
        if self.says_censored and event.lower() in FLAGS:
            event = "censored" if happened(event) else "event"
        return f"{time}, {event}" if time or event else ""

    def split_label(self, label: Label) -> tuple[str, ...]:
        time, event = label
        return ("", "") if np.isnan(time) else (repr(float(time)), str(int(event)))

    def strata(self, labels: Mapping[str, Label]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return whether each slide has the event, so that folds have as many."""
        used = sorted({int(event) for _, event in labels.values()})
        names = tuple(("censored", "event")[code] for code in used)
        return {name: used.index(int(event)) for name, (_, event) in labels.items()}, names

    def known(self, labels: Labels) -> NDArray[np.bool_]:
        return ~np.isnan(labels[:, 0])

    def as_labels(self, labels: Iterable[Label | None]) -> Labels:
        rows = [self.missing if label is None else label for label in labels]
        return np.array(rows, dtype=np.float64).reshape(-1, 2)

    def check_labels(self, labels: Labels) -> None:
        known = labels[self.known(labels)] if labels.ndim == 2 and labels.shape[1] == 2 else None
        if known is None or (known[:, 0] < 0).any() or not set(known[:, 1]) <= {0.0, 1.0}:
            raise ValueError(f"Labels are times, not negative, and events, 0 or 1. {labels=}")

    def show_label(self, label: Label) -> str:
        time, event = label
        return "" if np.isnan(time) else f"{float(time)!r}, {'event' if event else 'censored'}"

    def is_label(self, cell: str) -> bool:
        return is_survival_label(cell)

    def parse_label(self, cell: str) -> Label:
        return parse_label(cell)

    def with_unit(self, text: str) -> str:
        """Return times as text, with their unit."""
        return f"{text} {self.unit}".rstrip()

    @property
    def time_title(self) -> str:
        """The title of an axis of time."""
        return f"Time ({self.unit})" if self.unit else "Time"


def split_labels(labels: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return times, and whether each is that of an event."""
    times, events = np.asarray(labels, dtype=np.float64).reshape(-1, 2).T
    return times, events > 0
