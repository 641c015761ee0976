"""Scales in microns per pixel: the two scale rules, and a comparison."""

from typing import Literal, TypeAlias

ScaleRule: TypeAlias = Literal["exact", "nominal"]
"""exact: measured microns per pixel. nominal: 10 / magnification."""


def same_scale(one: float, other: float) -> bool:
    """Return whether two scales in microns per pixel are equal within 10 %."""
    return max(one, other) <= 1.1 * min(one, other)
