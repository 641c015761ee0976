"""What several models share: sums over patches that keep their digits, and draws that repeat."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


def masked_softmax(
    scores: Float[Tensor, "*batch N"], mask: Bool[Tensor, "*#batch N"]
) -> Float[Tensor, "*batch N"]:
    """Return weights over the real patches that sum to one, in float32 or better."""
    scores = scores.to(summing_dtype(scores)).masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1)


def weighted_sum(
    weights: Float[Tensor, "*batch N M"], values: Float[Tensor, "*batch N K"]
) -> Float[Tensor, "*batch M K"]:
    """Return, for each of M columns of weights, the weighted sum of N values.

    In float32 or better, also under autocast: a sum over 50,000 patches in float16 loses its
    digits or overflows.
    """
    dtype = summing_dtype(values)
    weights, values = weights.to(dtype), values.to(dtype)
    if not torch.is_autocast_enabled(values.device.type):
        return weights.mT @ values
    with torch.autocast(values.device.type, enabled=False):
        return weights.mT @ values


def summing_dtype(values: Tensor) -> torch.dtype:
    """Return the precision for sums over patches: the values' own, and at least float32."""
    return torch.promote_types(values.dtype, torch.float32)


def content_order(patches: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
    """Return an order of the patches by what they hold, not by where they stand in a file.

    What is drawn for a patch in evaluation goes by this, so that the order of a file is no matter.
    """
    # Some patches at a time: in float64 as a whole, they would be copied out of the cache.
    pieces = torch.split(patches.detach(), 256)
    sums = torch.cat([piece.sum(dim=-1, dtype=torch.float64) for piece in pieces])
    return sums.argsort(stable=True)


def seeded(seed: int, device: torch.device) -> torch.Generator:
    """Return a generator of its own for an evaluation: same seed, same answer."""
    return torch.Generator(device).manual_seed(seed)


class Dropout(nn.Module):
    """Dropout that costs a quarter on the CPU: four draws of 16 bits from one random number.

    Entries fall out with p to within a 65,536th, and the others grow by exactly what makes up for
    it. One byte an entry is kept for the way back.
    """

    def __init__(self, p: int | float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"Dropout takes a share from 0 to below 1: {p=}.")
        self.p = p

    @property
    def lost(self) -> int:
        """How many of 65,536 entries fall out."""
        return round(self.p * 65536) if self.training else 0

    @property
    def growth(self) -> float:
        """By how much the others grow."""
        return 65536 / (65536 - self.lost)

    def forward(self, values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        if not self.lost:
            return values
        if values.device.type != "cpu":
            return F.dropout(values, self.p)
        return _Drop.apply(values, self.draw(values), self.growth)  # type: ignore[no-untyped-call]

    def draw(self, values: Float[Tensor, "*any"]) -> Bool[Tensor, "*any"]:
        """Draw which entries of such values stay. On the CPU."""
        if not self.lost:
            return torch.ones(values.shape, dtype=torch.bool)
        bits = torch.empty(-(-values.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        drawn = bits.view(torch.int16)[: values.numel()].view(values.shape)
        return drawn >= self.lost - 32768

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, stay: Tensor, growth: float) -> Tensor:
        ctx.save_for_backward(stay)
        ctx.growth = growth
        return (values * stay).mul_(growth)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (stay,) = ctx.saved_tensors
        return (slope * stay).mul_(ctx.growth), None, None
