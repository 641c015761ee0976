"""Patch encoders: the table of encoders, and their loading.

    encoder = encoders.load("lite0")
    features = encoder(patches)  # uint8 (B, h, w, 3) in, float32 (B, encoder.width) out

The table is plain data. torch is imported with the first encoder.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from caprmil.encoders.card import Card
from caprmil.encoders.table import CARDS, DEFAULT, as_markdown, find

if TYPE_CHECKING:
    from caprmil.encoders.encoder import Encoder
    from caprmil.encoders.loading import load

_MODULES = {"Encoder": "encoder", "load": "loading"}

__all__ = ["CARDS", "DEFAULT", "Card", "Encoder", "as_markdown", "find", "load"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"caprmil.encoders has no attribute '{name}'")
    return getattr(import_module(f"caprmil.encoders.{_MODULES[name]}"), name)
