"""Mean: project patches, average, classify. The baseline without context."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import (
    Chunks,
    Evidence,
    Features,
    Grid,
    Mask,
    MILModel,
    Output,
    Patches,
)
from caprmil.models.influence import SummedParts
from caprmil.models.packing import Sizes
from caprmil.models.pooling import MeanPool, pool_chunks, pool_evidence, pool_packed
from caprmil.models.products import Linear


class MeanMIL(MILModel):
    """A linear layer and GELU per patch, then the mean and a linear classifier.

    Differs from the CAPRMIL paper, which calls it "our approach without the block": as in the
    authors' figures, the projection has neither LayerNorm nor dropout. With both, it is CAPRMIL
    with a depth of 0.
    """

    weighs_patches = True
    evaluates_in_chunks = True
    classifier = "classify"

    def __init__(self, in_dim: int, n_outputs: int, *, dim: int = 128) -> None:
        super().__init__(in_dim, n_outputs, dim=dim)
        self.project = Linear(in_dim, dim)
        self.pool = MeanPool(dim)
        self.classify = nn.Linear(dim, n_outputs)

    def patches(self, features: Features) -> Patches:
        return F.gelu(self.project(features))

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        embedding, attention = self.pool(self.patches(features), mask)
        return Output(logits=self.classify(embedding), embedding=embedding, attention=attention)

    def forward_packed(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes, grid: Grid | None
    ) -> Output:
        embedding, attention = pool_packed(self.pool, self.patches(features), sizes)
        return Output(logits=self.classify(embedding), embedding=embedding, attention=attention)

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        embedding, attention = pool_chunks(self.pool, map(self.patches, chunks()))
        return Output(logits=self.classify(embedding), embedding=embedding, attention=attention)

    def summed_parts(self) -> SummedParts:
        return SummedParts(self.patches, (), self.pool, self.classify)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        return pool_evidence(self.pool, map(self.patches, chunks()), self.classify)
