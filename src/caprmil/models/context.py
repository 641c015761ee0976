"""The context of a patch: projection, attention through tokens, blocks (sections 3.1.1 to 3.1.3).

The forward passes are the equations of the paper. They serve padded batches, torch.compile and
export. A single bag and packed bags take faster forms with the same result: `folding` (fewer
products), `mean_mlp` (fewer products before a mean), `streaming` (evaluation in chunks) and
`recompute` (training in little memory).
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import Assignments, Features, Mask, Patches
from caprmil.models.folding import EPSILON
from caprmil.models.layers import GELU, Dropout, summing_dtype, weighted_sum
from caprmil.models.products import Linear

MIN_TEMPERATURE = 1e-3
TOKEN_GAIN = 4  # log-odds of a token per unit of activation, where it starts from a unit
SPREAD = 0.6  # standard deviation of GELU(z), z normal: what a patch has after the projection

INITS = ("usual", "centred")
Tokens = Float[Tensor, "B H M K"]


class Temperature(nn.Module):
    """One temperature per head: MIN_TEMPERATURE + softplus(raw), or 1 if it is not learnt.

    Near 0.5, the usual start, it changes 0.39 times as fast as a bare parameter under Adam.
    """

    fixed: Float[Tensor, " H"]

    def __init__(self, heads: int, *, learn: bool, start: int | float = 0.5) -> None:
        super().__init__()
        if not MIN_TEMPERATURE < start < torch.inf:
            raise ValueError(f"A temperature starts above {MIN_TEMPERATURE}: temperature={start}.")
        raised = start - MIN_TEMPERATURE
        raw = raised + math.log(-math.expm1(-raised))  # the inverse of softplus
        self.raw = nn.Parameter(torch.full((heads,), raw)) if learn else None
        self.register_buffer("fixed", torch.ones(heads), persistent=False)

    def forward(self) -> Float[Tensor, " H"]:
        return self.fixed if self.raw is None else MIN_TEMPERATURE + F.softplus(self.raw)


class ContextAttention(nn.Module):
    """Attention between patches through M tokens per head, linear in N (3.1.3)."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        tokens: int,
        dropout: int | float,
        learn_temperature: bool,
        temperature: int | float = 0.5,
    ) -> None:
        super().__init__()
        if not 1 <= heads <= dim:
            raise ValueError(f"There must be between 1 and {dim=} heads: {heads=}.")
        if tokens < 1:
            raise ValueError(f"A head has at least one token: {tokens=}.")
        head_dim = dim // heads  # rounds down: 12 heads of a width of 128 use 120 channels
        if dim % heads:
            warnings.warn(
                f"{heads} heads do not divide a width of {dim}: {heads * head_dim} are used.",
                stacklevel=2,
            )
        self.heads = heads
        self.project_x = nn.Linear(dim, heads * head_dim)
        self.project_f = nn.Linear(dim, heads * head_dim)
        self.cluster = nn.Linear(head_dim, tokens)  # shared by the heads
        nn.init.orthogonal_(self.cluster.weight)
        self.temperature = Temperature(heads, learn=learn_temperature, start=temperature)
        self.qkv = nn.Linear(head_dim, 3 * head_dim, bias=False)  # shared by the heads
        self.project_out = nn.Linear(heads * head_dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, patches: Patches, mask: Mask) -> tuple[Patches, Assignments]:
        """Return the context of each patch, and the soft assignment of patches to tokens."""
        x = rearrange(self.project_x(patches), "b n (h k) -> b h n k", h=self.heads)
        f = rearrange(self.project_f(patches), "b n (h k) -> b h n k", h=self.heads)

        # Soft clustering. Padding is assigned to no token.
        logits = self.cluster(x) / self.temperature()[:, None, None]
        assignments = logits.softmax(dim=-1, dtype=summing_dtype(logits))
        counted = assignments * mask[:, None, :, None]

        # Aggregation: a token is the weighted mean of its patches.
        tokens = weighted_sum(counted, f)
        tokens = tokens / (counted.sum(dim=2).unsqueeze(-1) + EPSILON)

        # Self-attention over tokens: M x M, independent of the bag size.
        tokens = self.attend_tokens(tokens.to(f.dtype))

        # Context broadcasting with the same assignments.
        context = einsum(assignments.to(f.dtype), tokens, "b h n m, b h m k -> b h n k")
        return self.project_out(rearrange(context, "b h n k -> b n (h k)")), counted

    @torch.no_grad()
    def init_centred(self) -> None:
        """Start with a context that is minus the mean of the slide's patches.

        Tokens have nearly the same patches before training, so each is near their mean. Values and
        output pass it on, with the sign reversed and undoing the scale of the LayerNorm.
        """
        width, value = self.qkv.in_features, self.qkv.weight[2 * self.qkv.in_features :]
        nn.init.eye_(self.project_f.weight)
        value.copy_(torch.eye(width))
        nn.init.eye_(self.project_out.weight).mul_(-SPREAD)
        for layer in (self.project_f, self.project_out):
            nn.init.zeros_(layer.bias)

    @torch.no_grad()
    def init_tokens(self, units: Sequence[int], thresholds: Float[Tensor, " P"]) -> None:
        """Start with a token in each head that collects the patches in which one unit is high.

        The first head collects those with the first unit above the first threshold, and so on. The
        other tokens of a head share the rest of the patches equally.
        """
        width, own = self.qkv.in_features, self.cluster.weight[0]
        own = own / own.square().sum()
        for head, (unit, threshold) in enumerate(zip(units, thresholds, strict=True)):
            rows = slice(head * width, (head + 1) * width)
            gain = TOKEN_GAIN * self.temperature()[head] * own
            self.project_x.weight[rows] = 0
            self.project_x.weight[rows, unit] = gain
            self.project_x.bias[rows] = -gain * threshold

    def attend_tokens(self, tokens: Tokens) -> Tokens:
        """Return the tokens of each head after self-attention."""
        query, key, value = self.qkv(tokens).chunk(3, dim=-1)
        return self.dropout(F.scaled_dot_product_attention(query, key, value))


class MLP(nn.Module):
    """Two linear layers with GELU. A variant redefines `hidden`; its output layer is linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(dim, hidden)
        self.activation = GELU()
        self.down = Linear(hidden, dim)

    def hidden(self, patches: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows F"]:
        return self.activation(self.up(patches))

    def forward(self, patches: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return self.down(self.hidden(patches))


class ContextBlock(nn.Module):
    """A transformer block with attention through tokens (3.1.2)."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        tokens: int,
        mlp_ratio: int | float,
        dropout: int | float,
        **temperature: Any,  # settings of the attention
    ) -> None:
        super().__init__()
        if int(mlp_ratio * dim) < 1:
            raise ValueError(f"The MLP needs a width: {mlp_ratio=}.")
        self.norm_attend = nn.LayerNorm(dim)
        self.attend = ContextAttention(
            dim, heads=heads, tokens=tokens, dropout=dropout, **temperature
        )
        self.norm_mlp = nn.LayerNorm(dim)
        self.mlp = MLP(dim, int(mlp_ratio * dim))
        self.dropout = Dropout(dropout)

    def forward(self, patches: Patches, mask: Mask) -> tuple[Patches, Assignments]:
        """Return patches in context, and their assignments to the tokens."""
        context, assignments = self.attend(self.norm_attend(patches), mask)
        return self.add_mlp(patches + self.dropout(context)), assignments

    def add_mlp(self, patches: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Return patches after the second half of the block."""
        return patches + self.dropout(self.mlp(self.norm_mlp(patches)))


class ContextStack(nn.Module):
    """The projection of the features (3.1.1), and a sequence of context blocks (3.1.2)."""

    def __init__(
        self,
        in_dim: int,
        *,
        dim: int,
        depth: int,
        dropout: int | float,
        init: str = "usual",
        **settings: Any,  # of the blocks
    ) -> None:
        super().__init__()
        if depth < 0:
            raise ValueError(f"There are at least 0 context blocks: {depth=}.")
        if init not in INITS:
            raise ValueError(f"init is {' or '.join(INITS)}, not {init!r}.")
        self.project = nn.Sequential(
            Linear(in_dim, dim), nn.LayerNorm(dim), GELU(), Dropout(dropout)
        )
        self.blocks: Sequence[ContextBlock] = nn.ModuleList(  # type: ignore[assignment]
            ContextBlock(dim, dropout=dropout, **settings) for _ in range(depth)
        )
        if init == "centred" and depth:
            self.blocks[0].attend.init_centred()

    def forward(self, features: Features, mask: Mask) -> tuple[Patches, tuple[Assignments, ...]]:
        """Return patches in context, and their assignments to the tokens of each block."""
        patches, assignments = self.project(features), list[Assignments]()
        for block in self.blocks:
            patches, assigned = block(patches, mask)
            assignments.append(assigned)
        return patches, tuple(assignments)
