"""Packed bags: several bags in one block of rows, one behind the other, and nothing in between.

What is done patch by patch sees the block as a whole; only sums over the patches of a bag part it.
What leaves a model is padded again, when it is no longer wide.
"""

from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from caprmil.models.layers import weighted_sum

Sizes: TypeAlias = tuple[int, ...]
"""How many patches each of the packed bags has, in their order."""


def apart(
    rows: Shaped[Tensor, "*any"], sizes: Sizes, *, dim: int = 1
) -> tuple[Shaped[Tensor, "*other"], ...]:
    """Return views of each bag."""
    return torch.split(rows, list(sizes), dim)


def mask_of(sizes: Sizes, device: torch.device) -> Bool[Tensor, "B P"]:
    """Return what is true where `unpack` has a patch, and false where it has padding."""
    lengths = torch.tensor(sizes, device=device)
    return torch.arange(max(sizes), device=device) < lengths.unsqueeze(-1)


def unpack(rows: Shaped[Tensor, "1 N *any"], sizes: Sizes) -> Shaped[Tensor, "B P *any"]:
    """Return bags side by side, with zeros behind those that are shorter than the longest.

    Not by `pad_sequence`: on its way back it fills a whole batch with zeros for every bag.
    """
    mask = mask_of(sizes, rows.device)
    return rows.new_zeros(*mask.shape, *rows.shape[2:]).index_put((mask,), rows[0])


def sum_packed(
    weights: Float[Tensor, "B P M"], patches: Float[Tensor, "1 N D"], sizes: Sizes
) -> Float[Tensor, "B M D"]:
    """Return the weighted sums of each bag's patches; the weights are unpacked already.

    A product a bag is quicker on a CPU than one padded product, or than to add row by row.
    """
    bags = zip(weights, apart(patches[0], sizes, dim=0), strict=True)
    return torch.stack([weighted_sum(own[: len(bag)], bag) for own, bag in bags])
