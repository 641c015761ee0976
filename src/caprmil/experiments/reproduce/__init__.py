"""The paper's four benchmarks, run by its protocols and compared with its figures.

A protocol has the names in the benchmark's table, its splits and its metrics. A model's recipe has
its settings and its training. The paper's figures are in `caprmil.experiments.paper`.
"""

from caprmil.experiments.reproduce.protocols import (
    PROTOCOLS,
    REHEARSAL,
    Protocol,
    all_models,
    choose_models,
    find_protocol,
    protocol_recipe,
    read_labels,
)
from caprmil.experiments.reproduce.reproduction import ModelScore, Reproduction, reproduce

__all__ = [
    "PROTOCOLS",
    "REHEARSAL",
    "ModelScore",
    "Protocol",
    "Reproduction",
    "all_models",
    "choose_models",
    "find_protocol",
    "protocol_recipe",
    "read_labels",
    "reproduce",
]
