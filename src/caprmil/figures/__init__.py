"""Pictures of numbers. Each function returns a figure; `save` writes it."""

from caprmil.figures.ablations import Trial, ablation_panels, search_panels
from caprmil.figures.bars import model_bars
from caprmil.figures.bubbles import Bubble, bubbles
from caprmil.figures.canvas import Canvas, Gallery
from caprmil.figures.context_planes import Plane, context_planes
from caprmil.figures.evidence_maps import evidence_maps
from caprmil.figures.flipping import Flip, FlipPanel, flipping
from caprmil.figures.learning_curves import learning_curves
from caprmil.figures.reliability import Bin, Reliability, reliability
from caprmil.figures.roc import roc_curves
from caprmil.figures.style import save, settle
from caprmil.figures.svg import add_tooltip, as_svg
from caprmil.figures.token_maps import head_maps, token_maps

__all__ = [
    "Bin",
    "Bubble",
    "Canvas",
    "Flip",
    "FlipPanel",
    "Gallery",
    "Plane",
    "Reliability",
    "Trial",
    "ablation_panels",
    "add_tooltip",
    "as_svg",
    "bubbles",
    "context_planes",
    "evidence_maps",
    "flipping",
    "head_maps",
    "learning_curves",
    "model_bars",
    "reliability",
    "roc_curves",
    "save",
    "search_panels",
    "settle",
    "token_maps",
]
