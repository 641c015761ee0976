"""Scales in microns per pixel: two rules to name one, and when two are the same."""

from typing import Literal, TypeAlias

ScaleRule: TypeAlias = Literal["exact", "nominal"]
"""exact: measured microns per pixel. nominal: 10 / magnification."""


def same_scale(one: float, other: float) -> bool:
    """Tell whether two scales in microns per pixel are one, to within a tenth."""
    return max(one, other) <= 1.1 * min(one, other)
