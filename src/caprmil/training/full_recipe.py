"""A recipe in full: its own settings, and all others at their defaults, with their comments."""

import re
from typing import Any

from caprmil.config import read_toml
from caprmil.training.recipe_files import list_recipes

FULL = "caprmil"  # the recipe that has every setting
HEADER = re.compile(r"(?m)^(?=(?:# )?\[\w[\w.]*\])")
SAME_KEYS = ("data", "splits", "train")
"""Tables that have the same settings in every recipe."""


def full_recipe(name: str) -> str:
    """Return a recipe of the package as text, with every setting but those of other models."""
    known = list_recipes()
    full = known[FULL].read_text(encoding="utf-8")
    if name == FULL:
        return full
    text = known[name].read_text(encoding="utf-8")
    table, own, every = read_toml(text), _tables(text), _tables(full)
    head = own.pop("").strip()
    for key in SAME_KEYS:
        every[key] = _with(every[key], own.pop(key, ""), table.get(key, {}))
    every.pop("")
    return "\n\n".join(part.strip() for part in [head, *(every | own).values()]) + "\n"


def _tables(text: str) -> dict[str, str]:
    """Return the text of each table by its name, and what is before them by ""."""
    head, *parts = HEADER.split(text)
    return {"": head} | {re.sub(r"^(?:# )?\[(\w+).*", r"\1", p, flags=re.S): p for p in parts}


def _with(text: str, own: str, settings: dict[str, Any]) -> str:
    """Return a table with the lines of a recipe in place of those of the same settings."""
    lines = {key: line for line, key in re.findall(r"(?m)^((\w+) = .*)$", own)}
    assert lines.keys() == settings.keys(), own  # one line each, as in recipes of the package
    for key, line in lines.items():
        old = re.compile(rf"(?m)^(?:# )?{key} = [^#\n]*?( *#.*)?$")
        comment = "" if "#" in line else (old.search(text) or [None, ""])[1] or ""
        text = old.sub((line + comment).replace("\\", r"\\"), text)
    return text
