"""What a model costs: parameters, operations, time and memory at a bag size."""

from caprmil.experiments.cost.measuring import Cost, compare, measure
from caprmil.experiments.cost.memory import LiveTensors
from caprmil.experiments.cost.sizes import flops, parameters

__all__ = ["Cost", "LiveTensors", "compare", "flops", "measure", "parameters"]
