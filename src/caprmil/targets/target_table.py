"""A target as a table with its kind and settings, as in recipes and in files of runs."""

from collections.abc import Mapping
from typing import Any

from caprmil import config
from caprmil.errors import RecipeError
from caprmil.targets.kinds import find_target
from caprmil.targets.target import Target


def parse_target(table: Mapping[str, Any]) -> Target:
    """Return the target of a table with its kind and settings."""
    if not isinstance(table, Mapping) or "kind" not in table:
        raise RecipeError(f"target must be a table with a kind, not {table!r}")
    settings = {name: value for name, value in table.items() if name != "kind"}
    return config.parse(settings, into=find_target(str(table["kind"])), name="target")


def target_table(target: Target) -> dict[str, Any]:
    """Return a target as the table that `parse_target` reads."""
    return {"kind": target.kind, **config.as_table(target)}
