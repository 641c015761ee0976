"""Shared by the tests of the faster forms of CAPRMIL: a model in float64, and its plain form."""

from typing import Any

import torch
from torch import Tensor

from caprmil.models import CAPRMIL, Output

POOLS = ("mean", "attention", "gated")
TOKENS = {"few": 3, "as many as channels": 8, "more than channels": 11}  # 2 heads, 8 channels each


def make_model(**settings: Any) -> CAPRMIL:
    """Return a small model in float64, in training mode, with random instead of initial weights."""
    torch.manual_seed(0)
    model = CAPRMIL(24, 3, **{"dim": 16, "heads": 2, "tokens": 3, **settings}).double()
    for name, value in model.named_parameters():
        torch.nn.init.normal_(value, std=1.0 if "temperature" in name else 0.3)
    return model


def without_dropout(model: CAPRMIL) -> CAPRMIL:
    """Return the model with all dropout set to zero, also in its pool."""
    for layer in model.modules():
        if hasattr(layer, "p"):
            layer.p = 0.0
    return model


def plain(model: CAPRMIL, bags: Tensor, mask: Tensor | None = None) -> Output:
    """Return the output of the plain form."""
    return model.forward_bags(*model.validate(bags, mask), None)


def gradients(model: CAPRMIL, output: Output) -> dict[str, Tensor]:
    """Return the gradients of a loss of the output, by parameter."""
    model.zero_grad()
    output.logits.square().sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def check(found: Output, expected: Output) -> None:
    """Check that all fields of two outputs are equal."""
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.embedding, expected.embedding)
    torch.testing.assert_close(found.attention, expected.attention)
    torch.testing.assert_close(found.assignments, expected.assignments)
