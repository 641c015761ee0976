"""Plans: which settings vary, over what, and the points that this makes.

`model.tokens=2,4,8` is an axis of three values; `train.lr=1e-5..1e-3` is a range to draw from;
`train.epochs=50` is an ordinary change, and so is a list in brackets.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from math import inf, log10, prod
from operator import getitem
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from caprmil import config
from caprmil.errors import RecipeError
from caprmil.targets import find_metric
from caprmil.training.recipe import Recipe, read_recipe

MOST = 500  # points of a grid that nobody has capped
TRIALS = 20  # points of a search, unless said otherwise
WIDE = 100  # a range that spans as much is drawn on a logarithmic scale

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")


@dataclass(frozen=True)
class Values:
    """An axis of some values, as TOML has them."""

    texts: tuple[str, ...]

    @property
    def size(self) -> float:
        return len(self.texts)

    def draw(self, rng: np.random.Generator) -> str:
        return self.texts[rng.integers(len(self.texts))]


@dataclass(frozen=True)
class Range:
    """An axis from low to high, both included. Whole numbers stay whole."""

    low: float
    high: float
    whole: bool

    @property
    def size(self) -> float:
        return self.high - self.low + 1 if self.whole else inf

    @property
    def log(self) -> bool:
        return self.low > 0 and self.high / self.low >= WIDE

    def draw(self, rng: np.random.Generator) -> str:
        if self.log:
            return self.text(10 ** rng.uniform(log10(self.low), log10(self.high)))
        return self.text(rng.uniform(self.low - self.whole / 2, self.high + self.whole / 2))

    def text(self, value: float) -> str:
        """Return a drawn value, with as many digits as a name can bear."""
        short = round(value) if self.whole else float(f"{value:.4g}")
        return str(min(max(short, self.low), self.high))


Axis: TypeAlias = Values | Range


@dataclass(frozen=True, kw_only=True)
class Point:
    """One choice of settings: its changes by key, and a name that a folder can bear."""

    name: str
    changes: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe, and what of it varies."""

    recipe: Recipe
    axes: dict[str, str]
    """The values of each setting as they were given, e.g. "2,4,8" or "1e-5..1e-3"."""
    search: Literal["grid", "random", "bayes"] = "grid"
    metric: str = "auc"
    """What the best is best at, on the validation parts."""
    seed: int = 0
    prune: bool = False
    """Give up points whose validation curve is worse than the median of those before."""

    def __post_init__(self) -> None:
        find_metric(self.metric)
        if not self.axes:
            raise RecipeError(
                "Nothing varies here. Give a setting several values, e.g. --set model.tokens=2,4,8."
            )
        for key, axis in self.space().items():
            if self.search == "grid" and isinstance(axis, Range):
                raise RecipeError(
                    f"{key}={self.axes[key]} is a range, and a grid needs values. List them with "
                    "commas, or pass --search random or bayes."
                )

    def space(self) -> dict[str, Axis]:
        """Return each axis by its key."""
        return {key: read_axis(key, text) for key, text in self.axes.items()}

    def titles(self) -> dict[str, str]:
        """Return what each axis is called: the last word of its key, if no other has it."""
        words = [key.rpartition(".")[2] for key in self.axes]
        return {
            key: word if words.count(word) == 1 else key
            for key, word in zip(self.axes, words, strict=True)
        }

    def point(self, changes: dict[str, str]) -> Point:
        """Return the point of these changes under its name, e.g. tokens=4,heads=8."""
        titles = self.titles()
        whole = ",".join(f"{titles[key]}={text}" for key, text in changes.items())
        name = re.sub(r"[^\w.,=+-]", "_", whole.replace('"', "").replace("'", ""))[:120]
        if name != whole:  # two points must not end in one folder
            name += "-" + sha256(whole.encode()).hexdigest()[:6]
        return Point(name=name, changes=changes)

    def recipe_at(self, point: Point) -> Recipe:
        """Return the recipe of a point."""
        table = tomllib.loads(config.dump(self.recipe))
        changes = [f"{key}={text}" for key, text in point.changes.items()]
        return config.parse(table, into=Recipe, changes=changes)

    def listed(self, trials: int | None = None) -> list[Point]:
        """Return the points of a grid, or those that a random search draws.

        More trials begin with the same points as fewer.
        """
        if self.search == "grid":
            return self._grid(trials)
        points: dict[str, Point] = {}
        wanted = min(trials or TRIALS, prod(axis.size for axis in self.space().values()))
        for point in self.draws():
            points.setdefault(point.name, point)
            if len(points) == wanted:
                break
        return list(points.values())

    def _grid(self, trials: int | None) -> list[Point]:
        choices = [axis.texts for axis in self.space().values() if isinstance(axis, Values)]
        size = prod(map(len, choices))
        if trials is None and size > MOST:
            raise RecipeError(
                f"This grid has {size:,} points. Pass --trials N to train N of them, drawn at "
                f"random, or leave values out: {MOST} go without."
            )
        chosen: Iterable[tuple[str, ...]] = product(*choices)
        if trials is not None and trials < size:
            order = np.random.default_rng(self.seed).permutation(size)[:trials]
            places = zip(*np.unravel_index(order, [len(texts) for texts in choices]), strict=True)
            chosen = (tuple(map(getitem, choices, place)) for place in places)
        return [self.point(dict(zip(self.axes, texts, strict=True))) for texts in chosen]

    def draws(self) -> Iterator[Point]:
        """Draw points at random, over and over; a small space soon repeats itself."""
        space, rng = self.space(), np.random.default_rng(self.seed)
        for _ in range(100 * MOST):
            yield self.point({key: axis.draw(rng) for key, axis in space.items()})


def read_plan(
    source: str | Path,
    changes: Sequence[str],
    *,
    features: str | Path | None = None,
    search: Literal["grid", "random", "bayes"] = "grid",
    metric: str = "auc",
    seed: int = 0,
    prune: bool = False,
) -> Plan:
    """Return the plan of a recipe: changes with several values are axes, the others are made."""
    axes: dict[str, str] = {}
    plain: dict[str, str] = {}
    for change in changes:
        key, _, text = (word.strip() for word in change.partition("="))
        if key in axes or key in plain:
            raise RecipeError(f"{key} is given twice. Put all its values into one --set.")
        if len(split(text)) > 1 or RANGE.fullmatch(text):
            axes[key] = text
        else:
            plain[key] = change
    recipe = read_recipe(source, features=features, changes=list(plain.values()))
    return Plan(recipe=recipe, axes=axes, search=search, metric=metric, seed=seed, prune=prune)


def read_axis(key: str, text: str) -> Axis:
    """Return the axis that a text describes."""
    if found := RANGE.fullmatch(text):
        whole = all(word.lstrip("+-").isdigit() for word in found.groups())
        low, high = map(int if whole else float, found.groups())
        if low >= high:
            raise RecipeError(f"{key}={text}: a range goes from the lower to the higher end.")
        return Range(low, high, whole)
    texts = split(text)
    if "" in texts:
        raise RecipeError(f"{key}={text}: there is nothing between two commas.")
    return Values(tuple(dict.fromkeys(texts)))


def split(text: str) -> list[str]:
    """Cut at commas, but not at those inside brackets, braces or quotes."""
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
