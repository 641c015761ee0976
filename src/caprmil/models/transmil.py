"""TransMIL: two layers of attention among patches, and a class token that reads them.

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
    Embedding,
    Features,
    MILModel,
    Output,
    Patches,
    Weights,
)
from caprmil.models.nystrom import NystromLayer, in_reading_order


class Surroundings(nn.Module):
    """Adds to each cell of a square image what lies around it, channel by channel, at three scales.

    Differs from the paper's evaluation, not from its result: the three kernels are added first.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Conv2d(dim, dim, size, groups=dim) for size in (7, 5, 3))

    def forward(self, patches: Patches) -> Patches:
        """Take the patches of the image row by row, and return them so."""
        weight, bias = torch.zeros(()), torch.zeros(())
        for margin, scale in enumerate(cast(list[nn.Conv2d], self.scales)):
            weight = weight + F.pad(scale.weight, [margin] * 4)
            bias = bias + cast(Tensor, scale.bias)
        side = isqrt(patches.shape[1])
        image = rearrange(patches, "b (r c) d -> b d r c", r=side)
        image = image + F.conv2d(image, weight, bias, padding=3, groups=len(weight))
        return rearrange(image, "b d r c -> b (r c) d")


class TransMIL(MILModel):
    """Patches in a row, squared up, with a class token in front that gathers the answer.

    With a grid, patches are sorted by row and column: a file's order is then no matter. The square
    they are laid out in is not the slide's.

    Differs from the authors' code: the attention is that of the class token, not of the row of
    padding that stands in its place there. The second layer is worked out for the class token
    alone, as nothing else is read. The 85 GFLOPs of the comparison are not reproduced: by
    this evaluation a bag of 1000 patches takes 12.
    """

    order_matters: ClassVar[bool] = True

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
        self.project = nn.Linear(in_dim, dim)
        self.class_token = nn.Parameter(torch.randn(1, dim))
        self.correlate = NystromLayer(dim, **attention)
        self.look_around = Surroundings(dim)
        self.gather = NystromLayer(dim, **attention)
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, n_outputs)

    def forward_bag(self, features: Features, grid: Cells | None) -> Output:
        embedding, weights = self.read(features, grid)
        return Output(
            logits=self.classify(embedding), embedding=embedding, attention=positive_part(weights)
        )

    def class_token_attention(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None = None
    ) -> Weights:
        """Return the raw attention of one bag, some of it negative: `Output` has what is above."""
        return self.read(self.validate(features, None)[0], grid)[1]

    def read(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None
    ) -> tuple[Embedding, Weights]:
        """Return the class token of a bag, and its weights on the patches, a mean over the heads.

        A patch that stands twice in the square has both of its weights.
        """
        patches, back = in_reading_order(F.relu(self.project(features)), grid)
        n = patches.shape[1]
        side = isqrt(n - 1) + 1
        square = torch.cat([patches, patches[:, : side**2 - n]], dim=1)
        token = self.class_token.expand(len(square), 1, -1).to(square.dtype)
        sequence = self.correlate(torch.cat([token, square], dim=1))
        sequence = torch.cat([sequence[:, :1], self.look_around(sequence[:, 1:])], dim=1)
        token, weights = self.gather.look(sequence, slice(0, 1))
        weights = weights.mean(dim=(1, 2))[:, 1:]
        again = weights[:, n:]
        weights = weights[:, :n] + F.pad(again, (0, n - again.shape[1]))
        return self.norm(token[:, 0]), weights[:, back]


def positive_part(weights: Weights) -> Weights:
    """Return shares that sum to one: what is above zero, or the same for all if nothing is."""
    weights = weights.clamp(min=0)
    total = weights.sum(dim=1, keepdim=True)
    uniform = torch.full_like(weights, 1 / weights.shape[1])
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(total.dtype).tiny), uniform)
