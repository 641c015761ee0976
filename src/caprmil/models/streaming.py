"""Evaluation of one bag in chunks: one pass per context block, and one for the pool.

A block knows the other patches only by sums over them, so that the result is exact. Memory does not
grow with the bag, or only by the activations that are kept between the passes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from caprmil.models.base import Assignments, Chunks, Embedding, Patches, Weights
from caprmil.models.folding import FoldedAttention, Rows
from caprmil.models.layers import summing_dtype
from caprmil.models.mean_mlp import MeanAfterMLP
from caprmil.models.spool import Spool

if TYPE_CHECKING:
    from caprmil.models.context import ContextBlock, ContextStack


SPOOLED = 2  # times the width, from which on projected patches are kept in a file


class Chunk(NamedTuple):
    """Patches before a block, and their assignments in it if these were kept."""

    patches: Rows
    assignments: Rows | None = None


Pass: TypeAlias = Callable[[], Iterable[Chunk]]
"""All chunks of a bag before a block. Each call starts again from the first patch."""


class ContextStream:
    """The patches of one bag in context, chunk by chunk, without gradients.

    With `keep`, patches (N x D) and assignments (N x M H) of each block stay in memory, and nothing
    is computed twice. Without it, each pass starts from the projected patches, in a temporary file
    if there is space for it, or from the features. `blocks` are those to start with, by default all
    of the stack.
    """

    def __init__(
        self,
        stack: "ContextStack",
        chunks: Chunks,
        *,
        keep: bool,
        blocks: "Sequence[ContextBlock] | None" = None,
    ) -> None:
        self.keep = keep
        self.assignments: tuple[Assignments, ...] = ()  # of each block, if they are kept
        project = cast(nn.Linear, stack.project[0])

        def projected() -> Iterator[Rows]:
            return (stack.project(chunk)[0] for chunk in chunks())

        # A file is read faster than features are projected, if they are wider.
        spools = not keep and project.in_features >= SPOOLED * project.out_features
        rows = Spool(projected) if spools else projected
        self.read: Pass = lambda: map(Chunk, rows())
        self.last: StreamedBlock | None = None  # its MLP is left to `patches` and `mean`
        for block in stack.blocks if blocks is None else blocks:
            self.add(block)

    def add(self, block: "ContextBlock") -> None:
        """Append a block: a pass over the bag computes its tokens."""
        if self.last is not None:
            self.read = partial(self.last.apply, self.read)
        self.last = StreamedBlock(block, self.read, keep=self.keep)
        if self.keep:
            self.read = partial(iter, self.last.kept)
            self.assignments += (self.last.kept_assignments(),)

    def patches(self) -> Iterator[Patches]:
        """Return the patches in context, chunk by chunk."""
        chunks = self.read() if self.last is None else self.last.apply(self.read)
        return (chunk.patches.unsqueeze(0) for chunk in chunks)

    def mean(self) -> tuple[Embedding, Weights]:
        """Return the mean patch and the weights of the patches. Saves the last linear layer."""
        mean = MeanAfterMLP(None if self.last is None else self.last.block)
        for chunk in self.read():
            mean.add(chunk.patches if self.last is None else self.last.add_context(chunk))
        embedding = mean.value().unsqueeze(0)
        dtype = summing_dtype(embedding)
        weights = torch.full((1, mean.n), 1 / mean.n, dtype=dtype, device=embedding.device)
        return embedding, weights


class StreamedBlock:
    """A context block whose tokens are known, after a pass over all chunks of a bag."""

    def __init__(self, block: "ContextBlock", read: Pass, *, keep: bool) -> None:
        self.block, self.kept = block, list[Chunk]()
        self.attention = FoldedAttention(block.attend)
        sums = None
        for chunk in read():
            normed = block.norm_attend(chunk.patches)
            assigned = self.attention.assign(normed)
            added = self.attention.aggregate(normed, assigned)
            sums = added if sums is None else sums + added
            if keep:
                self.kept.append(Chunk(chunk.patches, assigned))
        assert sums is not None, "a bag has at least one chunk"
        (self.update,) = self.attention.update(sums)

    def kept_assignments(self) -> Assignments:
        """Return the assignments of all patches."""
        rows = [chunk.assignments for chunk in self.kept if chunk.assignments is not None]
        return self.attention.unfold(torch.cat(rows))

    def without(self, removed: Bool[Tensor, "H M"]) -> "StreamedBlock":
        """Return the block without the messages of some tokens."""
        changed = copy(self)
        changed.update = self.attention.without_messages(self.update, removed)
        return changed

    def assign(self, chunk: Chunk) -> Rows:
        """Return the assignments of patches to the tokens."""
        if chunk.assignments is not None:
            return chunk.assignments
        return self.attention.assign(self.block.norm_attend(chunk.patches))

    def add_context(self, chunk: Chunk) -> Rows:
        """Return patches after the attention of the block."""
        assigned = self.assign(chunk).to(self.update.dtype)
        if torch.is_autocast_enabled(chunk.patches.device.type):  # addmm would round the patches
            return chunk.patches + assigned @ self.update
        return torch.addmm(chunk.patches, assigned, self.update)

    def apply(self, read: Pass) -> Iterator[Chunk]:
        """Return the chunks after the block."""
        for chunk in read():
            yield Chunk(self.block.add_mlp(self.add_context(chunk)))
