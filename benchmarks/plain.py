"""CAPRMIL as in the equations of its paper, to measure and test the model of the package against.

Section 3.1 equation by equation, with every layer on every patch, and only operations of torch.
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
from caprmil.models.context import ContextAttention, ContextBlock
from caprmil.models.packing import Sizes
from caprmil.models.pooling import AttentionPool
from caprmil.models.products import Linear


class PlainCAPRMIL(MILModel):
    """The equations on a copy of the weights of a CAPRMIL, under the same names.

    Letters are the paper's: h patches, x and f their projections, w their weights on the tokens s.
    """

    def __init__(self, model: CAPRMIL) -> None:
        super().__init__(model.in_dim, model.n_outputs, **model.settings)
        self.context, self.pool = deepcopy(model.context), deepcopy(model.pool)
        for layer in self.modules():
            if isinstance(layer, Linear):  # that of torch is plain
                layer.__class__ = nn.Linear  # type: ignore[assignment]
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
            h = h + self.drop(block.mlp.down(F.gelu(block.mlp.up(block.norm_mlp(h)))))
            assignments.append(w)
        attention = self.pool_weights(h, mask)
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
        """Return 3.1.3: soft clustering, aggregation, self-attention over tokens, broadcasting."""
        x = rearrange(layer.project_x(u), "b n (h k) -> b h n k", h=layer.heads)
        f = rearrange(layer.project_f(u), "b n (h k) -> b h n k", h=layer.heads)
        w = (layer.cluster(x) / layer.temperature()[:, None, None]).softmax(dim=-1)
        if mask is not None:
            w = w * mask[:, None, :, None]
        s = einsum(w, f, "b h n m, b h n k -> b h m k") / (w.sum(dim=2)[..., None] + 1e-5)
        q, k, v = layer.qkv(s).chunk(3, dim=-1)
        s = self.drop((q @ k.mT / k.shape[-1] ** 0.5).softmax(dim=-1) @ v)
        o = einsum(w, s, "b h n m, b h m k -> b h n k")
        return layer.project_out(rearrange(o, "b h n k -> b n (h k)")), w

    def pool_weights(self, h: Patches, mask: Mask | None) -> Weights:
        """Return 3.1.4: the weight of each patch in the bag."""
        scores = h.new_zeros(h.shape[:2])
        if isinstance(self.pool, AttentionPool):
            p = self.pool.dropout.p
            hidden = self.drop(self.pool.hidden(h).tanh(), p)
            if self.pool.gate is not None:
                hidden = hidden * self.drop(self.pool.gate(h).sigmoid(), p)
            scores = self.pool.out(hidden).squeeze(-1)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(dim=1)

    def drop(self, values: Float[Tensor, "..."], p: float | None = None) -> Float[Tensor, "..."]:
        p = self.settings["dropout"] if p is None else p
        return F.dropout(values, p, self.training)
