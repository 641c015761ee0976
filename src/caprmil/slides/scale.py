"""Scales in microns per pixel: plausible ones, the two scale rules, and a comparison."""

from typing import Literal, TypeAlias

FINEST_MPP, COARSEST_MPP = 0.05, 20.0
"""Plausible microns per pixel of a slide. Values outside are errors of the unit."""

ScaleRule: TypeAlias = Literal["exact", "nominal"]
"""exact: measured microns per pixel. nominal: 10 / magnification."""


def same_scale(one: float, other: float) -> bool:
    """Return whether two scales in microns per pixel are equal within 10 %."""
    return max(one, other) <= 1.1 * min(one, other)
