"""Pictures of numbers. Each function returns a figure; `save` writes it."""

from caprmil.figures.ablations import Trial, ablation_panels, search_panels
from caprmil.figures.bars import model_bars
from caprmil.figures.bubbles import Bubble, bubbles
from caprmil.figures.curves import learning_curves, roc_curves
from caprmil.figures.flipping import Flip, FlipPanel, flipping
from caprmil.figures.reliability import Bin, Reliability, reliability
from caprmil.figures.style import save

__all__ = [
    "Bin",
    "Bubble",
    "Flip",
    "FlipPanel",
    "Reliability",
    "Trial",
    "ablation_panels",
    "bubbles",
    "flipping",
    "learning_curves",
    "model_bars",
    "reliability",
    "roc_curves",
    "save",
    "search_panels",
]
