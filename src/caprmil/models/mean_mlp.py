"""The mean of patches after the MLP of a block, without the last linear layer on every patch.

A linear layer and a mean can be exchanged. With dropout, let k be the row of a patch in the mask
and g its hidden row: the sum over patches of k * (W g + b) is the row sum of W * sum(k g^T), plus
b * sum(k). Neither needs an output row per patch, and the gradient of W needs no product over
patches.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from caprmil.models.base import CHUNK
from caprmil.models.layers import as_numbers, summing_dtype
from caprmil.models.packing import Sizes, split_bags
from caprmil.models.products import linear, sizes_by_speed, sum_of_products

if TYPE_CHECKING:
    from caprmil.models.context import ContextBlock

Rows = Float[Tensor, "n _"]


class MeanAfterMLP:
    """The mean of the patches of one bag after an MLP, from chunks of patches before it.

    Saves the last linear layer on every patch and, in training, the hidden activations behind GELU.
    """

    def __init__(self, block: "ContextBlock | None") -> None:
        self.block, self.n = block, 0
        self.patches = self.hidden = self.products = self.kept = torch.zeros(())

    def add(self, patches: Rows, kept: Bool[Tensor, "n _"] | None = None) -> None:
        """Add a chunk of patches, with the dropout mask of their MLP outputs if there is one."""
        self.n += len(patches)
        self.dtype = patches.dtype
        self.patches = self.patches + _sum(patches)
        if self.block is None:
            return
        normed = self.block.norm_mlp(patches)
        if kept is None:
            for rows in torch.split(normed, sizes_by_speed(normed)):
                self.hidden = self.hidden + _sum(self.block.mlp.hidden(rows))
            return
        hidden = self.block.mlp.hidden(normed)
        self.products = self.products + _MaskedProduct.apply(kept, hidden)  # type: ignore[no-untyped-call]
        self.kept = self.kept + kept.view(torch.uint8).sum(dim=0)

    def add_chunks(self, patches: Rows, kept: Bool[Tensor, "n _"] | None) -> None:
        """Add patches in chunks that fit into the cache."""
        chunks = torch.split(patches, CHUNK)
        masks = [None] * len(chunks) if kept is None else torch.split(kept, CHUNK)
        for chunk, mask in zip(chunks, masks, strict=True):
            self.add(chunk, mask)

    def value(self) -> Float[Tensor, " D"]:
        """Return the mean."""
        mean = (self.patches / self.n).to(self.dtype)
        if self.block is None:
            return mean
        down = self.block.mlp.down
        if not self.products.ndim:
            return mean + down((self.hidden / self.n).to(self.dtype))
        output = (down.weight * self.products).sum(dim=1) + down.bias * self.kept
        return mean + output * (self.block.dropout.scale / self.n)


def means_after_mlp(
    block: "ContextBlock", patches: Float[Tensor, "1 N D"], sizes: Sizes
) -> Float[Tensor, "bags D"]:
    """Return the mean of each packed bag after the MLP of a block, in training on a CPU."""
    kept = block.dropout.draw(patches)[0] if block.dropout.dropped else None
    masks = [None] * len(sizes) if kept is None else split_bags(kept, sizes, dim=0)
    means = []
    for bag, mask in zip(split_bags(patches[0], sizes, dim=0), masks, strict=True):
        mean = MeanAfterMLP(block)
        mean.add_chunks(bag, mask)
        means.append(mean.value())
    return torch.stack(means)


def mean_of_parts(
    block: "ContextBlock", parts: Sequence[Float[Tensor, "1 _ D"]]
) -> Float[Tensor, "1 D"]:
    """Return `means_after_mlp` for one bag in parts."""
    mean = MeanAfterMLP(block)
    for part in parts:
        mean.add_chunks(part[0], block.dropout.draw(part)[0] if block.dropout.dropped else None)
    return mean.value().unsqueeze(0)


def _sum(rows: Rows) -> Float[Tensor, " F"]:
    return rows.sum(dim=0, dtype=summing_dtype(rows))


class _MaskedProduct(torch.autograd.Function):
    """The product of a mask, transposed, and values. Keeps the mask in bytes, not in floats."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return sum_of_products(as_numbers(mask, values.dtype), values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (mask,) = ctx.saved_tensors
        return None, linear(as_numbers(mask, gradient.dtype), gradient.mT, None)
