"""Protocols: the paper's four benchmarks, run as it ran them, beside its figures.

A protocol knows what its benchmark's table calls things, and its recipe says how it is split and
trained; a model's own recipe says the rest. The paper's figures are in `paper`.
"""

from caprmil.experiments.reproduce.benchmarks import (
    PROTOCOLS,
    REHEARSAL,
    Protocol,
    all_models,
    choose,
    find,
    prepare,
    recipe,
    recipe_folder,
)
from caprmil.experiments.reproduce.result import Line, Reproduction
from caprmil.experiments.reproduce.running import reproduce

__all__ = [
    "PROTOCOLS",
    "REHEARSAL",
    "Line",
    "Protocol",
    "Reproduction",
    "all_models",
    "choose",
    "find",
    "prepare",
    "recipe",
    "recipe_folder",
    "reproduce",
]
