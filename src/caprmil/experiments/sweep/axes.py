"""Axes: the settings that vary in a sweep, and the points that their values make.

`model.tokens=2,4,8` is an axis of three values; `train.lr=1e-5..1e-3` is a range to sample from.
This module loads without torch, so that `caprmil status` is quick.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import product
from math import inf, prod
from typing import TypeAlias

from caprmil.errors import RecipeError

MAX_GRID = 500  # points of a grid without --trials
LOG_FACTOR = 100  # a range that spans this factor is sampled on a logarithmic scale

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")


@dataclass(frozen=True)
class Values:
    """An axis of listed values, in TOML."""

    texts: tuple[str, ...]

    @property
    def size(self) -> float:
        return len(self.texts)

    def text(self, value: str) -> str:
        """Return a sampled value as TOML."""
        return value


@dataclass(frozen=True)
class Range:
    """An axis from low to high, both included; `integer` for integers."""

    low: float
    high: float
    integer: bool

    @property
    def size(self) -> float:
        return self.high - self.low + 1 if self.integer else inf

    @property
    def log(self) -> bool:
        """Whether it is sampled on a logarithmic scale."""
        return self.low > 0 and self.high / self.low >= LOG_FACTOR

    def text(self, value: float) -> str:
        """Return a sampled value as TOML, with few enough digits for the name of a folder."""
        short = round(value) if self.integer else float(f"{value:.4g}")
        return str(min(max(short, self.low), self.high))


Axis: TypeAlias = Values | Range


@dataclass(frozen=True, kw_only=True)
class Point:
    """One choice of settings: its changes by key, and the name of its folder."""

    name: str
    changes: dict[str, str]


@dataclass(frozen=True)
class SearchSpace:
    """The axes of a sweep by key, as they were given: e.g. {"model.tokens": "2,4,8"}."""

    texts: Mapping[str, str]

    @cached_property
    def axes(self) -> dict[str, Axis]:
        return {key: read_axis(key, text) for key, text in self.texts.items()}

    @property
    def size(self) -> float:
        """The number of points; infinite with a continuous range."""
        return prod(axis.size for axis in self.axes.values())

    @property
    def titles(self) -> dict[str, str]:
        """The title of each axis: the last part of its key, if no other key ends in it."""
        words = [key.rpartition(".")[2] for key in self.texts]
        return {
            key: word if words.count(word) == 1 else key
            for key, word in zip(self.texts, words, strict=True)
        }

    def point(self, changes: Mapping[str, str]) -> Point:
        """Return the point with these changes. Its name is e.g. tokens=4,heads=8."""
        titles = self.titles
        full = ",".join(f"{titles[key]}={text}" for key, text in changes.items())
        name = re.sub(r"[^\w.,=+-]", "_", full.replace('"', "").replace("'", ""))[:120]
        if name != full:  # two points must not share a folder
            name += "-" + sha256(full.encode()).hexdigest()[:6]
        return Point(name=name, changes=dict(changes))

    def grid(self) -> list[Point]:
        """Return all points, in order."""
        if self.size > MAX_GRID:
            raise RecipeError(
                f"This grid has {self.size:,} points. Pass --trials N to train N of them, drawn "
                f"at random, or leave out values: the limit without --trials is {MAX_GRID}."
            )
        return list(self._points())

    def _points(self) -> Iterator[Point]:
        choices = [axis.texts for axis in self.axes.values() if isinstance(axis, Values)]
        for texts in product(*choices):
            yield self.point(dict(zip(self.texts, texts, strict=True)))


def read_axis(key: str, text: str) -> Axis:
    """Return the axis that a text describes."""
    if match := RANGE.fullmatch(text):
        integer = all(word.lstrip("+-").isdigit() for word in match.groups())
        low, high = map(int if integer else float, match.groups())
        if low >= high:
            raise RecipeError(f"{key}={text}: a range goes from the lower to the higher end.")
        return Range(low, high, integer)
    texts = split_values(text)
    if "" in texts:
        raise RecipeError(f"{key}={text}: there is no value between two commas.")
    return Values(tuple(dict.fromkeys(texts)))


def split_values(text: str) -> list[str]:
    """Split a text at commas, except those inside brackets, braces or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def is_axis(text: str) -> bool:
    """Whether the value of a setting varies: several values, or a range."""
    return len(split_values(text)) > 1 or RANGE.fullmatch(text) is not None
