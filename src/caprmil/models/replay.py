"""Replay: training that works patches out again instead of keeping what was worked out.

Patches know each other by sums alone: the tokens of each block, and the pool. So a bag can go
forward in pieces without a graph, and backward in pieces too, each piece with a graph of its own
that is gone when the next one comes. Gradients are those of the plain form; dropout draws the same
numbers when a piece comes again.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from caprmil.models.base import Embedding, Features, Patches, Weights
from caprmil.models.pooling import Pool, pool_chunks
from caprmil.models.thinking import think

if TYPE_CHECKING:
    from caprmil.models.caprmil import ContextBlock, ContextStack, Mass, Sums, Tokens

PIECE = 4096  # patches that are alive at once: each piece has its costs, whatever its size


class Met(NamedTuple):
    """What patches of a bag have brought to the tokens of a block, and with how much weight."""

    sums: "Sums"
    mass: "Mass"


class Player:
    """Plays a bag through stack and pool, as often as is asked, always with the same dropout.

    With `keep`, the projected patches (N x D) stay in memory; else each time begins at the
    features.
    """

    def __init__(
        self, stack: "ContextStack", pool: Pool, features: Features, *, keep: bool, seed: int
    ) -> None:
        self.pool, self.features, self.keep, self.seed = pool, features, keep, seed
        door, *rest = cast(Iterable[nn.Module], stack.project)
        self.door = cast(nn.Linear, door)
        self.inside = nn.Sequential(*rest)
        self.blocks = list(cast("Iterable[ContextBlock]", stack.blocks))
        self.dtype = next(stack.parameters()).dtype
        self.kept: list[Patches] = []
        kind = features.device.type
        self.precision = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }

    def pieces(self) -> Iterator[tuple[int, Features]]:
        return enumerate(torch.split(self.features, PIECE, dim=1))

    def enter(self, number: int, features: Features) -> Patches:
        """Return a piece behind the first linear layer."""
        if self.kept:
            return self.kept[number]
        return self.door(features.to(self.dtype))

    def rise(self, entered: Patches, tokens: "Sequence[Tokens]") -> Patches:
        """Return a piece behind as many blocks as there are tokens for."""
        patches = self.inside(entered)
        for block, own in zip(self.blocks, tokens, strict=False):
            assignments = block.attend.assign(block.norm_attend(patches))
            heard = block.attend.broadcast(own, assignments)
            patches = think(block, patches + block.dropout(heard))
        return patches

    def meet(self, patches: Patches, block: "ContextBlock") -> Met:
        normed = block.norm_attend(patches)
        return Met(*block.attend.gather(normed, block.attend.assign(normed)))

    def mix(self, number: int, met: Met) -> "Tokens":
        with self.dice(-1 - number):
            return self.blocks[number].attend.mix(*met)

    @contextmanager
    def dice(self, number: int) -> Iterator[None]:
        """Draw as the piece of that number draws. A shorter way draws the first of a longer one."""
        devices = [self.features.device] if self.features.is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.seed + number)
            yield

    def tokens(self) -> "tuple[list[Met], list[Tokens]]":
        """Go forward to the tokens of each block, one pass a block."""
        met, tokens = [], list["Tokens"]()
        for number, block in enumerate(self.blocks):
            total: Met | None = None
            first: list[Patches] = []
            for n, features in self.pieces():
                with self.dice(n):
                    entered = self.enter(n, features)
                    here = self.meet(self.rise(entered, tokens), block)
                total = (
                    here
                    if total is None
                    else Met(*(a + b for a, b in zip(total, here, strict=True)))
                )
                if self.keep and not number:
                    first.append(entered)
            self.kept = self.kept or first
            met.append(cast(Met, total))
            tokens.append(self.mix(number, met[-1]))
        return met, tokens

    def embed(self, tokens: "Sequence[Tokens]") -> tuple[Embedding, Weights]:
        """Go forward to the pool."""

        def patches() -> Iterator[Patches]:
            for n, features in self.pieces():
                with self.dice(n):  # also while the pool looks at the piece
                    yield self.rise(self.enter(n, features), tokens)

        return pool_chunks(self.pool, patches())


def replay(
    stack: "ContextStack", pool: Pool, features: Features, *, keep: bool
) -> tuple[Embedding, Weights]:
    """Return a bag's embedding and the share of each patch in it, with one piece alive at a time.

    `keep` holds on to the patches behind the first linear layer, and so spares half of the work.
    """
    seed = int(torch.randint(2**62, ()))
    player = Player(stack, pool, features, keep=keep, seed=seed)
    embedding, attention = Replay.apply(  # type: ignore[no-untyped-call]
        player, *stack.parameters(), *pool.parameters()
    )
    return embedding, attention


class Replay(torch.autograd.Function):
    """A bag's embedding and the share of each patch in it, with gradients for parameters alone."""

    @staticmethod
    def forward(ctx: Any, player: Player, *parameters: Tensor) -> tuple[Embedding, Weights]:
        met, tokens = player.tokens()
        embedding, attention = player.embed(tokens)
        ctx.state = Rewind(player, met, tokens, embedding.detach(), attention)
        ctx.parameters = parameters
        ctx.mark_non_differentiable(attention)
        return embedding, attention

    @staticmethod
    def backward(ctx: Any, slope: Embedding, *_: Any) -> tuple[Tensor | None, ...]:
        with torch.enable_grad(), torch.autocast(**ctx.state.player.precision):
            learnt = ctx.state(slope, [each for each in ctx.parameters if each.requires_grad])
        return None, *(learnt.get(each) for each in ctx.parameters)


class Rewind:
    """The way back, piece by piece: first from the pool, then from the tokens of each block."""

    def __init__(
        self,
        player: Player,
        met: Sequence[Met],
        tokens: "Sequence[Tokens]",
        embedding: Embedding,
        attention: Weights,
    ) -> None:
        self.player, self.met, self.attention = player, met, attention
        self.embedding = embedding
        self.tokens = [each.detach().requires_grad_() for each in tokens]

    def __call__(self, slope: Embedding, wanted: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return the gradient of each parameter, given that of the embedding."""
        self.slopes: dict[Tensor, Tensor] = {}
        self.wanted = wanted
        self.entered = [each.requires_grad_() for each in self.player.kept]
        self._from_pool(slope)
        for number in reversed(range(len(self.tokens))):
            self._from_tokens(number)
        self._from_door()
        return self.slopes

    def _from_pool(self, slope: Embedding) -> None:
        """Every patch in the embedding: by its share, and by what would change its share."""
        player, attention = self.player, torch.split(self.attention, PIECE, dim=1)
        level = (self.embedding * slope).sum()
        for n, features in player.pieces():
            with player.dice(n):
                patches = player.rise(player.enter(n, features), self.tokens)
                scores = player.pool.score(patches)
            worth = patches.to(slope.dtype) @ slope[0]
            change = attention[n] * (worth.detach() - level)
            self._add(
                ((attention[n] * worth).sum(), (scores * change).sum()),
                (None, None),
                (*self.tokens, *self.entered[n : n + 1]),
            )

    def _from_tokens(self, number: int) -> None:
        """What patches brought to the tokens of a block, if it should have been another."""
        player, tokens = self.player, self.tokens[number]
        met = Met(*(each.detach().requires_grad_() for each in self.met[number]))
        mixed = player.mix(number, met)
        self._add((mixed,), (self.slopes.pop(tokens),), met)
        slopes = tuple(self.slopes.pop(each) for each in met)
        for n, features in player.pieces():
            with player.dice(n):
                patches = player.rise(player.enter(n, features), self.tokens[:number])
                here = player.meet(patches, player.blocks[number])
            self._add(here, slopes, (*self.tokens[:number], *self.entered[n : n + 1]))

    def _from_door(self) -> None:
        """The first linear layer, if what comes out of it was kept: no need to go in again."""
        weight, bias = self.player.door.weight, self.player.door.bias
        for n, features in self.player.pieces() if self.entered else ():
            slope = self.slopes.pop(self.entered[n])[0].to(weight.dtype)
            self._note(weight, slope.mT @ features[0].to(slope.dtype))
            self._note(bias, slope.sum(dim=0))

    def _add(
        self,
        results: Iterable[Tensor],
        slopes: Iterable[Tensor | None],
        leaves: Iterable[Tensor],
    ) -> None:
        """Add the gradients of results to those of the leaves and the parameters."""
        live = [pair for pair in zip(results, slopes, strict=True) if pair[0].requires_grad]
        inputs = (*self.wanted, *leaves)
        found = torch.autograd.grad(
            [result for result, _ in live], inputs, [slope for _, slope in live], allow_unused=True
        )
        for leaf, slope in zip(inputs, found, strict=True):
            if slope is not None:
                self._note(leaf, slope)

    def _note(self, leaf: Tensor, slope: Tensor) -> None:
        known = self.slopes.get(leaf)
        self.slopes[leaf] = slope if known is None else known.add_(slope)
