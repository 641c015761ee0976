"""ABMIL: a bag is the mean of its patches, weighted by gated attention.

Ilse, Tomczak, Welling: "Attention-based Deep Multiple Instance Learning", ICML 2018.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import (
    Chunks,
    Embedding,
    Evidence,
    Features,
    Grid,
    Mask,
    MILModel,
    Output,
    Patches,
    Weights,
)
from caprmil.models.influence import SummedParts
from caprmil.models.packing import Sizes
from caprmil.models.pooling import AttentionPool, pool_chunks, pool_evidence, pool_packed
from caprmil.models.products import Linear


class ABMIL(MILModel):
    """Attention over independently projected patches.

    Differs from its paper: width 512 instead of 500, and one logit per class instead of a Bernoulli
    output, as is common. One attention branch.
    """

    weighs_patches = True
    evaluates_in_chunks = True
    classifier = "classify"

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        dim: int = 512,
        hidden: int = 128,
        gated: bool = True,
        dropout: float = 0.15,
    ) -> None:
        super().__init__(in_dim, n_outputs, dim=dim, hidden=hidden, gated=gated, dropout=dropout)
        self.project = Linear(in_dim, dim)
        self.pool = AttentionPool(dim, hidden=hidden, gated=gated, dropout=0.0)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(dim, n_outputs)

    @property
    def input_layer(self) -> nn.Linear:
        return self.project

    def patches(self, features: Features) -> Patches:
        return F.relu(self.project(features))

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        return self.output(*self.pool(self.patches(features), mask))

    def forward_packed(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes, grid: Grid | None
    ) -> Output:
        return self.output(*pool_packed(self.pool, self.patches(features), sizes))

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        return self.output(*pool_chunks(self.pool, map(self.patches, chunks())))

    def output(self, embedding: Embedding, attention: Weights) -> Output:
        embedding = self.dropout(embedding)
        return Output(logits=self.classify(embedding), embedding=embedding, attention=attention)

    def summed_parts(self) -> SummedParts:
        return SummedParts(self.patches, (), self.pool, self.classify)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        return pool_evidence(self.pool, map(self.patches, chunks()), self.classify)
