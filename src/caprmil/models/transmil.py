"""TransMIL: two layers of self-attention over patches, and a class token.

Shao, Bian, Chen, Wang, Zhang, Ji, Zhang: "TransMIL: Transformer based Correlated Multiple Instance
Learning for Whole Slide Image Classification", NeurIPS 2021.
"""

from math import isqrt
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import (
    Cells,
    Counts,
    Embedding,
    Features,
    MILModel,
    Output,
    Patches,
    Weights,
)
from caprmil.models.nystrom import NystromLayer, sort_by_grid
from caprmil.models.products import Linear


class PositionEncoding(nn.Module):
    """The pyramid position encoding (PPEG): convolutions of a square image at three scales.

    Differs from the paper in its order of sums, not in its result: the kernels are added first.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Conv2d(dim, dim, size, groups=dim) for size in (7, 5, 3))

    def forward(self, patches: Patches) -> Patches:
        """Return the encoded patches. They are the rows of the image, one after the other."""
        weight, bias = torch.zeros(()), torch.zeros(())
        for margin, scale in enumerate(cast(list[nn.Conv2d], self.scales)):
            weight = weight + F.pad(scale.weight, [margin] * 4)
            bias = bias + cast(Tensor, scale.bias)
        side = isqrt(patches.shape[1])
        image = rearrange(patches, "b (r c) d -> b d r c", r=side)
        image = image + F.conv2d(image, weight, bias, padding=3, groups=len(weight))
        return rearrange(image, "b d r c -> b (r c) d")


class TransMIL(MILModel):
    """A sequence of patches, repeated to a square number, with a class token in front.

    With a grid, patches are sorted by row and column, so that their order in a file does not
    matter. The square of the position encoding is not that of the slide.

    Differs from the authors' code: the attention is that of the class token, not of the padding row
    at its index there. The second layer is computed only for the class token, since nothing else
    is used. The 85 GFLOPs of the comparison are not reproduced: a bag of 1000 patches takes 12.
    """

    order_matters: ClassVar[bool] = True
    weighs_patches = True
    classifier = "classify"
    export_problem = (
        "lays out a bag by its size, with or without padding, and an exported model for bags of "
        "any size cannot branch"
    )

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        dim: int = 512,
        heads: int = 8,
        landmarks: int = 256,
        dropout: float = 0.1,
        mask_padding: bool = False,
    ) -> None:
        attention: dict[str, Any] = {
            "heads": heads,
            "landmarks": landmarks,
            "dropout": dropout,
            "mask_padding": mask_padding,
        }
        super().__init__(in_dim, n_outputs, dim=dim, **attention)
        self.project = Linear(in_dim, dim)
        self.class_token = nn.Parameter(torch.randn(1, dim))
        self.first_layer = NystromLayer(dim, **attention)
        self.position_encoding = PositionEncoding(dim)
        self.second_layer = NystromLayer(dim, **attention)
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, n_outputs)

    def forward_bag(
        self, features: Features, grid: Cells | None, counts: Counts | None = None
    ) -> Output:
        embedding, weights = self.forward_token(features, grid, counts)
        return Output(
            logits=self.classify(embedding), embedding=embedding, attention=positive_part(weights)
        )

    def class_token_attention(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None = None
    ) -> Weights:
        """Return the raw attention of one bag, which may be negative, unlike in `Output`."""
        return self.forward_token(self.validate(features, None)[0], grid)[1]

    def forward_token(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None, counts: Counts | None = None
    ) -> tuple[Embedding, Weights]:
        """Return the class token of a bag, and its attention to the patches, averaged over heads.

        A patch that is in the square twice has the sum of both weights.
        """
        patches, restore = sort_by_grid(F.relu(self.project(features)), grid)
        n = patches.shape[1]
        side = isqrt(n - 1) + 1
        square = torch.cat([patches, patches[:, : side**2 - n]], dim=1)
        token = self.class_token.expand(len(square), 1, -1).to(square.dtype)
        if counts is not None:  # of each row of the sequence
            own = sort_by_grid(counts[None, :, None], grid)[0][0, :, 0]
            counts = torch.cat([own.new_ones(1), own, own[: side**2 - n]])
        sequence = self.first_layer(torch.cat([token, square], dim=1), counts)
        sequence = torch.cat([sequence[:, :1], self.position_encoding(sequence[:, 1:])], dim=1)
        token, weights = self.second_layer.attend_rows(sequence, slice(0, 1), counts)
        weights = weights.mean(dim=(1, 2))[:, 1:]
        repeated = weights[:, n:]
        weights = weights[:, :n] + F.pad(repeated, (0, n - repeated.shape[1]))
        return self.norm(token[:, 0]), weights[:, restore]


def positive_part(weights: Weights) -> Weights:
    """Return the positive weights, scaled to sum to one, or equal weights if there are none."""
    weights = weights.clamp(min=0)
    total = weights.sum(dim=1, keepdim=True)
    uniform = torch.full_like(weights, 1 / weights.shape[1])
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(total.dtype).tiny), uniform)
