"""Walks: a bag goes through the context stack in pieces, one pass a block and one for the pool.

A block knows the other patches by two sums alone, so pieces need not meet. It is exact, in memory
that does not grow with the bag, or only by what is kept between the passes.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import Assignments, Chunks, Embedding, Patches, Weights
from caprmil.models.layers import summing_dtype, weighted_sum

if TYPE_CHECKING:
    from caprmil.models.caprmil import ContextBlock, ContextStack

Rows: TypeAlias = Float[Tensor, "n _"]  # of one piece of one bag


class Piece(NamedTuple):
    """Some patches before a block, and their weights in it if these were kept."""

    patches: Rows
    weights: Rows | None = None


class Midway(NamedTuple):
    """Some patches in the middle of an MLP: `heard` and the second layer of `hidden` sum up."""

    heard: Rows
    hidden: Rows


Stage: TypeAlias = Callable[[], Iterable[Piece]]
"""All pieces of a bag before a block: each call starts from the first again."""


class Walk:
    """A bag on its way through a context stack, in evaluation and without gradients.

    With `keep`, patches (N x D) and weights (N x MH) stay in memory, and nothing is worked out
    twice. Without it, each pass begins at the features again.
    """

    def __init__(self, stack: "ContextStack", chunks: Chunks, *, keep: bool) -> None:
        self.keep = keep
        self.assignments: tuple[Assignments, ...] = ()  # of each block, if they are kept
        self.last: Meeting | None = None  # of the last block, whose rest is done on demand
        linear, norm, *_ = stack.project
        self.stage: Stage = lambda: (Piece(_bend(norm(linear(some[0])))) for some in chunks())
        for block in cast("Iterable[ContextBlock]", stack.blocks):
            if self.last is not None:
                self.stage = partial(_through, self.last, self.stage)
            self.last = self._meet(block)

    def _meet(self, block: "ContextBlock") -> "Meeting":
        """Let all patches meet in the tokens of a block: the pass that sums over them."""
        meeting, kept = Meeting(block), list[Piece]()
        for piece in self.stage():
            weights = meeting.join(piece.patches)
            if self.keep:
                kept.append(Piece(piece.patches, weights))
        meeting.close()
        if self.keep:
            self.stage = lambda: kept
            weights = torch.cat([cast(Rows, piece.weights) for piece in kept])
            self.assignments += (meeting.assignments(weights),)
        return meeting

    def patches(self) -> Iterator[Patches]:
        """Return the patches in context, piece by piece."""
        stage = self.stage() if self.last is None else _through(self.last, self.stage)
        return (piece.patches.unsqueeze(0) for piece in stage)

    def mean(self) -> tuple[Embedding, Weights]:
        """Return the mean patch: the last linear layer is for it alone, not for every patch."""
        heard, hidden, n = torch.zeros(()), torch.zeros(()), 0
        for piece in self.stage():
            n += len(piece.patches)
            if self.last is None:
                heard = heard + _total(piece.patches)
                continue
            half = self.last.half(piece)
            heard, hidden = heard + _total(half.heard), hidden + _total(half.hidden)
        dtype = piece.patches.dtype
        embedding = (heard / n).to(dtype)
        if self.last is not None:
            embedding = embedding + self.last.second((hidden / n).to(dtype))
        shares = torch.full((1, n), 1 / n, device=embedding.device)
        return embedding.unsqueeze(0), shares


class Meeting:
    """The patches of a bag in the tokens of a block: first they join, then each goes on alone."""

    def __init__(self, block: "ContextBlock") -> None:
        self.block, self.attend = block, block.attend
        self.clusters = self.attend.clusters() if self.attend.folded else None
        self.sums, self.mass = torch.zeros(()), torch.zeros(())
        self.first, _, self.second = cast("tuple[nn.Linear, nn.GELU, nn.Linear]", block.think)
        self.room = torch.empty(0)  # for the hidden layer of one piece, again and again

    def join(self, patches: Rows) -> Rows:
        """Add some patches to the tokens, and return their weights."""
        normed = self.block.norm_attend(patches)
        weights = self.weigh(normed)
        if self.clusters is None:
            sums, mass = self.attend.gather(normed.unsqueeze(0), self.assignments(weights))
        else:
            sums, mass = weighted_sum(weights, normed), weights.sum(dim=0)
        self.sums, self.mass = self.sums + sums, self.mass + mass
        return weights

    def weigh(self, normed: Rows) -> Rows:
        if self.clusters is not None:
            return self.attend.weigh(normed, self.clusters)
        return rearrange(self.attend.assign(normed.unsqueeze(0)), "1 h n m -> n (m h)")

    def assignments(self, weights: Rows) -> Assignments:
        return rearrange(weights, "n (m h) -> 1 h n m", h=self.attend.heads)

    def close(self) -> None:
        """All have joined: let the tokens attend to each other."""
        sums, mass = self.sums, self.mass
        if self.clusters is not None:
            sums = rearrange(sums, "(m h) d -> 1 h m d", h=self.attend.heads)
            mass = rearrange(mass, "(m h) -> 1 h m", h=self.attend.heads)
        self.tokens = self.attend.mix(sums, mass)
        self.messages = None if self.clusters is None else self.attend.messages(self.tokens)[0]

    def half(self, piece: Piece) -> Midway:
        """Go on with some patches, up to the hidden layer."""
        weights = piece.weights
        if weights is None:
            weights = self.weigh(self.block.norm_attend(piece.patches))
        heard = self.hear(piece.patches, weights)
        return Midway(heard, self.bend(self.block.norm_think(heard)))

    def hear(self, patches: Rows, weights: Rows) -> Rows:
        """Add to each patch what it heard."""
        if self.messages is None:
            return patches + self.attend.broadcast(self.tokens, self.assignments(weights))[0]
        weights = weights.to(self.messages.dtype)
        if torch.is_autocast_enabled(patches.device.type):  # which would round the patches
            return patches + weights @ self.messages
        return torch.addmm(patches, weights, self.messages)

    def bend(self, normed: Rows) -> Rows:
        """Return the hidden layer, until the next piece comes.

        In memory that is there already: to be given so much anew costs half of the product.
        """
        if torch.is_autocast_enabled(normed.device.type):  # which knows no given memory
            return _bend(self.first(normed))
        n = len(normed)
        if len(self.room) < n:
            self.room = normed.new_empty(n, self.first.out_features)
        torch.addmm(self.first.bias, normed, self.first.weight.mT, out=self.room[:n])
        return _bend(self.room[:n])


def _through(meeting: Meeting, stage: Stage) -> Iterator[Piece]:
    """Return the pieces behind a block."""
    for piece in stage():
        half = meeting.half(piece)
        yield Piece(half.heard + meeting.second(half.hidden))


def _bend(rows: Rows) -> Rows:
    """Return GELU of rows that nobody else has, in their place."""
    return torch.ops.aten.gelu_(rows)


def _total(rows: Rows) -> Float[Tensor, " F"]:
    return rows.sum(dim=0, dtype=summing_dtype(rows))
