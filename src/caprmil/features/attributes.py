"""Attributes of feature files as numbers and text. What cannot be one is None, as if it missed."""

from typing import Any

import numpy as np

from caprmil.slides.scale import ScaleRule

SMALLEST, LARGEST = 1e-6, 1e12  # of lengths in pixels or micrometres, scales and magnifications


def number(value: Any) -> float | None:
    """Return an attribute (number, text, or TRIDENT's 'None') as a positive number or None."""
    try:
        found = float(np.ravel(value)[0])
    except (TypeError, ValueError, IndexError):
        return None
    return found if SMALLEST <= found <= LARGEST else None


def integer(value: Any) -> int | None:
    found = number(value)
    return None if found is None else round(found)


def size(width: Any, height: Any) -> tuple[int, int] | None:
    wide, high = integer(width), integer(height)
    return None if wide is None or high is None else (wide, high)


def pair(value: Any) -> tuple[int, int] | None:
    """Return an attribute of two numbers as a size."""
    found = np.ravel(value)
    return size(*found) if len(found) == 2 else None


def text(value: Any) -> str | None:
    """Return an attribute as text in UTF-8, or None. h5py keeps other bytes as surrogates."""
    try:
        found = value.decode() if isinstance(value, bytes) else value
        known = isinstance(found, str) and bool(found.encode()) and found != "None"
    except UnicodeError:
        return None
    return found if known else None


def rule(value: Any) -> ScaleRule | None:
    """Return an attribute as the rule of a scale."""
    rules: dict[str | None, ScaleRule] = {"exact": "exact", "nominal": "nominal"}
    return rules.get(text(value))
