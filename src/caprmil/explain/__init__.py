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
    squares,
    temperatures,
)
from caprmil.explain.explanation import (
    TOP,
    Explanation,
    Layer,
    View,
    explain,
    top_patches,
)

__all__ = [
    "METHODS",
    "TOP",
    "Answer",
    "Case",
    "Explanation",
    "Layer",
    "Method",
    "Squares",
    "Subject",
    "View",
    "ask_run",
    "attribute",
    "cut",
    "examine",
    "explain",
    "find",
    "gradient",
    "squares",
    "temperatures",
    "top_patches",
]
