"""Influence: the derivative of each logit by how often each patch counts.

A bag enters the output by sums over its patches only: the token sums of each block, and the sums of
the pool. So the influence of a patch is its share in each sum, times the derivative of the logits
by that sum. It is exact, needs memory for one chunk only, and is known for patches outside of the
bag too: the influence of adding them. More axes in this file: R bags, the samples of a slide,
and K directions, the linear functions of the logits that are differentiated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from caprmil.models.base import Cells, Chunks, Features, MILModel, Patches, Samples
from caprmil.models.folding import FoldedAttention, TokenSums
from caprmil.models.layers import weighted_sum
from caprmil.models.pooling import GrowingTensor, MeanPool, Pool, RunningSoftmax

if TYPE_CHECKING:
    from caprmil.models.context import ContextBlock

ABSENT = 1e-6  # how often a patch counts that is not in a sample; a logarithm needs more than 0

Rows = Float[Tensor, "#R n D"]
Terms = Float[Tensor, "R n K"]
Directions = Float[Tensor, "K C"]
Read = Callable[[], Iterable[Rows]]
"""The projected patches of R bags of equal size, chunk by chunk. Each call starts again."""


class SummedParts(NamedTuple):
    """The parts of a model whose logits depend on sums over patches only."""

    project: Callable[[Features], Patches]
    blocks: Sequence["ContextBlock"]
    pool: Pool
    classify: nn.Linear


class BagSums(NamedTuple):
    """The token sums of each bag."""

    sums: Float[Tensor, "R MH D"]
    mass: Float[Tensor, "R MH"]


class SummedBags:
    """Bags as their sums over patches, and the derivative of each logit by each of these sums.

    Costs a forward pass per block and one for the pool, and a backward pass per block and output.
    """

    def __init__(self, parts: SummedParts, read: Read, directions: Directions | None) -> None:
        self.blocks, self.pool = parts.blocks, parts.pool
        weight = parts.classify.weight.detach()
        self.weight = weight if directions is None else directions.to(weight) @ weight
        blocks, pool = parts.blocks, parts.pool
        self.sums, self.updates = list[BagSums](), list[Tensor]()
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}  # by the token sums of each block
        with torch.no_grad():
            self.attentions = [FoldedAttention(block.attend) for block in blocks]
            for number in range(len(blocks)):
                self.sums.append(self._token_sums(number, read))
                self.updates.append(self._update(number, self.sums[number]))
            self.softmax = RunningSoftmax.start()
            for rows in read():
                patches = self._after(rows, len(blocks))
                self.softmax = self.softmax.add(pool.score(patches), patches)
            mean = self.softmax.embedding / self.softmax.total
            self.mean = F.linear(mean.to(self.weight.dtype), self.weight)
        for number in reversed(range(len(blocks))):
            self.gradients[number] = self._gradients(number, read)

    @torch.no_grad()
    def influence(self, rows: Rows) -> Terms:
        """Return the influence of patches in each bag or, of others, that of adding them to it."""
        return self._terms(rows, 0)

    def _assign(self, number: int, normed: Rows) -> Float[Tensor, "#R n MH"]:
        assigned = self.attentions[number].assign(normed.flatten(0, 1))
        return assigned.view(*normed.shape[:2], -1).to(normed.dtype)

    def _token_sums(self, number: int, read: Read) -> BagSums:
        found = None
        for rows in read():
            normed = self.blocks[number].norm_attend(self._after(rows, number))
            assigned = self._assign(number, normed)
            added = BagSums(weighted_sum(assigned, normed), assigned.sum(dim=1))
            if found is not None:
                added = BagSums(found.sums + added.sums, found.mass + added.mass)
            found = added
        assert found is not None, "a bag has at least one chunk"
        return found

    def _update(self, number: int, sums: BagSums) -> Float[Tensor, "R MH D"]:
        bags = (TokenSums(*bag) for bag in zip(*sums, strict=True))
        return self.attentions[number].update(*bags)

    def _after(self, rows: Rows, blocks: int) -> Rows:
        """Return patches after some of the blocks."""
        for number in range(blocks):
            block = self.blocks[number]
            assigned = self._assign(number, block.norm_attend(rows))
            rows = block.add_mlp(rows + assigned @ self.updates[number])
        return rows

    def _terms(self, rows: Rows, first: int, update: Tensor | None = None) -> Terms:
        """Return the shares of each patch times their derivatives, summed, from a block on.

        With `update` for that block, its own token sums are left out.
        """
        terms = rows.new_zeros(())
        for number in range(first, len(self.blocks)):
            block = self.blocks[number]
            normed = block.norm_attend(rows)
            assigned = self._assign(number, normed)
            if update is None or number > first:
                by_sums, by_mass = self.gradients[number]  # R K MH D, and R K MH
                by_token = torch.einsum(
                    "rnd,rctd->rnct", normed.expand(len(by_sums), -1, -1), by_sums
                )
                by_token = by_token + by_mass[:, None]
                terms = terms + (by_token * assigned[:, :, None]).sum(dim=-1)
            own = update if update is not None and number == first else self.updates[number]
            rows = rows + assigned @ own
            if number == len(self.blocks) - 1 and type(self.pool) is MeanPool:
                return terms + self._mean_terms(block, rows)
            rows = block.add_mlp(rows)
        scores = self.pool.score(rows)
        share = (scores - self.softmax.highest).exp() / self.softmax.total
        return terms + share[..., None] * (F.linear(rows, self.weight) - self.mean[:, None])

    def _mean_terms(self, block: "ContextBlock", rows: Rows) -> Terms:
        """Return the terms of a mean. Saves the last linear layer on every patch."""
        down, weight = block.mlp.down, self.weight
        hidden = block.mlp.hidden(block.norm_mlp(rows))
        values = F.linear(rows, weight) + F.linear(hidden, weight @ down.weight, weight @ down.bias)
        return (values - self.mean[:, None]) / self.softmax.total[..., None]

    def _gradients(self, number: int, read: Read) -> tuple[Tensor, Tensor]:
        """Return the derivative of each logit by the token sums of a block, and by their mass."""
        update = self.updates[number].detach().requires_grad_()
        outputs = range(len(self.weight))
        by_update = [torch.zeros_like(update) for _ in outputs]
        for rows in read():
            with torch.no_grad():
                before = self._after(rows, number)
            with torch.enable_grad():
                totals = self._terms(before, number, update).sum(dim=(0, 1))
                for output in outputs:
                    more = output < len(outputs) - 1
                    (part,) = torch.autograd.grad(totals[output], update, retain_graph=more)
                    by_update[output] += part
        with torch.enable_grad():
            sums = BagSums(*(part.detach().requires_grad_() for part in self.sums[number]))
            again = self._update(number, sums)
            found = [
                torch.autograd.grad(again, sums, own.to(again.dtype), retain_graph=True)
                for own in by_update
            ]
        by_sums, by_mass = (torch.stack(parts, dim=1) for parts in zip(*found, strict=True))
        return by_sums.to(update.dtype), by_mass.to(update.dtype)


@torch.no_grad()
def by_sums(
    parts: SummedParts, chunks: Chunks, samples: Samples | None, directions: Directions | None
) -> Float[Tensor, "N K"]:
    """Return the influence of each patch of a bag in chunks, by its sums or those of samples."""

    def read() -> Iterator[Rows]:
        return (parts.project(features) for features in chunks())

    influence = GrowingTensor()
    if samples is None:
        whole = SummedBags(parts, read, directions)
        for rows in read():
            influence.append(whole.influence(rows)[0])
        return influence.value()
    sampled = parts.project(pick(chunks, samples.flatten())[None])
    sampled = sampled.view(*samples.shape, -1)
    bags = SummedBags(parts, lambda: [sampled], directions)
    outside = outside_of(samples)
    first = 0
    for rows in read():
        terms = bags.influence(rows)
        own = outside(first, first + rows.shape[1]).to(terms)
        first += rows.shape[1]
        influence.append(torch.einsum("rnc,rn->nc", terms, own / own.sum(dim=0).clamp(min=1)))
    return influence.value()


def pick(chunks: Chunks, rows: Int[Tensor, " K"]) -> Float[Tensor, "K E"]:
    """Return some rows of a bag in chunks."""
    found, first = list[Tensor](), 0
    order = rows.argsort()
    for features in chunks():
        last = first + features.shape[1]
        inside = rows[order][(rows[order] >= first) & (rows[order] < last)]
        found.append(features[0, inside - first])
        first = last
    return torch.cat(found)[order.argsort()]


def outside_of(samples: Samples) -> Callable[[int, int], Bool[Tensor, "R n"]]:
    """Return a function of a range of rows: whether each is outside of each sample."""

    def outside(first: int, last: int) -> Bool[Tensor, "R n"]:
        found = samples.new_ones(len(samples), last - first, dtype=torch.bool)
        sample, column = ((samples >= first) & (samples < last)).nonzero(as_tuple=True)
        found[sample, samples[sample, column] - first] = False
        return found

    return outside


def by_counts(
    model: MILModel,
    features: Features,
    grid: Cells | None,
    samples: Samples | None,
    directions: Directions | None,
) -> Float[Tensor, "N K"]:
    """Return the influence of each patch by backward passes through the model."""
    n = features.shape[1]

    def derivative(counts: Float[Tensor, " N"]) -> Float[Tensor, "N K"]:
        with torch.enable_grad():
            counts = counts.detach().requires_grad_()
            values = model.forward_weighted(features, counts, grid).logits[0]
            if directions is not None:
                values = directions.to(values) @ values
            found = [torch.autograd.grad(value, counts, retain_graph=True)[0] for value in values]
        return torch.stack(found, dim=1)

    if samples is None:
        return derivative(features.new_ones(n))
    outside = outside_of(samples)(0, n).to(features)
    total = sum(
        own[:, None] * derivative(torch.where(own == 0, 1.0, ABSENT).to(features))
        for own in outside
    )
    return torch.as_tensor(total) / outside.sum(dim=0).clamp(min=1)[:, None]
