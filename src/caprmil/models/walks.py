"""Walks: a bag goes through the context stack in pieces, one pass a block and one for the pool.

A block knows the other patches by two sums alone, so pieces need not meet. It is exact, in memory
that does not grow with the bag, or only by what is kept between the passes.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import Assignments, Chunks, Embedding, Patches, Weights
from caprmil.models.layers import summing_dtype

if TYPE_CHECKING:
    from caprmil.models.caprmil import ContextBlock, ContextStack, Tokens


class Piece(NamedTuple):
    """Some patches before a block, and their assignments in it if these were kept."""

    patches: Patches
    assignments: Assignments | None = None


class Half(NamedTuple):
    """Some patches in the middle of an MLP: `heard` and the second layer of `hidden` sum up."""

    heard: Patches
    hidden: Float[Tensor, "B N F"]


Stage: TypeAlias = Callable[[], Iterable[Piece]]
"""All pieces of a bag before a block: each call starts from the first again."""


class Walk:
    """A bag on its way through a context stack.

    With `keep`, patches (N x D) and assignments (N x HM) stay in memory, and nothing is worked out
    twice. Without it, each pass begins at the features again.
    """

    def __init__(self, stack: "ContextStack", chunks: Chunks, *, keep: bool) -> None:
        self.keep = keep
        self.assignments: tuple[Assignments, ...] = ()  # of each block, if they are kept
        self.rest: _Rest | None = None  # of the last block, which is worked out on demand
        self.stage: Stage = lambda: (Piece(stack.project(features)) for features in chunks())
        for block in cast("Iterable[ContextBlock]", stack.blocks):
            if self.rest is not None:
                self.stage = partial(_through, self.rest, self.stage)
            self.rest = _Rest(block, self._meet(block))

    def _meet(self, block: "ContextBlock") -> "Tokens":
        """Let all patches meet in the tokens of a block: the pass that sums over them."""
        brought, mass, kept, assigned = torch.zeros(()), torch.zeros(()), [], []
        for piece in self.stage():
            normed = block.norm_attend(piece.patches)
            assignments = block.attend.assign(normed)
            more, weight = block.attend.gather(normed, assignments)
            brought, mass = brought + more, mass + weight
            if self.keep:
                kept.append(Piece(piece.patches, assignments))
                assigned.append(assignments)
        if self.keep:
            self.stage = lambda: kept
            self.assignments += (torch.cat(assigned, dim=2),)
        return block.attend.mix(brought, mass)

    def patches(self) -> Iterator[Patches]:
        """Return the patches in context, piece by piece."""
        stage = self.stage() if self.rest is None else _through(self.rest, self.stage)
        return (piece.patches for piece in stage)

    def mean(self) -> tuple[Embedding, Weights]:
        """Return the mean patch: the last linear layer is for it alone, not for every patch."""
        heard, hidden, n = torch.zeros(()), torch.zeros(()), 0
        for piece in self.stage():
            n += piece.patches.shape[1]
            if self.rest is None:
                heard = heard + _total(piece.patches)
                continue
            half = self.rest.half(piece)
            heard, hidden = heard + _total(half.heard), hidden + _total(half.hidden)
        dtype = piece.patches.dtype
        embedding = (heard / n).to(dtype)
        if self.rest is not None:
            embedding = embedding + self.rest.second((hidden / n).to(dtype))
        return embedding, torch.full((1, n), 1 / n, device=embedding.device)


class _Rest(NamedTuple):
    """What is left to do in a block once its tokens are known: patch by patch."""

    block: "ContextBlock"
    tokens: "Tokens"

    def half(self, piece: Piece) -> Half:
        block, assignments = self.block, piece.assignments
        if assignments is None:
            assignments = block.attend.assign(block.norm_attend(piece.patches))
        heard = piece.patches + block.attend.broadcast(self.tokens, assignments)
        first, bend, _ = block.think
        return Half(heard, bend(first(block.norm_think(heard))))

    @property
    def second(self) -> nn.Module:
        return self.block.think[-1]


def _through(rest: _Rest, stage: Stage) -> Iterator[Piece]:
    """Return the pieces behind a block."""
    for piece in stage():
        half = rest.half(piece)
        yield Piece(half.heard + rest.second(half.hidden))


def _total(rows: Float[Tensor, "B N F"]) -> Float[Tensor, "B F"]:
    return rows.sum(dim=1, dtype=summing_dtype(rows))
