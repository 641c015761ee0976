"""What several models share: sums over patches that keep their digits, and draws that repeat."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
    with torch.autocast(values.device.type, enabled=False):
        return weights.to(dtype).mT @ values.to(dtype)


def summing_dtype(values: Tensor) -> torch.dtype:
    """Return the precision for sums over patches: the values' own, and at least float32."""
    return torch.promote_types(values.dtype, torch.float32)


def content_order(patches: Float[Tensor, "N D"]) -> Int[Tensor, " N"]:
    """Return an order of the patches by what they hold, not by where they stand in a file.

    What is drawn for a patch in evaluation goes by this, so that the order of a file is no matter.
    """
    return patches.detach().sum(dim=-1, dtype=torch.float64).argsort(stable=True)


def seeded(seed: int, device: torch.device) -> torch.Generator:
    """Return a generator of its own for an evaluation: same seed, same answer."""
    return torch.Generator(device).manual_seed(seed)
