"""Figures: each function returns a Matplotlib figure, for `save` or `as_svg`."""

from caprmil.figures.ablations import Trial, ablation_panels, search_panels
from caprmil.figures.answer_rows import AnswerRow, answer_rows
from caprmil.figures.atlas_panels import Points, TokenPanel, token_atlas
from caprmil.figures.bars import model_bars
from caprmil.figures.bubbles import Bubble, bubbles
from caprmil.figures.canvas import Canvas, Gallery
from caprmil.figures.context_planes import Plane, context_planes
from caprmil.figures.deletion_curves import DeletionCurve, DeletionPanel, deletion_curves
from caprmil.figures.learning_curves import learning_curves
from caprmil.figures.relevance_maps import relevance_maps
from caprmil.figures.reliability import Bin, Reliability, reliability
from caprmil.figures.roc import roc_curves
from caprmil.figures.scatter import predicted_against_true, residuals, value_calibration
from caprmil.figures.selective_risk import selective_risk
from caprmil.figures.style import save, settle
from caprmil.figures.survival_curves import (
    GroupCurve,
    HorizonGroups,
    survival_calibration,
    survival_curves,
)
from caprmil.figures.svg import add_tooltip, as_svg
from caprmil.figures.token_maps import head_maps, token_maps

__all__ = [
    "AnswerRow",
    "Bin",
    "Bubble",
    "Canvas",
    "DeletionCurve",
    "DeletionPanel",
    "Gallery",
    "GroupCurve",
    "HorizonGroups",
    "Plane",
    "Points",
    "Reliability",
    "TokenPanel",
    "Trial",
    "ablation_panels",
    "add_tooltip",
    "answer_rows",
    "as_svg",
    "bubbles",
    "context_planes",
    "deletion_curves",
    "head_maps",
    "learning_curves",
    "model_bars",
    "predicted_against_true",
    "relevance_maps",
    "reliability",
    "residuals",
    "roc_curves",
    "save",
    "search_panels",
    "selective_risk",
    "settle",
    "survival_calibration",
    "survival_curves",
    "token_atlas",
    "token_maps",
    "value_calibration",
]
