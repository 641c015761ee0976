"""Shared functions and layers: exact sums over patches, repeatable draws, dropout, the loss."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from caprmil.models.products import sum_of_products


def weighted_cross_entropy(
    logits: Float[Tensor, "B C"], labels: Int[Tensor, " B"], weights: Tensor | None = None
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy, each bag multiplied by the weight of its class.

    Not the weighted mean of torch: that divides by the weights, which then cancel in a batch of
    one bag.
    """
    losses = F.cross_entropy(logits.to(summing_dtype(logits)), labels, reduction="none")
    if weights is not None:
        losses = losses * weights.to(losses)[labels]
    return losses.mean()


def masked_binary_cross_entropy(
    logits: Float[Tensor, "B C"], labels: Tensor, positive_weights: Tensor | None = None
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of C independent labels (B, C): 1, 0, or -1 if missing.

    A missing label counts as a loss of 0, so that every known one counts the same, however many
    others its bag has.
    """
    logits = logits.to(summing_dtype(logits))
    known = labels >= 0
    weights = None if positive_weights is None else positive_weights.to(logits)
    losses = F.binary_cross_entropy_with_logits(
        logits, (labels == 1).to(logits), pos_weight=weights, reduction="none"
    )
    return (losses * known).mean()


def masked_softmax(
    scores: Float[Tensor, "*batch N"], mask: Bool[Tensor, "*#batch N"] | Float[Tensor, "*#batch N"]
) -> Float[Tensor, "*batch N"]:
    """Return weights that sum to one over the unmasked patches, in float32 or better.

    A mask of numbers says how often each patch counts.
    """
    scores = scores.to(summing_dtype(scores))
    if mask.is_floating_point():
        return (scores + mask.log()).softmax(dim=-1)
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)


def weighted_sum(
    weights: Float[Tensor, "*batch N M"], values: Float[Tensor, "*batch N K"]
) -> Float[Tensor, "*batch M K"]:
    """Return the weighted sum of N values for each of M columns of weights.

    In float32 or better, also under autocast: a sum over 50,000 patches in float16 is inexact or
    overflows.
    """
    dtype = summing_dtype(values)
    weights, values = weights.to(dtype), values.to(dtype)
    if not torch.is_autocast_enabled(values.device.type):
        return sum_of_products(weights, values)
    with torch.autocast(values.device.type, enabled=False):
        return weights.mT @ values


def summing_dtype(values: Tensor) -> torch.dtype:
    """Return the precision for sums and losses: that of the values, and at least float32."""
    return torch.promote_types(values.dtype, torch.float32)


def content_order(patches: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
    """Return an order of the patches that depends on their features only.

    Random numbers of an evaluation are assigned in this order, so that the order of the patches in
    a file does not matter.
    """
    # In chunks, since a float64 copy of all patches does not fit into the cache.
    chunks = torch.split(patches.detach(), 256)
    sums = torch.cat([chunk.sum(dim=-1, dtype=torch.float64) for chunk in chunks])
    return sums.argsort(stable=True)


def seeded(seed: int, device: torch.device) -> torch.Generator:
    """Return a new generator for an evaluation, so that its draws are repeatable."""
    return torch.Generator(device).manual_seed(seed)


class GELU(nn.Module):
    """GELU. Without gradients it overwrites its input, which saves memory traffic."""

    def forward(self, values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return F.gelu(values)
        return torch.ops.aten.gelu_(values)


class Dropout(nn.Module):
    """Dropout at a quarter of the cost on the CPU: four 16-bit draws from each random number.

    The probability is a multiple of 1/65,536, and the entries that stay are scaled to match. The
    backward pass keeps one byte per entry.
    """

    def __init__(self, p: int | float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"Dropout takes a share from 0 to below 1: {p=}.")
        self.p = p

    @property
    def dropped(self) -> int:
        """The expected number of dropped entries out of 65,536."""
        return round(self.p * 65536) if self.training else 0

    @property
    def scale(self) -> float:
        """The factor of the entries that stay."""
        return 65536 / (65536 - self.dropped)

    def forward(self, values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        if not self.dropped:
            return values
        if values.device.type != "cpu":
            return F.dropout(values, self.p)
        return _Dropout.apply(values, self.draw(values), self.scale)  # type: ignore[no-untyped-call]

    def draw(self, values: Float[Tensor, "*any"]) -> Bool[Tensor, "*any"]:
        """Return a mask in the shape of the values, true for the entries that stay. CPU only."""
        if not self.dropped:
            return torch.ones(values.shape, dtype=torch.bool)
        bits = torch.empty(-(-values.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        drawn = bits.view(torch.int16)[: values.numel()].view(values.shape)
        return drawn >= self.dropped - 32768

    def extra_repr(self) -> str:
        return f"p={self.p}"


def as_numbers(mask: Bool[Tensor, "*any"], dtype: torch.dtype) -> Float[Tensor, "*any"]:
    """Return a mask as 1 and 0. From bytes, which is five times as fast as from booleans."""
    return mask.view(torch.uint8).to(dtype)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return as_numbers(kept, values.dtype).mul_(values).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return as_numbers(kept, gradient.dtype).mul_(gradient).mul_(ctx.scale), None, None
