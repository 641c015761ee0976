"""Pictures of numbers. Each function returns a figure; `save` writes it."""

from caprmil.figures.bars import model_bars
from caprmil.figures.curves import learning_curves, roc_curves
from caprmil.figures.style import save

__all__ = ["learning_curves", "model_bars", "roc_curves", "save"]
