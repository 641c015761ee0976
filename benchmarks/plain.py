"""CAPRMIL as its paper writes it, to measure ours against and to test it with.

Section 3.1 equation by equation, every map on every patch: nothing is folded, nothing comes in
pieces. It reads slower than it is clever, which is its use.
"""

from copy import deepcopy
from typing import cast

import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models import CAPRMIL
from caprmil.models.base import (
    Assignments,
    Features,
    Grid,
    Mask,
    MILModel,
    Output,
    Patches,
    Weights,
)
from caprmil.models.caprmil import ContextAttention, ContextBlock
from caprmil.models.packing import Sizes
from caprmil.models.pooling import AttentionPool


class PlainCAPRMIL(MILModel):
    """The paper's equations on a copy of the weights of a model of ours.

    The parameters have the same names. Letters are the paper's: h patches, x where they belong, f
    what they bring, w their weights on the tokens s.
    """

    def __init__(self, model: CAPRMIL) -> None:
        super().__init__(model.in_dim, model.n_outputs, **model.settings)
        self.context, self.pool = deepcopy(model.context), deepcopy(model.pool)
        self.classify = deepcopy(model.classify)

    def forward(
        self,
        features: Features,
        *,
        mask: Mask | None = None,
        grid: Grid | None = None,  # noqa: ARG002
        sizes: Sizes | None = None,  # noqa: ARG002
    ) -> Output:
        linear, norm, *_ = self.context.project
        h = self.drop(F.gelu(norm(linear(features))))
        assignments = []
        for block in cast("list[ContextBlock]", self.context.blocks):
            update, w = self.attend(block.attend, block.norm_attend(h), mask)
            h = h + self.drop(update)
            up, down = (part for part in block.think if isinstance(part, nn.Linear))
            h = h + self.drop(down(F.gelu(up(block.norm_think(h)))))
            assignments.append(w)
        attention = self.shares(h, mask)
        z = einsum(attention, h, "b n, b n d -> b d")
        return Output(
            logits=self.classify(z),
            embedding=z,
            attention=attention,
            assignments=tuple(assignments),
        )

    def attend(
        self, layer: ContextAttention, u: Patches, mask: Mask | None
    ) -> tuple[Patches, Assignments]:
        """Return 3.1.3: soft clustering, aggregation, attention among tokens, broadcasting."""
        x = rearrange(layer.place(u), "b n (h k) -> b h n k", h=layer.heads)
        f = rearrange(layer.content(u), "b n (h k) -> b h n k", h=layer.heads)
        temperature = 1.0 if layer.temperature is None else layer.temperature()[:, None, None]
        w = (layer.cluster(x) / temperature).softmax(dim=-1)
        if mask is not None:
            w = w * mask[:, None, :, None]
        s = einsum(w, f, "b h n m, b h n k -> b h m k") / (w.sum(dim=2)[..., None] + 1e-5)
        q, k, v = layer.qkv(s).chunk(3, dim=-1)
        s = self.drop((q @ k.mT / k.shape[-1] ** 0.5).softmax(dim=-1) @ v)
        heard = einsum(w, s, "b h n m, b h m k -> b h n k")
        return layer.out(rearrange(heard, "b h n k -> b n (h k)")), w

    def shares(self, h: Patches, mask: Mask | None) -> Weights:
        """Return 3.1.4: the share of each patch in the bag."""
        scores = h.new_zeros(h.shape[:2])
        if isinstance(self.pool, AttentionPool):
            rate = self.pool.dropout.p
            merit = self.drop(self.pool.hidden(h).tanh(), rate)
            if self.pool.gate is not None:
                merit = merit * self.drop(self.pool.gate(h).sigmoid(), rate)
            scores = self.pool.out(merit).squeeze(-1)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(dim=1)

    def drop(self, values: Float[Tensor, "..."], rate: float | None = None) -> Float[Tensor, "..."]:
        rate = self.settings["dropout"] if rate is None else rate
        return F.dropout(values, rate, self.training)
