"""Aggregators: many patches in, one vector and each patch's share in it out (section 3.1.4).

A pool scores patches; the softmax of the scores are the shares. Mean is the pool whose scores are
all equal. To add one: write the class, add it to POOLS.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import Embedding, Evidence, Mask, Patches, Weights
from caprmil.models.layers import Dropout, masked_softmax, summing_dtype, weighted_sum
from caprmil.models.packing import Sizes, mask_of, sum_packed, unpack


class Pool(nn.Module):
    """Base of the additive pools: a bag is the sum of its patches, weighted by their shares."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def score(self, patches: Patches) -> Weights:
        """Return one number a patch. This is the method a new pool writes."""
        raise NotImplementedError

    def forward(self, patches: Patches, mask: Mask) -> tuple[Embedding, Weights]:
        """Return the bag's vector and the share of each patch in it."""
        attention = masked_softmax(self.score(patches), mask)
        embedding = weighted_sum(attention.unsqueeze(-1), patches).squeeze(-2)
        return embedding.to(patches.dtype), attention


class MeanPool(Pool):
    """Every patch has the same share."""

    def score(self, patches: Patches) -> Weights:
        return patches.new_zeros(patches.shape[:2])


class AttentionPool(Pool):
    """A small network says how much a patch counts; a gate may veto it (Ilse et al. 2018)."""

    def __init__(
        self, dim: int, *, hidden: int | None = None, gated: bool = False, dropout: float = 0.25
    ) -> None:
        super().__init__(dim)
        hidden = hidden or dim
        self.content = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden) if gated else None
        self.rate = nn.Linear(hidden, 1)
        self.dropout = Dropout(dropout)

    def score(self, patches: Patches) -> Weights:
        merit = self.dropout(self.content(patches).tanh())
        if self.gate is not None:
            merit = merit * self.dropout(self.gate(patches).sigmoid())
        return self.rate(merit).squeeze(-1)


class GatedAttentionPool(AttentionPool):
    """Attention with a gate."""

    def __init__(self, dim: int, *, hidden: int | None = None, dropout: float = 0.25) -> None:
        super().__init__(dim, hidden=hidden, gated=True, dropout=dropout)


POOLS: dict[str, type[Pool]] = {
    "mean": MeanPool,
    "attention": AttentionPool,
    "gated": GatedAttentionPool,
}


def pool_evidence(pool: Pool, chunks: Iterable[Patches], classify: nn.Linear) -> Evidence:
    """Return what each patch of a bag adds to the logits, if a linear layer reads the pool.

    The bag may come in pieces: of each, only what is returned is kept.
    """
    scores, values = [], []
    for patches in chunks:
        scores.append(pool.score(patches))
        values.append(F.linear(patches[0], classify.weight))
    every = torch.cat(scores, dim=-1)
    shares = every.softmax(dim=-1, dtype=summing_dtype(every))
    terms = shares.mT * torch.cat(values)
    return Evidence(terms=terms, rest=classify.bias.to(terms.dtype))


def pool_packed(
    pool: Pool, patches: Float[Tensor, "1 N D"], sizes: Sizes
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B P"]]:
    """Pool bags that are packed. The shares in them are padded."""
    scores = unpack(pool.score(patches), sizes)
    attention = masked_softmax(scores, mask_of(sizes, scores.device))
    embedding = sum_packed(attention.unsqueeze(-1), patches, sizes).squeeze(-2)
    return embedding.to(patches.dtype), attention


def pool_chunks(pool: Pool, chunks: Iterable[Patches]) -> tuple[Embedding, Weights]:
    """Pool a bag that comes in pieces: a running softmax, rescaled whenever its maximum grows."""
    highest, total, embedding = torch.tensor(-torch.inf), torch.zeros(()), torch.zeros(())
    every = []
    for patches in chunks:
        scores = pool.score(patches)
        scores = scores.to(summing_dtype(scores))
        every.append(scores)
        higher = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        weights, shrink = (scores - higher).exp(), (highest - higher).exp()
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        embedding = embedding * shrink + weighted_sum(weights.unsqueeze(-1), patches).squeeze(-2)
        highest, dtype = higher, patches.dtype
    attention = (torch.cat(every, dim=-1) - highest).exp() / total
    return (embedding / total).to(dtype), attention
