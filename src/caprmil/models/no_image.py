"""A model that does not read the patches: for covariates alone."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import (
    Cells,
    Chunks,
    Evidence,
    Features,
    Grid,
    Mask,
    MILModel,
    Output,
    Samples,
)
from caprmil.models.layers import summing_dtype


class NoImage(MILModel):
    """A constant, whatever the patches are. With it, a fused model reads the covariates only."""

    weighs_patches = True

    def __init__(self, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim, n_outputs)
        self.bias = nn.Parameter(torch.zeros(n_outputs))

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        weights = mask.to(summing_dtype(features))
        return Output(
            logits=self.bias.expand(len(features), -1),
            embedding=features.new_zeros(len(features), 1),
            attention=weights / weights.sum(dim=1, keepdim=True),
        )

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        n = sum(chunk.shape[1] for chunk in chunks())
        return self.forward_bags(self.bias.new_zeros(1, n, 1), self.bias.new_ones(1, n), None)

    def influence(
        self,
        features: Float[Tensor, "1 N E"],
        grid: Cells | None = None,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        outputs = self.n_outputs if directions is None else len(directions)
        return features.new_zeros(features.shape[1], outputs)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        n = sum(chunk.shape[1] for chunk in chunks())
        return Evidence(terms=self.bias.new_zeros(n, len(self.bias)), rest=self.bias)
