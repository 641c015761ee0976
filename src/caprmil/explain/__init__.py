"""Explain: which patches and tokens an answer rests on, and which map of them to trust."""

from caprmil.explain.attribution import METHODS, Method, attribute, gradient
from caprmil.explain.case import (
    Answer,
    Case,
    Squares,
    Subject,
    ask_run,
    cut,
    examine,
    find,
    open_slide,
    squares,
    temperatures,
    why_unplaced,
)
from caprmil.explain.explanation import (
    TOP,
    Explanation,
    Layer,
    View,
    explain,
    top_patches,
)
from caprmil.explain.export import write_csv, write_geojson, write_parquet, write_scores
from caprmil.explain.faithfulness import Curves, Faithfulness, faithfulness, relevance
from caprmil.explain.pictures import Pictures
from caprmil.explain.trust import Trust, follow, trust, unseen_slides

__all__ = [
    "METHODS",
    "TOP",
    "Answer",
    "Case",
    "Curves",
    "Explanation",
    "Faithfulness",
    "Layer",
    "Method",
    "Pictures",
    "Squares",
    "Subject",
    "Trust",
    "View",
    "ask_run",
    "attribute",
    "cut",
    "examine",
    "explain",
    "faithfulness",
    "find",
    "follow",
    "gradient",
    "open_slide",
    "relevance",
    "squares",
    "temperatures",
    "top_patches",
    "trust",
    "unseen_slides",
    "why_unplaced",
    "write_csv",
    "write_geojson",
    "write_parquet",
    "write_scores",
]
