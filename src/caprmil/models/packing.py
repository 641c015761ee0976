"""Packed bags: several bags concatenated along their patches, without padding.

Operations on single patches see one long bag; only sums over the patches of a bag split it.
Outputs are padded, since they are narrow.
"""

from typing import TypeAlias

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from caprmil.models.layers import weighted_sum

Sizes: TypeAlias = tuple[int, ...]
"""The number of patches of each packed bag, in their order."""


def split_bags(
    rows: Shaped[Tensor, "*any"], sizes: Sizes, *, dim: int = 1
) -> tuple[Shaped[Tensor, "*other"], ...]:
    """Return a view of each bag."""
    return torch.split(rows, list(sizes), dim)


def mask_from_sizes(sizes: Sizes, device: torch.device) -> Bool[Tensor, "B P"]:
    """Return the mask of the bags after `pad_packed`."""
    lengths = torch.tensor(sizes, device=device)
    return torch.arange(max(sizes), device=device) < lengths.unsqueeze(-1)


def pad_packed(rows: Shaped[Tensor, "1 N *any"], sizes: Sizes) -> Shaped[Tensor, "B P *any"]:
    """Return packed bags as a batch, padded with zeros to the longest.

    Not `pad_sequence`: its backward pass fills a whole batch with zeros for every bag.
    """
    mask = mask_from_sizes(sizes, rows.device)
    return rows.new_zeros(*mask.shape, *rows.shape[2:]).index_put((mask,), rows[0])


def pad_assignments(packed: Float[Tensor, "1 H N M"], sizes: Sizes) -> Float[Tensor, "B H P M"]:
    """Return the assignments of packed bags as a padded batch."""
    if len(sizes) == 1:
        return packed
    padded = pad_packed(rearrange(packed, "1 h n m -> 1 n h m"), sizes)
    return rearrange(padded, "b n h m -> b h n m")


def weighted_sum_packed(
    weights: Float[Tensor, "B P M"], patches: Float[Tensor, "1 N D"], sizes: Sizes
) -> Float[Tensor, "B M D"]:
    """Return the weighted sums of the patches of each bag, from padded weights.

    On a CPU, one product per bag is faster than one padded product, or than `index_add`.
    """
    bags = zip(weights, split_bags(patches[0], sizes, dim=0), strict=True)
    return torch.stack([weighted_sum(own[: len(bag)], bag) for own, bag in bags])
