"""Differences between models: rows to print, a CSV, and sentences."""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from caprmil.io import tables
from caprmil.io.atomic import atomic_write
from caprmil.targets.metric import Interval, Spread

LEVEL, ALPHA = 0.95, 0.05


class Floor(NamedTuple):
    """What a perfectly calibrated model with the same answers would read: mean and spread."""

    mean: float
    spread: float

    def holds(self, value: float) -> bool:
        """Return whether a value is at the floor, that is not above it by more than chance."""
        return value <= self.mean + 2 * self.spread


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One metric of two models: first minus second, on the same slides."""

    first: str
    second: str
    metric: str
    higher_is_better: bool
    of_first: Spread
    of_second: Spread
    interval: Interval
    """Of the difference, at 95 %, not corrected for the number of pairs."""
    p: float
    corrected_p: float
    at_floor: bool = False
    """Whether the higher one is at its floor, or the floors vary by more than the difference."""

    @property
    def difference(self) -> float:
        return self.of_first.mean - self.of_second.mean

    @property
    def verdict(self) -> str:
        """Whether the difference is real, not shown, or not known for lack of slides."""
        if math.isnan(self.corrected_p):
            return "not known"
        return "real" if self.corrected_p < ALPHA and not self.at_floor else "not shown"

    @property
    def better(self) -> str | None:
        """The name of the better one, if the difference is real."""
        if self.verdict != "real":
            return None
        wins = (self.difference > 0) if self.higher_is_better else (self.difference < 0)
        return self.first if wins else self.second

    def sentence(self) -> str:
        """Return the result as a sentence."""
        values = f"{self.of_first.mean:.3f} against {self.of_second.mean:.3f}"
        chance = with_p(self.corrected_p)
        if self.verdict == "not known":
            return f"{self.first} and {self.second}, {self.metric}: {values}; too few slides for p."
        if self.better is None:
            floor = "; within the floors" if self.at_floor else ""
            return (
                f"{self.first} and {self.second}: no difference in {self.metric} is shown "
                f"({values}, {chance}{floor})."
            )
        worse = self.second
        if self.better == self.second:
            worse = self.first
            values = f"{self.of_second.mean:.3f} against {self.of_first.mean:.3f}"
        return f"{self.better} is better than {worse} in {self.metric} ({values}, {chance})."


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All differences that were tested, with what is needed to judge them."""

    differences: tuple[Difference, ...]
    floors: Mapping[str, Mapping[str, Floor]]
    """The floor of each model, by metric."""
    slides: int
    patients: int
    folds: tuple[str, ...]
    notes: tuple[str, ...]
    unit: str = "slide"

    def as_rows(self, names: frozenset[str] | None = None) -> list[dict[str, str]]:
        """Return one row for each difference, rounded; of these metrics, or of all."""
        chosen = [d for d in self.differences if names is None or d.metric in names]
        return [
            {
                "first": d.first,
                "second": d.second,
                "metric": d.metric,
                "first's": self._value(d.first, d.metric, d.of_first),
                "second's": self._value(d.second, d.metric, d.of_second),
                "difference": f"{d.difference:+.3f}",
                "95 % interval": _between(d.interval),
                "p": show_p(d.p),
                "corrected p": show_p(d.corrected_p),
                "verdict": d.verdict,
            }
            for d in chosen
        ]

    def _value(self, name: str, metric: str, value: Spread) -> str:
        floor = self.floors.get(metric, {}).get(name)
        spread = "" if math.isnan(value.std) else f" ± {value.std:.3f}"
        return f"{value.mean:.3f}{spread}{'' if floor is None else f' (floor {floor.mean:.3f})'}"

    def as_markdown(self) -> str:
        """Return the table, with what was compared above it and notes below."""
        rows = self.as_rows()
        table = tables.markdown_table(
            list(rows[0]), [list(row.values()) for row in rows], self.notes
        )
        return f"{self.size()}\n\n{table}"

    def size(self) -> str:
        """Return how many slides, patients and folds were compared."""
        many = len(self.folds) > 1
        over = f"mean over {len(self.folds)} folds" if many else f"all {self.unit}s pooled"
        slides = f"{self.slides} slides of " if self.unit == "slide" else ""
        return f"{slides}{self.patients} patients, {over}."

    def sentences(self, names: frozenset[str] | None = None) -> Iterator[str]:
        """Yield each difference as a sentence, with the floors of the metric if it has some."""
        for d in self.differences:
            if names is None or d.metric in names:
                floors = self.floors.get(d.metric)
                more = ""
                if floors:
                    more = f" Floors: {floors[d.first].mean:.3f} and {floors[d.second].mean:.3f}."
                yield d.sentence() + more

    def warnings(self) -> Iterator[str]:
        """Yield which references the first of each pair does not beat."""
        for d in self.differences:
            values = f"{d.metric} {d.of_second.mean:.3f} against {d.of_first.mean:.3f}"
            if d.verdict == "not known":
                yield f"Whether {d.first} beats '{d.second}' is not known ({values})."
            elif d.better != d.first:
                does = "does better" if d.better else "may do as well"
                yield (
                    f"{d.first} does not beat '{d.second}' ({with_p(d.corrected_p)}): "
                    f"a baseline {does} on these {self.unit}s ({values})."
                )

    def as_dict(self) -> dict[str, Any]:
        """Return everything in full precision; NaN where something is not known."""
        return {
            **({"slides": self.slides} if self.unit == "slide" else {"unit": self.unit}),
            "patients": self.patients,
            "folds": list(self.folds),
            "differences": [self._cells(d) for d in self.differences],
            "notes": list(self.notes),
        }

    def write(self, path: Path | str) -> Path:
        """Write all differences to a CSV in full precision. The file must be new."""
        with (
            atomic_write(path) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(map(self._cells, self.differences))
        return Path(path)

    def _cells(self, d: Difference) -> dict[str, Any]:
        floors = {name: f.mean for name, f in self.floors.get(d.metric, {}).items()}
        cells = (
            *(d.first, d.second, d.metric, d.of_first.mean, d.of_first.std, d.of_second.mean),
            *(d.of_second.std, d.difference, *d.interval, d.p, d.corrected_p, d.verdict),
            *(floors.get(d.first), floors.get(d.second)),
        )
        return dict(zip(COLUMNS, cells, strict=True))


COLUMNS = (
    *("first", "second", "metric", "first_mean", "first_std", "second_mean", "second_std"),
    *("difference", "low", "high", "p", "corrected_p", "verdict"),
    *("first_floor", "second_floor"),
)


def show_p(p: float) -> str:
    """Return p as it is printed."""
    if math.isnan(p):
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def with_p(p: float) -> str:
    """Return p with its name, for a sentence."""
    return f"p {show_p(p)}" if p < 0.001 else f"p = {show_p(p)}"


def _between(interval: Interval) -> str:
    low, high = interval
    return "-" if math.isnan(low) else f"{low:+.3f} to {high:+.3f}"
