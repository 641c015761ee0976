"""Aggregators: the vector of a bag and the weight of each patch in it (paper, 3.1.4).

A pool scores patches, and the softmax of the scores are the weights. To add one, write the class
and add it to POOLS.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import Embedding, Evidence, Mask, Patches, Weights
from caprmil.models.layers import (
    Dropout,
    masked_softmax,
    summing_dtype,
    weighted_sum,
)
from caprmil.models.packing import Sizes, mask_from_sizes, pad_packed, weighted_sum_packed
from caprmil.models.products import Linear


class Pool(nn.Module):
    """Base class of the pools: a bag is the weighted sum of its patches."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def score(self, patches: Patches) -> Weights:
        """Return one number per patch. A new pool defines this method."""
        raise NotImplementedError

    def forward(self, patches: Patches, mask: Mask) -> tuple[Embedding, Weights]:
        """Return the vector of each bag and the weights of its patches."""
        attention = masked_softmax(self.score(patches), mask)
        embedding = weighted_sum(attention.unsqueeze(-1), patches).squeeze(-2)
        return embedding.to(patches.dtype), attention


class MeanPool(Pool):
    """The mean: all patches have the same weight."""

    def score(self, patches: Patches) -> Weights:
        return patches.new_zeros(patches.shape[:2])


class AttentionPool(Pool):
    """Attention by a small network, optionally with a gate (Ilse et al. 2018)."""

    def __init__(
        self, dim: int, *, hidden: int | None = None, gated: bool = False, dropout: float = 0.25
    ) -> None:
        super().__init__(dim)
        hidden = hidden or dim
        self.hidden = Linear(dim, hidden)
        self.gate = Linear(dim, hidden) if gated else None
        self.out = nn.Linear(hidden, 1)
        self.dropout = Dropout(dropout)

    def score(self, patches: Patches) -> Weights:
        hidden = self.dropout(self.hidden(patches).tanh())
        if self.gate is not None:
            hidden = hidden * self.dropout(self.gate(patches).sigmoid())
        return self.out(hidden).squeeze(-1)


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
    """Return the evidence of one bag in chunks if a linear layer reads the pooled vector."""
    scores, values = GrowingTensor(), GrowingTensor()
    for patches in chunks:
        scores.append(pool.score(patches)[0])
        values.append(F.linear(patches[0], classify.weight))
    logits = scores.value()
    attention = logits.softmax(dim=0, dtype=summing_dtype(logits))
    terms = attention.unsqueeze(-1) * values.value()
    return Evidence(terms=terms, rest=classify.bias.to(terms.dtype))


def top_means(logits: Float[Tensor, "B N C"], mask: Mask, k: int) -> Float[Tensor, "B C"]:
    """Return the mean of the k highest logits of each class, over the patches of each bag."""
    found = logits.masked_fill(~mask.bool().unsqueeze(-1), -torch.inf)
    highest = found.topk(min(k, logits.shape[1]), dim=1).values
    real = highest.isfinite()  # a bag may have fewer patches
    return highest.where(real, 0).sum(dim=1) / real.sum(dim=1)


def pool_packed(
    pool: Pool, patches: Float[Tensor, "1 N D"], sizes: Sizes
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B P"]]:
    """Return the vectors of packed bags and the padded weights of their patches."""
    scores = pad_packed(pool.score(patches), sizes)
    attention = masked_softmax(scores, mask_from_sizes(sizes, scores.device))
    embedding = weighted_sum_packed(attention.unsqueeze(-1), patches, sizes).squeeze(-2)
    return embedding.to(patches.dtype), attention


class RunningSoftmax(NamedTuple):
    """The sums of a softmax over the chunks so far, relative to the highest score so far."""

    highest: Tensor
    total: Tensor
    embedding: Tensor

    @classmethod
    def start(cls) -> "RunningSoftmax":
        return cls(torch.tensor(-torch.inf), torch.zeros(()), torch.zeros(()))

    def add(self, scores: Weights, patches: Patches) -> "RunningSoftmax":
        """Return the sums with one more chunk, rescaled if its scores are higher."""
        highest = torch.maximum(self.highest, scores.detach().amax(dim=-1, keepdim=True))
        weights, rescale = (scores - highest).exp(), (self.highest - highest).exp()
        summed = weighted_sum(weights.unsqueeze(-1), patches).squeeze(-2)
        return RunningSoftmax(
            highest,
            self.total * rescale + weights.sum(dim=-1, keepdim=True),
            self.embedding * rescale + summed,
        )

    def weights(self, scores: Weights) -> Weights:
        """Return the weights of all patches, from their scores, after the last chunk."""
        return (scores - self.highest).exp() / self.total


class GrowingTensor:
    """Rows of many chunks in one tensor that doubles its size when it is full. No gradients.

    A list of small tensors fragments the heap: 2,000,000 patches then take 2 GB more, since the
    activations of the next chunk do not fit between them.
    """

    def __init__(self) -> None:
        self.rows, self.n = torch.empty(0), 0

    def append(self, rows: Float[Tensor, "*any"]) -> None:
        """Add the rows of a chunk."""
        before, self.n = self.n, self.n + len(rows)
        if self.n > len(self.rows):
            larger = rows.new_empty(max(self.n, 2 * len(self.rows)), *rows.shape[1:])
            if before:
                larger[:before] = self.rows[:before]
            self.rows = larger
        self.rows[before : self.n] = rows

    def value(self) -> Float[Tensor, "*any"]:
        """Return all rows so far."""
        return self.rows[: self.n]


def pool_chunks(pool: Pool, chunks: Iterable[Patches]) -> tuple[Embedding, Weights]:
    """Return the vector of one bag in chunks and the weights of its patches."""
    sums, every = RunningSoftmax.start(), GrowingTensor()
    for patches in chunks:
        scores = pool.score(patches)
        scores = scores.to(summing_dtype(scores))
        every.append(scores.mT)
        sums, dtype = sums.add(scores, patches), patches.dtype
    embedding = (sums.embedding / sums.total).to(dtype)
    return embedding, sums.weights(every.value().mT.contiguous())
