"""Plans: a recipe, the settings that vary, and how their values are searched."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from caprmil import config
from caprmil.errors import RecipeError, UnknownNameError
from caprmil.experiments.sweep.axes import Point, Range, SearchSpace, is_axis
from caprmil.targets import METRICS, Metric
from caprmil.training.recipe import Recipe
from caprmil.training.recipe_files import parse_recipe, read_recipe


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a sweep trains. It is kept in sweep.toml."""

    recipe: Recipe
    axes: dict[str, str]
    """The values of each setting as they were given, e.g. "2,4,8" or "1e-5..1e-3"."""
    search: Literal["grid", "random", "bayes"] = "grid"
    metric: str = ""
    """By which the best point is chosen, on the validation parts. Default: the target's first."""
    seed: int = 0
    prune: bool = False
    """Stop points whose validation loss is worse than the median of the finished points."""

    def __post_init__(self) -> None:
        target = self.recipe.target
        object.__setattr__(self, "metric", self.metric or target.headline)
        if self.metric not in self.metrics:
            raise UnknownNameError(f"metric of {target.in_words}", self.metric, self.metrics)
        if not self.axes:
            raise RecipeError(
                "No setting varies. Give one several values, e.g. --set model.tokens=2,4,8."
            )
        for key, axis in self.space.axes.items():
            if self.search == "grid" and isinstance(axis, Range):
                raise RecipeError(
                    f"{key}={self.axes[key]} is a range, and a grid needs values. List them with "
                    "commas, or pass --search random or bayes."
                )

    @cached_property
    def space(self) -> SearchSpace:
        """The axes, and the points that they make."""
        return SearchSpace(self.axes)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that the target may have. Its classes are not known yet."""
        target = self.recipe.target
        return METRICS.get(target.kind, {}) | target.example().metrics

    def find_metric(self, name: str) -> Metric:
        """Return a metric of the target: its title, and whether higher is better."""
        return self.metrics[name]

    @property
    def higher_is_better(self) -> bool:
        """The direction of the plan's metric."""
        return self.find_metric(self.metric).higher_is_better

    def has_order_of(self, other: "Plan") -> bool:
        """Return whether the axes are in the order of those of another plan."""
        return list(self.axes) == list(other.axes)

    def recipe_at(self, point: Point) -> Recipe:
        """Return the recipe of a point."""
        table = tomllib.loads(config.dump(self.recipe))
        changes = [f"{key}={text}" for key, text in point.changes.items()]
        return parse_recipe(table, changes=changes)


def read_plan(
    source: str | Path,
    changes: Sequence[str],
    *,
    model: str | None = None,
    features: str | Path | Sequence[str | Path] | None = None,
    search: Literal["grid", "random", "bayes"] = "grid",
    metric: str = "",
    seed: int = 0,
    prune: bool = False,
) -> Plan:
    """Return the plan for a recipe: changes with several values are axes, others change it."""
    axes: dict[str, str] = {}
    fixed: dict[str, str] = {}
    for change in changes:
        key, _, text = (word.strip() for word in change.partition("="))
        if key in axes or key in fixed:
            raise RecipeError(f"{key} is given twice. Put all its values into one --set.")
        if is_axis(text):
            axes[key] = text
        else:
            fixed[key] = change
    recipe = read_recipe(source, features=features, changes=list(fixed.values()), model=model)
    return Plan(recipe=recipe, axes=axes, search=search, metric=metric, seed=seed, prune=prune)
