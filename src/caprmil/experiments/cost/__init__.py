"""What a model costs at a bag size: parameters, operations, time and memory."""

from caprmil.experiments.cost.live_tensors import LiveTensors
from caprmil.experiments.cost.measure import Cost, compare, flops, measure, parameters

__all__ = ["Cost", "LiveTensors", "compare", "flops", "measure", "parameters"]
