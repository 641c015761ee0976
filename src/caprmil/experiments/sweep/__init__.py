"""Sweeps: one recipe at many settings, as a grid or a search, each point a run of its own."""

from caprmil.experiments.sweep.plan import Plan, Point, read_plan
from caprmil.experiments.sweep.pruning import Pruned
from caprmil.experiments.sweep.results import Result, Sweep
from caprmil.experiments.sweep.running import sweep

__all__ = ["Plan", "Point", "Pruned", "Result", "Sweep", "read_plan", "sweep"]
