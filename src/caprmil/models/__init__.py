"""MIL models with one contract: `model(features, mask=..., grid=...) -> Output`. Torch only."""

from caprmil.models.abmil import ABMIL
from caprmil.models.base import Evidence, MILModel, Output, Uncertainty
from caprmil.models.bayesmil import BayesMIL
from caprmil.models.caprmil import CAPRMIL
from caprmil.models.clam import CLAM
from caprmil.models.context import ContextStack
from caprmil.models.dgrmil import DGRMIL
from caprmil.models.dsmil import DSMIL
from caprmil.models.dtfd import DTFDMIL
from caprmil.models.fusion import FusedModel, average_slide
from caprmil.models.mean import MeanMIL
from caprmil.models.pooling import (
    POOLS,
    AttentionPool,
    GatedAttentionPool,
    MeanPool,
    Pool,
)
from caprmil.models.registry import MODELS, create, list_models, register_model
from caprmil.models.sgpmil import SGPMIL
from caprmil.models.transmil import TransMIL

__all__ = [
    "ABMIL",
    "CAPRMIL",
    "CLAM",
    "DGRMIL",
    "DSMIL",
    "DTFDMIL",
    "MODELS",
    "POOLS",
    "SGPMIL",
    "AttentionPool",
    "BayesMIL",
    "ContextStack",
    "Evidence",
    "FusedModel",
    "GatedAttentionPool",
    "MILModel",
    "MeanMIL",
    "MeanPool",
    "Output",
    "Pool",
    "TransMIL",
    "Uncertainty",
    "average_slide",
    "create",
    "list_models",
    "register_model",
]
