"""Nystrom attention: each row of a long sequence hears every other, at a cost linear in length.

Xiong, Zeng, Chakraborty, Tan, Fung, Li, Singh: "Nystromformer: A Nystrom-based Algorithm for
Approximating Self-Attention", AAAI 2021. TransMIL and DGRMIL are built on it.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from caprmil.models.base import Cells, Patches
from caprmil.models.layers import Dropout, summing_dtype

# Beside the axes of base.py: L landmarks, P rows with their padding, R rows that are asked for.
Rows = Float[Tensor, "B R D"]
RowWeights = Float[Tensor, "B H R N"]
Square = Float[Tensor, "B H L L"]
Counts = Float[Tensor, " L"]


class Factors(NamedTuple):
    """What the attention matrix A1 Z A3 is made of, without the matrix, in float32 or better."""

    sequence: Patches  # behind a zero that stands for all padding
    key: Float[Tensor, "B H P K"]  # of each row of that
    key_counts: Float[Tensor, " P"]  # how many equal keys each stands for
    query: Float[Tensor, "B H R K"]  # of the rows that are asked for
    landmark_query: Float[Tensor, "B H L K"]
    landmark_key: Float[Tensor, "B H L K"]
    counts: Counts  # how many equal landmarks each stands for
    inverse: Square  # Z
    first: int  # where the rows that are asked for begin in the sequence
    lead: int  # 1 if there is padding, else 0


class NystromAttention(nn.Module):
    """Self-attention through landmarks, the means of runs of consecutive rows.

    The sequence is padded in front with zeros, up to a multiple of the landmarks. As published,
    padding takes part: its keys take weight, its landmarks count. `mask_padding` leaves it out.

    Differs from the authors' evaluation, not from its result: A1 (Z (A3 v)) leaves out the
    largest product, and where few rows are asked for, ((A1 Z) A3) v leaves out the values too; keys
    and landmarks of padding are all the same zero, so one stands for them, with a count; and each
    sequence of a batch scales its own inverse, whatever its neighbours are.
    """

    def __init__(
        self,
        dim: int = 512,
        *,
        heads: int = 8,
        landmarks: int = 256,
        iterations: int = 6,
        kernel: int = 33,
        dropout: float = 0.0,
        mask_padding: bool = False,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"The heads must divide the width: {heads=}, {dim=}.")
        if landmarks < 1 or kernel % 2 == 0:
            raise ValueError(f"One landmark at least, and an odd kernel: {landmarks=}, {kernel=}.")
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.mask_padding, self.reach = mask_padding, kernel // 2
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        # Blends the values of neighbours in the sequence, head by head.
        self.blend = nn.Conv2d(heads, heads, (kernel, 1), groups=heads, bias=False)
        self.out = nn.Linear(dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, sequence: Patches) -> Patches:
        """Return what each row heard: A1 (Z (A3 v)) and the blend of neighbours, mapped."""
        factors = self.factor(sequence, slice(None))
        value = self.split(self.value, factors.sequence)
        with torch.autocast(value.device.type, enabled=False):
            gathered = F.scaled_dot_product_attention(
                factors.landmark_query,
                factors.key,
                value,
                attn_mask=factors.key_counts.log().expand(1, 1, 1, -1) if factors.lead else None,
            )
            heard = F.scaled_dot_product_attention(
                factors.query,
                factors.landmark_key,
                factors.inverse @ gathered,
                attn_mask=factors.counts.log().expand(1, 1, 1, -1),
            )
            heard = heard + self.blend_rows(value)[:, :, factors.lead :]
        return self.tell(heard)

    def look(self, sequence: Patches, rows: slice) -> tuple[Rows, RowWeights]:
        """Return what a few rows heard, and their weights on all rows.

        The weights are rows of A1 Z A3, returned without a gradient: they may be negative, and sum
        to one only nearly. Values are mapped after they are summed: there are fewer sums.
        """
        factors = self.factor(sequence, rows)
        weights = self.weigh(factors)
        first, last = factors.first, factors.first + weights.shape[2]
        begin = max(first - self.reach, 0)
        near = self.split(self.value, factors.sequence[:, begin : last + self.reach])
        with torch.autocast(weights.device.type, enabled=False):
            flat = rearrange(weights, "b h r n -> b (h r) n") @ factors.sequence.to(weights.dtype)
            sums = rearrange(flat, "b (h r) d -> b h r d", h=self.heads)
            weight = rearrange(self.value.weight, "(h k) d -> h d k", h=self.heads)
            heard = sums @ weight.to(sums.dtype)
            heard = heard + self.blend_rows(near)[:, :, first - begin : last - begin]
        return self.tell(heard), weights.detach()[..., factors.lead :]

    def factor(self, sequence: Patches, rows: slice) -> Factors:
        """Work out all that is needed to let some rows of a sequence listen to all."""
        run = -(-sequence.shape[1] // self.landmarks)
        padding = run * self.landmarks - sequence.shape[1]
        means, counts = self.summarise(F.pad(sequence, (0, 0, padding, 0)), run, padding)
        lead = int(padding > 0 and not self.mask_padding)
        heard = F.pad(sequence, (0, 0, lead, 0))
        key_counts = counts.new_ones(heard.shape[1])
        key_counts[:lead] = padding
        # The maps have no bias, so that the mean of queries is the query of the mean.
        landmark_query, landmark_key = self.split(self.query, means), self.split(self.key, means)
        with torch.autocast(sequence.device.type, enabled=False):
            among = self.share(landmark_query, landmark_key, counts)  # A2
            inverse = pseudo_inverse(among, counts, self.iterations)
        return Factors(
            sequence=heard,
            key=self.split(self.key, heard),
            key_counts=key_counts,
            query=self.split(self.query, sequence[:, rows]),
            landmark_query=landmark_query,
            landmark_key=landmark_key,
            counts=counts,
            inverse=inverse,
            first=lead + rows.indices(sequence.shape[1])[0],
            lead=lead,
        )

    def summarise(
        self, padded: Float[Tensor, "B P D"], run: int, padding: int
    ) -> tuple[Float[Tensor, "B L D"], Counts]:
        """Return the landmarks, and how many equal ones each of them stands for."""
        runs = rearrange(padded, "b (l r) d -> b l r d", r=run)
        sums = runs.sum(dim=2, dtype=summing_dtype(padded))
        empty, partly = divmod(padding, run)  # whole runs of padding, and rows in the next run
        sums = sums[:, empty if self.mask_padding else max(empty - 1, 0) :]
        sizes, counts = sums.new_full(sums.shape[1:2], run), sums.new_ones(sums.shape[1:2])
        if self.mask_padding:
            sizes[0] = run - partly
        else:
            counts[0] = max(empty, 1)
        return (sums / sizes.unsqueeze(-1)).to(padded.dtype), counts

    def split(self, map_rows: nn.Linear, rows: Rows) -> Float[Tensor, "B H R K"]:
        """Map rows, and give each head its part, in float32 or better."""
        mapped = rearrange(map_rows(rows), "b r (h k) -> b h r k", h=self.heads)
        return mapped.to(summing_dtype(mapped))

    def share(self, query: Tensor, key: Tensor, counts: Counts) -> Tensor:
        """Return the softmax weights of queries on keys; a key may stand for several."""
        scores = (query * query.shape[-1] ** -0.5) @ key.mT
        return (scores + counts.log()).softmax(dim=-1)

    def weigh(self, factors: Factors) -> RowWeights:
        """Return rows of A1 Z A3, with their weights on padding."""
        with torch.autocast(factors.key.device.type, enabled=False):
            near = self.share(factors.query, factors.landmark_key, factors.counts)
            near = near @ factors.inverse
            # Head by head: all of A3 at once would be memory that is only written and read again.
            rows = [
                near[:, h] @ self.share(query, factors.key[:, h], factors.key_counts)
                for h, query in enumerate(factors.landmark_query.unbind(dim=1))
            ]
            return torch.stack(rows, dim=1)

    def blend_rows(self, value: Float[Tensor, "B H P K"]) -> Float[Tensor, "B H P K"]:
        """Return the blend of each row's neighbours, head by head."""
        weight = self.blend.weight.to(value.dtype)
        return F.conv2d(value, weight, padding=(self.reach, 0), groups=self.heads)

    def tell(self, heard: Float[Tensor, "B H R K"]) -> Rows:
        """Merge the heads, and map what they heard."""
        rows = rearrange(heard, "b h r k -> b r (h k)")
        return self.dropout(self.out(rows.to(self.out.weight.dtype)))


class NystromLayer(nn.Module):
    """Adds to each row of a sequence what it hears from the others."""

    def __init__(self, dim: int, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attend = NystromAttention(dim, **settings)

    def forward(self, sequence: Patches) -> Patches:
        return sequence + self.attend(self.norm(sequence))

    def look(self, sequence: Patches, rows: slice) -> tuple[Rows, RowWeights]:
        """Do the layer for some rows alone, and return their weights on all rows too."""
        heard, weights = self.attend.look(self.norm(sequence), rows)
        return sequence[:, rows] + heard, weights


def pseudo_inverse(among: Square, counts: Counts, iterations: int) -> Square:
    """Return nearly the Moore-Penrose inverse of the weights among landmarks, by iteration.

    Where a landmark stands for several, this is what the inverse of the large matrix, with a row
    and a column for each of them, says of all together: only the start knows the counts. Rows
    sum to one, so the largest column sum alone scales it.
    """
    weighed = counts.unsqueeze(-1) * among / counts
    inverse = weighed.mT / weighed.sum(dim=-2).amax(dim=(-1, -2))[:, None, None, None]
    one = torch.eye(len(counts), dtype=among.dtype, device=among.device)
    for _ in range(iterations):
        product = among @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return inverse


def in_reading_order(
    patches: Patches, grid: Cells | None
) -> tuple[Patches, Int[Tensor, " N"] | slice]:
    """Sort patches by row and column, so that a file's order is no matter, and return the way back.

    Without a grid they stay as they are.
    """
    if grid is None:
        return patches, slice(None)
    order = grid[:, 0].argsort(stable=True)
    order = order[grid[order, 1].argsort(stable=True)]
    return patches[:, order], order.argsort()
