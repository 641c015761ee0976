"""Nystrom attention: self-attention at a cost that is linear in the length of the sequence.

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
from caprmil.models.products import Linear

# More axes in this file: L landmarks, P rows with padding, R rows whose output is wanted.
Rows = Float[Tensor, "B R D"]
RowWeights = Float[Tensor, "B H R N"]
Square = Float[Tensor, "B H L L"]
Counts = Float[Tensor, " L"]
RowCounts = Float[Tensor, " N"]  # how often each row of the sequence counts


class Factors(NamedTuple):
    """The factors of the attention matrix A1 Z A3, in float32 or better."""

    sequence: Patches  # with one leading zero row for all padding
    key: Float[Tensor, "B H P K"]  # of each row of the sequence
    key_counts: Float[Tensor, " P"] | None  # number of equal keys that each represents
    query: Float[Tensor, "B H R K"]  # of the wanted rows
    landmark_query: Float[Tensor, "B H L K"]
    landmark_key: Float[Tensor, "B H L K"]
    counts: Counts  # number of equal landmarks that each represents
    inverse: Square  # Z
    first: int  # index of the first wanted row in the sequence
    lead: int  # 1 if there is padding, else 0


class NystromAttention(nn.Module):
    """Self-attention through landmarks, the means of segments of consecutive rows.

    The sequence is padded in front with zeros, up to a multiple of the landmarks. As published,
    padding takes part: its keys have weight, and its landmarks count. `mask_padding` removes it.

    Differs from the authors' code in its order of products, not in its result: A1 (Z (A3 v)) avoids
    the largest product, and for a few rows ((A1 Z) A3) v also avoids the values; keys and landmarks
    of padding are equal, so that one with a count represents them; and each sequence of a batch
    scales its own inverse.
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
            raise ValueError(f"At least one landmark, and an odd kernel: {landmarks=}, {kernel=}.")
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.mask_padding, self.reach = mask_padding, kernel // 2
        self.query = Linear(dim, dim, bias=False)
        self.key = Linear(dim, dim, bias=False)
        self.value = Linear(dim, dim, bias=False)
        # A convolution of the values along the sequence, per head.
        self.conv = nn.Conv2d(heads, heads, (kernel, 1), groups=heads, bias=False)
        self.out = Linear(dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, sequence: Patches, counts: RowCounts | None = None) -> Patches:
        """Return the update of each row: A1 (Z (A3 v)) and the convolved values, mapped."""
        factors = self.factor(sequence, slice(None), counts)
        value = self.split(self.value, factors.sequence)
        with torch.autocast(value.device.type, enabled=False):
            landmark_values = F.scaled_dot_product_attention(
                factors.landmark_query,
                factors.key,
                value,
                attn_mask=None if factors.key_counts is None else log_counts(factors.key_counts),
            )
            update = F.scaled_dot_product_attention(
                factors.query,
                factors.landmark_key,
                factors.inverse @ landmark_values,
                attn_mask=log_counts(factors.counts),
            )
            update = update + self.convolve(value)[:, :, factors.lead :]
        return self.merge_heads(update)

    def attend_rows(
        self, sequence: Patches, rows: slice, counts: RowCounts | None = None
    ) -> tuple[Rows, RowWeights]:
        """Return the updates of a few rows, and their attention to all rows.

        The weights are rows of A1 Z A3, without a gradient. They may be negative, and their sum is
        only close to one. Values are mapped after the sum, since there are fewer sums than rows.
        """
        factors = self.factor(sequence, rows, counts)
        weights = self.weights(factors)
        first, last = factors.first, factors.first + weights.shape[2]
        begin = max(first - self.reach, 0)
        near = self.split(self.value, factors.sequence[:, begin : last + self.reach])
        with torch.autocast(weights.device.type, enabled=False):
            flat = rearrange(weights, "b h r n -> b (h r) n") @ factors.sequence.to(weights.dtype)
            sums = rearrange(flat, "b (h r) d -> b h r d", h=self.heads)
            weight = rearrange(self.value.weight, "(h k) d -> h d k", h=self.heads)
            update = sums @ weight.to(sums.dtype)
            update = update + self.convolve(near)[:, :, first - begin : last - begin]
        return self.merge_heads(update), weights.detach()[..., factors.lead :]

    def factor(self, sequence: Patches, rows: slice, row_counts: RowCounts | None) -> Factors:
        """Return the factors for the attention of some rows of a sequence to all rows."""
        length = -(-sequence.shape[1] // self.landmarks)
        padding = length * self.landmarks - sequence.shape[1]
        means, counts = self.landmark_means(
            F.pad(sequence, (0, 0, padding, 0)), length, padding, row_counts
        )
        lead = int(padding > 0 and not self.mask_padding)
        padded = F.pad(sequence, (0, 0, lead, 0))
        key_counts = None
        if lead or row_counts is not None:
            own = counts.new_ones(sequence.shape[1]) if row_counts is None else row_counts
            key_counts = torch.cat([own.new_full((lead,), padding), own])
        # The maps have no bias, so that the mean of the queries is the query of the mean.
        landmark_query, landmark_key = self.split(self.query, means), self.split(self.key, means)
        with torch.autocast(sequence.device.type, enabled=False):
            among = self.softmax(landmark_query, landmark_key, counts)  # A2
            inverse = pseudo_inverse(among, counts, self.iterations)
        return Factors(
            sequence=padded,
            key=self.split(self.key, padded),
            key_counts=key_counts,
            query=self.split(self.query, sequence[:, rows]),
            landmark_query=landmark_query,
            landmark_key=landmark_key,
            counts=counts,
            inverse=inverse,
            first=lead + rows.indices(sequence.shape[1])[0],
            lead=lead,
        )

    def landmark_means(
        self,
        padded: Float[Tensor, "B P D"],
        length: int,
        padding: int,
        row_counts: RowCounts | None = None,
    ) -> tuple[Float[Tensor, "B L D"], Counts]:
        """Return the landmarks, and the number of equal ones that each represents."""
        if row_counts is not None:
            row_counts = F.pad(row_counts, (padding, 0), value=0.0 if self.mask_padding else 1.0)
            padded = padded * row_counts.unsqueeze(-1)
        segments = rearrange(padded, "b (l r) d -> b l r d", r=length)
        sums = segments.sum(dim=2, dtype=summing_dtype(padded))
        empty, partly = divmod(padding, length)  # segments of padding, rows of padding in the next
        sums = sums[:, empty if self.mask_padding else max(empty - 1, 0) :]
        sizes, counts = sums.new_full(sums.shape[1:2], length), sums.new_ones(sums.shape[1:2])
        if self.mask_padding:
            sizes[0] = length - partly
        else:
            counts[0] = max(empty, 1)
        if row_counts is not None:
            counted = rearrange(row_counts, "(l r) -> l r", r=length).sum(dim=-1)[-len(sizes) :]
            sizes, counts = counted, counts * counted / sizes
        return (sums / sizes.unsqueeze(-1)).to(padded.dtype), counts

    def split(self, map_rows: nn.Linear, rows: Rows) -> Float[Tensor, "B H R K"]:
        """Return mapped rows, split into heads, in float32 or better."""
        mapped = rearrange(map_rows(rows), "b r (h k) -> b h r k", h=self.heads)
        return mapped.to(summing_dtype(mapped))

    def softmax(self, query: Tensor, key: Tensor, counts: Tensor | None) -> Tensor:
        """Return the softmax weights of queries on keys, each key counted several times."""
        scores = (query * query.shape[-1] ** -0.5) @ key.mT
        return (scores if counts is None else scores + counts.log()).softmax(dim=-1)

    def weights(self, factors: Factors) -> RowWeights:
        """Return rows of A1 Z A3, with the weights on padding."""
        with torch.autocast(factors.key.device.type, enabled=False):
            near = self.softmax(factors.query, factors.landmark_key, factors.counts)
            near = near @ factors.inverse
            # One head at a time, since all of A3 would not fit into the cache.
            rows = [
                near[:, h] @ self.softmax(query, factors.key[:, h], factors.key_counts)
                for h, query in enumerate(factors.landmark_query.unbind(dim=1))
            ]
            return torch.stack(rows, dim=1)

    def convolve(self, value: Float[Tensor, "B H P K"]) -> Float[Tensor, "B H P K"]:
        """Return the convolution of the values along the sequence, per head."""
        weight = self.conv.weight.to(value.dtype)
        return F.conv2d(value, weight, padding=(self.reach, 0), groups=self.heads)

    def merge_heads(self, update: Float[Tensor, "B H R K"]) -> Rows:
        """Return the merged heads, mapped."""
        rows = rearrange(update, "b h r k -> b r (h k)")
        return self.dropout(self.out(rows.to(self.out.weight.dtype)))


class NystromLayer(nn.Module):
    """Nystrom attention with a residual connection."""

    def __init__(self, dim: int, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attend = NystromAttention(dim, **settings)

    def forward(self, sequence: Patches, counts: RowCounts | None = None) -> Patches:
        return sequence + self.attend(self.norm(sequence), counts)

    def attend_rows(
        self, sequence: Patches, rows: slice, counts: RowCounts | None = None
    ) -> tuple[Rows, RowWeights]:
        """Return the output for some rows only, and their attention to all rows."""
        update, weights = self.attend.attend_rows(self.norm(sequence), rows, counts)
        return sequence[:, rows] + update, weights


def log_counts(counts: Tensor) -> Float[Tensor, "1 1 1 _"]:
    """Return counts as an attention mask."""
    return counts.log().expand(1, 1, 1, -1)


def pseudo_inverse(among: Square, counts: Counts, iterations: int) -> Square:
    """Return an iterative approximation of the Moore-Penrose inverse of the landmark attention.

    Where a landmark represents several, this is the sum over them in the inverse of the full
    matrix, with a row and a column for each; only the initial value depends on the counts. Rows
    sum to one, so that the initial value is scaled by the largest column sum only.
    """
    weighted = counts.unsqueeze(-1) * among / counts
    inverse = weighted.mT / weighted.sum(dim=-2).amax(dim=(-1, -2))[:, None, None, None]
    one = torch.eye(len(counts), dtype=among.dtype, device=among.device)
    for _ in range(iterations):
        product = among @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return inverse


def sort_by_grid(patches: Patches, grid: Cells | None) -> tuple[Patches, Int[Tensor, " N"] | slice]:
    """Return patches sorted by row and column, and the index that restores their order.

    Without a grid they are not sorted.
    """
    if grid is None:
        return patches, slice(None)
    order = grid[:, 0].argsort(stable=True)
    order = order[grid[order, 1].argsort(stable=True)]
    return patches[:, order], order.argsort()
