"""What a model costs: parameters, operations, time and memory at a bag size."""

from caprmil.cost.measuring import Cost, compare, measure
from caprmil.cost.memory import LiveTensors
from caprmil.cost.sizes import flops, parameters

__all__ = ["Cost", "LiveTensors", "compare", "flops", "measure", "parameters"]
