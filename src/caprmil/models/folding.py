"""Context attention with its linear layers folded into the tokens.

The layers act on the M H tokens or on each other, never on the N patches. In exact arithmetic the
result is that of `ContextAttention`, with gradients and dropout. Patches are rows here, and their
assignments to the tokens of all heads are one row of M H numbers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from caprmil.models.base import Assignments, Patches
from caprmil.models.layers import summing_dtype, weighted_sum
from caprmil.models.packing import Sizes, split_bags
from caprmil.models.products import linear

if TYPE_CHECKING:
    from caprmil.models.context import ContextAttention, ContextStack

PART = 50_000  # patches of a large bag per tensor: at width 128 it has less than 32 MiB
EPSILON = 1e-5  # added to the mass of a token, so that an empty token is zero and not NaN

Rows = Float[Tensor, "n _"]


@dataclass(frozen=True)
class TokenSums:
    """Weighted sums of patches and of their weights, per token. Sums of chunks add up."""

    sums: Float[Tensor, "MH D"]
    mass: Float[Tensor, " MH"]

    def __add__(self, other: "TokenSums") -> "TokenSums":
        return TokenSums(self.sums + other.sums, self.mass + other.mass)


class FoldedAttention:
    """The steps of context attention, with 3 M H products per patch and channel for 3 D + 3 M.

    With the paper's settings, 96 for 396. It saves work up to M H = D + M.
    """

    def __init__(self, attention: "ContextAttention") -> None:
        self.attention, self.heads = attention, attention.heads
        project_x, cluster = attention.project_x, attention.cluster
        weight = rearrange(project_x.weight, "(h k) d -> h k d", h=self.heads)
        bias = rearrange(project_x.bias, "(h k) -> h k", h=self.heads)
        temperature = attention.temperature()
        weight = cluster.weight @ weight / temperature[:, None, None]
        bias = F.linear(bias, cluster.weight, cluster.bias) / temperature[:, None]
        self.weight = rearrange(weight, "h m d -> (m h) d")
        self.bias = rearrange(bias, "h m -> (m h)")

    def assign(self, patches: Rows) -> Rows:
        """Return the soft assignments of patches (soft clustering)."""
        logits = linear(patches, self.weight, self.bias)
        # The tokens of a head are not neighbours: a softmax over four neighbours is slow.
        by_head = logits.view(len(logits), -1, self.heads)
        return by_head.softmax(dim=1, dtype=summing_dtype(logits)).view(logits.shape)

    def aggregate(self, patches: Rows, assignments: Rows) -> TokenSums:
        """Return the sums of patches per token (the first half of aggregation)."""
        return TokenSums(weighted_sum(assignments, patches), assignments.sum(dim=0))

    def update(self, *bags: TokenSums) -> Float[Tensor, "bags MH D"]:
        """Return what each token adds to its patches, for each of several bags.

        The rest of aggregation, self-attention over tokens, and the output layer.
        """
        attention = self.attention
        sums = torch.stack([bag.sums for bag in bags])
        sums = rearrange(sums, "b (m h) d -> b h m d", h=self.heads)
        mass = torch.stack([bag.mass for bag in bags])
        mass = rearrange(mass, "b (m h) -> b h m 1", h=self.heads)
        with torch.autocast(sums.device.type, enabled=False):  # sums are in float32 or better
            weight, bias = (part.to(sums.dtype) for part in attention.project_f.parameters())
            weight = rearrange(weight, "(h k) d -> h d k", h=self.heads)
            bias = rearrange(bias, "(h k) -> h 1 k", h=self.heads)
            tokens = (sums @ weight + mass * bias) / (mass + EPSILON)
        tokens = attention.attend_tokens(tokens.to(attention.qkv.weight.dtype))
        # The weights of a patch sum to one in each head, so that each head has 1 / H of the bias.
        weight = rearrange(attention.project_out.weight, "d (h k) -> h k d", h=self.heads)
        update = tokens @ weight + attention.project_out.bias / self.heads
        return rearrange(update, "b h m d -> b (m h) d")

    def without_messages(
        self, update: Float[Tensor, "MH D"], removed: Bool[Tensor, "H M"]
    ) -> Float[Tensor, "MH D"]:
        """Return an update in which the removed tokens add nothing to their patches.

        The share of the output layer's bias stays: it belongs to no token.
        """
        rows = rearrange(removed, "h m -> (m h) 1").to(update.device)
        bias = (self.attention.project_out.bias / self.heads).to(update.dtype)
        return torch.where(rows, bias, update)

    def unfold(self, assignments: Rows) -> Assignments:
        """Return the assignments of one bag in the shape of an `Output`."""
        return rearrange(assignments, "n (m h) -> 1 h n m", h=self.heads)


def context_packed(
    stack: "ContextStack", features: Float[Tensor, "1 N E"], sizes: Sizes, *, last_mlp: bool
) -> tuple[Patches, tuple[Assignments, ...]]:
    """Return packed patches in context, and their packed assignments. Saves the padding.

    Without `last_mlp`, the MLP of the last block is left to the caller.
    """
    patches, assignments = stack.project(features), list[Assignments]()
    for number, block in enumerate(stack.blocks):
        attention = FoldedAttention(block.attend)
        normed = block.norm_attend(patches)[0]
        assigned = attention.assign(normed)
        rows = (split_bags(part, sizes, dim=0) for part in (normed, assigned))
        bags = list(zip(*rows, strict=True))
        updates = attention.update(*(attention.aggregate(*bag) for bag in bags))
        context = [
            linear(own.to(update.dtype), update.mT, None)
            for (_, own), update in zip(bags, updates, strict=True)
        ]
        patches = patches + block.dropout(torch.cat(context).unsqueeze(0))
        if last_mlp or number < len(stack.blocks) - 1:
            patches = block.add_mlp(patches)
        assignments.append(attention.unfold(assigned))
    return patches, tuple(assignments)


def context_in_parts(
    stack: "ContextStack", features: Float[Tensor, "1 N E"]
) -> tuple[list[Float[Tensor, "1 _ D"]], tuple[Assignments, ...]]:
    """Return `context_packed` for one bag, in parts of PART patches, without the last MLP.

    The allocator returns larger tensors to the system after each use, and gets new pages for the
    next: that takes a third of a step on 200,000 patches.
    """
    parts = [stack.project(part) for part in torch.split(features, PART, dim=1)]
    assignments = list[Assignments]()
    for number, block in enumerate(stack.blocks):
        attention = FoldedAttention(block.attend)
        normed = [block.norm_attend(part)[0] for part in parts]
        assigned = [attention.assign(rows) for rows in normed]
        first, *others = map(attention.aggregate, normed, assigned)
        (update,) = attention.update(sum(others, first))
        context = (linear(own.to(update.dtype), update.mT, None) for own in assigned)
        parts = [
            part + block.dropout(own.unsqueeze(0)) for part, own in zip(parts, context, strict=True)
        ]
        if number < len(stack.blocks) - 1:
            parts = [block.add_mlp(part) for part in parts]
        assignments.append(attention.unfold(torch.cat(assigned)))
    return parts, tuple(assignments)
