"""MIL models under one contract: `model(features, mask=..., grid=...) -> Output`. Torch only."""

from caprmil.models.abmil import ABMIL
from caprmil.models.base import MILModel, Output, Spread
from caprmil.models.caprmil import CAPRMIL, ContextStack
from caprmil.models.mean import MeanMIL
from caprmil.models.pooling import POOLS, AttentionPool, GatedAttentionPool, MeanPool, Pool
from caprmil.models.registry import MODELS, create, list_models

__all__ = [
    "ABMIL",
    "CAPRMIL",
    "MODELS",
    "POOLS",
    "AttentionPool",
    "ContextStack",
    "GatedAttentionPool",
    "MILModel",
    "MeanMIL",
    "MeanPool",
    "Output",
    "Pool",
    "Spread",
    "create",
    "list_models",
]
