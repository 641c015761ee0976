"""Are two models really different? Paired statistics over the test slides that they share."""

from caprmil.comparison.compare import beside_shortcuts, compare
from caprmil.comparison.result import Comparison, Difference

__all__ = ["Comparison", "Difference", "beside_shortcuts", "compare"]
