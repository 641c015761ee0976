"""The output of one bag without the messages of some tokens, exact.

The message of a token is what it adds to the patches that are assigned to it: in the folded form,
one row of the update of its block. Tokens, assignments and everything before stay as they are, so
that a removal costs one pass from that row on: for the last block, its MLP and the pool.
"""

from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from caprmil.models.base import Cells, Chunks, Output
from caprmil.models.streaming import ContextStream

if TYPE_CHECKING:
    from caprmil.models.caprmil import CAPRMIL

Removed = Bool[Tensor, "T H M"]
"""True for the tokens that are removed, by block and head."""


class TokenRemoval:
    """One bag, whose tokens are known after a pass per block. No gradients.

    With `keep`, the activations before each block stay in memory (N x D per block). Without it,
    every removal reads the bag again.
    """

    @torch.no_grad()
    def __init__(
        self, model: "CAPRMIL", chunks: Chunks, *, grid: Cells | None = None, keep: bool = False
    ) -> None:
        self.model, self.grid = model, grid
        self.finish: Callable[[Output], Output] = lambda output: output
        self.blocks = model.context.blocks
        self.after = list[ContextStream]()  # the bag after each block
        stream = ContextStream(model.context, chunks, keep=keep, blocks=())
        for block in self.blocks:
            stream = copy(stream)
            stream.add(block)
            self.after.append(stream)

    def assignments(self, block: int) -> Iterator[Float[Tensor, "n H M"]]:
        """Yield the assignments of the patches to the tokens of a block, chunk by chunk."""
        stream = self.after[block]
        assert stream.last is not None
        chunks = iter(stream.read())
        while True:
            with torch.no_grad():  # not around the yield: the caller would be inside of it
                chunk = next(chunks, None)
                if chunk is None:
                    return
                assigned = stream.last.assign(chunk)
            yield rearrange(assigned, "n (m h) -> n h m", h=stream.last.attention.heads)

    def output(self) -> Output:
        """Return the output with all tokens."""
        return self._aggregate(self.after[-1])

    @torch.no_grad()
    def without(self, removed: Removed) -> Output:
        """Return the output without the messages of some tokens.

        Messages of several blocks can be removed at once: later tokens are then computed from
        patches that lack the earlier messages.
        """
        changed = removed.flatten(1).any(dim=1)
        if not changed.any():
            return self.output()
        first = int(changed.int().argmax())
        stream = copy(self.after[first])
        # Assignments of the first changed block do not depend on its messages.
        for number in range(first, len(self.blocks)):
            if number > first:
                stream.add(self.blocks[number])
            if changed[number]:
                assert stream.last is not None
                stream.last = stream.last.without(removed[number])
        return self._aggregate(stream)

    def without_token(self, block: int, head: int, token: int) -> Output:
        """Return the output without the message of one token."""
        shape = self.model.token_shape
        assert shape is not None
        removed = torch.zeros(shape, dtype=torch.bool)
        removed[block, head, token] = True
        return self.without(removed)

    @torch.no_grad()
    def _aggregate(self, stream: ContextStream) -> Output:
        if self.model.streams:
            return self.finish(self.model.aggregate_stream(stream))
        patches = torch.cat(list(stream.patches()), dim=1)
        mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
        grid = None if self.grid is None else self.grid[None]
        return self.finish(self.model.aggregate(patches, mask, grid, stream.assignments))
