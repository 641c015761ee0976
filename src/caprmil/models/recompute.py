"""Training that recomputes activations in the backward pass: `torch.utils.checkpoint` per chunk.

A chunk knows the other patches only by sums over them: the tokens of each block, and the pool. Only
one chunk has a graph at a time. Gradients are those of the plain form, and dropout draws the same
numbers in each pass over a chunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from caprmil.models.base import Embedding, Features, Memory, Patches, Weights
from caprmil.models.folding import FoldedAttention, TokenSums
from caprmil.models.layers import summing_dtype
from caprmil.models.pooling import Pool, RunningSoftmax

if TYPE_CHECKING:
    from caprmil.models.context import ContextStack

CHUNK = 4096  # patches with a graph at a time. Larger than in evaluation: a chunk has fixed costs
# Sizes up to which training keeps all activations of a bag, or the output of the first layer.
WHOLE, WHOLE_GPU, KEEP = 200_000, 50_000, 500_000


def memory_by_size(n: int, device: torch.device) -> Memory:
    """Return what training keeps of a bag of n patches."""
    if n <= (WHOLE if device.type == "cpu" else WHOLE_GPU):
        return "whole"
    return "keep" if n <= KEEP else "stream"


def forward_recomputed(
    stack: "ContextStack", pool: Pool, features: Features, *, keep: bool
) -> tuple[Embedding, Weights]:
    """Return the vector of one bag and the weights of its patches. Saves activations.

    With `keep`, the output of the first linear layer is kept, which saves half of the work.
    """
    return RecomputedBag(stack, pool, features, keep=keep).forward()


class RecomputedBag:
    """One bag in chunks, each of which is computed again whenever it is needed."""

    def __init__(
        self, stack: "ContextStack", pool: Pool, features: Features, *, keep: bool
    ) -> None:
        self.seed = int(torch.randint(2**62, ()))
        self.blocks, self.pool = stack.blocks, pool
        self.attentions = [FoldedAttention(block.attend) for block in stack.blocks]
        self.dtype = next(stack.parameters()).dtype
        self.first, self.rest = stack.project[0], stack.project[1:]
        self.chunks, self.keep = list(torch.split(features, CHUNK, dim=1)), keep
        if keep:
            self.chunks = [checkpointed(self.project_first, chunk) for chunk in self.chunks]

    def forward(self) -> tuple[Embedding, Weights]:
        updates: tuple[Tensor, ...] = ()
        for number, attention in enumerate(self.attentions):
            sums = [
                checkpointed(self.token_sums, n, chunk, updates)
                for n, chunk in enumerate(self.chunks)
            ]
            with self.seeded(-1 - number):
                updates += (attention.update(sum(sums[1:], sums[0]))[0],)
        softmax, scores = RunningSoftmax.start(), list[Tensor]()
        for n, chunk in enumerate(self.chunks):
            softmax, own = checkpointed(self.pooled, n, chunk, updates, softmax)
            scores.append(own)
        embedding = (softmax.embedding / softmax.total).to(self.dtype)
        return embedding, softmax.weights(torch.cat(scores, dim=-1))

    def project_first(self, features: Features) -> Patches:
        """Return the output of the first linear layer."""
        return self.first(features.to(self.dtype))

    def patches(self, chunk: Tensor, updates: tuple[Tensor, ...]) -> Patches:
        """Return a chunk after as many blocks as have updates."""
        patches = self.rest(chunk if self.keep else self.project_first(chunk))
        for block, attention, update in zip(self.blocks, self.attentions, updates, strict=False):
            assigned = attention.assign(block.norm_attend(patches)[0])
            context = (assigned.to(update.dtype) @ update).unsqueeze(0)
            patches = block.add_mlp(patches + block.dropout(context))
        return patches

    def token_sums(self, n: int, chunk: Tensor, updates: tuple[Tensor, ...]) -> TokenSums:
        """Return what a chunk adds to the tokens of the next block."""
        block, attention = self.blocks[len(updates)], self.attentions[len(updates)]
        with self.seeded(n):
            normed = block.norm_attend(self.patches(chunk, updates))[0]
        return attention.aggregate(normed, attention.assign(normed))

    def pooled(
        self, n: int, chunk: Tensor, updates: tuple[Tensor, ...], softmax: RunningSoftmax
    ) -> tuple[RunningSoftmax, Weights]:
        """Return the sums of the pool with one more chunk, and the scores of its patches."""
        with self.seeded(n):
            patches = self.patches(chunk, updates)
            scores = self.pool.score(patches)
        scores = scores.to(summing_dtype(scores))
        return softmax.add(scores, patches), scores

    @contextmanager
    def seeded(self, number: int) -> Iterator[None]:
        """Draw the same random numbers in each pass over a chunk, and in each backward pass."""
        devices = [self.chunks[0].device] if self.chunks[0].is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.seed + number)
            yield


checkpointed: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
