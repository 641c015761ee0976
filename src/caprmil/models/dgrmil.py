"""DGRMIL: learnt global vectors and a class token, which attends to the patches.

Zhu, Chen, Qiu, Sotiras, Razi, Wang: "DGR-MIL: Exploring Diverse Global Representation in Multiple
Instance Learning for Whole Slide Image Classification", ECCV 2024.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from caprmil.models.base import Cells, Counts, Features, Labels, MILModel, Output, Patches
from caprmil.models.layers import Dropout, summing_dtype, weighted_sum
from caprmil.models.nystrom import NystromLayer, Rows, RowWeights, sort_by_grid
from caprmil.models.products import Linear

MOMENTUM = 0.4  # of a centre, when a bag updates it
JITTER = 1e-6  # on the diagonal, so that equal global vectors have a finite loss

Vectors = Float[Tensor, "B G D"]


class CrossAttention(nn.Module):
    """Attention of a few rows to the patches.

    The maps of keys and values act on queries and on weighted sums of patches, since these are
    fewer than patches. The result is the same in exact arithmetic, with gradients and dropout.
    """

    def __init__(self, dim: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (Linear(dim, dim) for _ in range(4))
        for part in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(part.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.dropout = Dropout(dropout)

    def weights(self, rows: Rows, patches: Patches, counts: Counts | None = None) -> RowWeights:
        """Return the attention of the rows to the patches, per head."""
        query = rearrange(self.query(rows), "b r (h k) -> b h r k", h=self.heads)
        query = query * query.shape[-1] ** -0.5
        weight = rearrange(self.key.weight, "(h k) d -> h k d", h=self.heads)
        bias = rearrange(self.key.bias, "(h k) -> h k 1", h=self.heads)
        folded = rearrange(query @ weight, "b h r d -> b (h r) d")
        scores = rearrange(folded @ patches.mT, "b (h r) n -> b h r n", h=self.heads) + query @ bias
        if counts is not None:
            scores = scores + counts.log()
        return scores.softmax(dim=-1, dtype=summing_dtype(scores))

    def forward(
        self, rows: Rows, patches: Patches, counts: Counts | None = None
    ) -> tuple[Rows, RowWeights]:
        """Return the update of each row, and its attention to the patches."""
        weights = self.weights(rows, patches, counts)
        dropped = self.dropout(weights)
        sums = weighted_sum(rearrange(dropped, "b h r n -> b n (h r)"), patches)
        sums = rearrange(sums, "b (h r) d -> b h r d", h=self.heads).to(patches.dtype)
        weight = rearrange(self.value.weight, "(h k) d -> h d k", h=self.heads)
        bias = rearrange(self.value.bias, "(h k) -> h 1 k", h=self.heads)
        update = sums @ weight + dropped.sum(dim=-1, keepdim=True).to(patches.dtype) * bias
        return self.out(rearrange(update, "b h r k -> b r (h k)")), weights


class Encoded(NamedTuple):
    """The inputs of the cross-attention. Letters are the paper's."""

    patches: Patches  # x, sorted by the grid
    in_context: Patches  # y
    vectors: Vectors  # l
    queries: Rows  # t: the class token, then each global vector
    restore: Int[Tensor, " N"] | slice  # index that restores the order of the file
    counts: Counts | None  # how often each patch counts


class DGRMIL(MILModel):
    """Diverse global vectors, attracted by positive bags and repelled by negative ones.

    Label 0 is negative and any other is positive, also if classes are subtypes. With a grid,
    patches are sorted by row and column, so that their order in a file does not matter.

    The defaults are the authors' setting for CAMELYON16, which has the paper's number of
    parameters; recipes/dgrmil.toml is their last one.

    Differs from the authors' code: cross-entropy over all classes, also over two; centres are
    updated only in training, never by test labels; the diversity term is finite. Two matrices of
    256 x 256 that are never used are left out (131,072 parameters). Cross-attention is computed
    only for the class token, since nothing else is used. The 80 GFLOPs of the comparison are not
    reproduced: a bag of 1000 patches takes 11.
    """

    needs_classes: ClassVar[bool] = True

    order_matters: ClassVar[bool] = True
    weighs_patches = True
    classifier = "classify"
    export_problem = (
        "lays out a bag by its size, with or without padding, and an exported model for bags of "
        "any size cannot branch"
    )
    centres: Float[Tensor, "2 D"]  # of negative bags, of positive bags

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        dim: int = 512,
        heads: int = 8,
        landmarks: int = 256,
        vectors: int = 5,
        dropout: float = 0.4,
        patch_dropout: float = 0.1,
        warmup_epochs: int = 5,
        diversity_weight: float = 0.1,
        triplet_weight: float = 0.1,
    ) -> None:
        super().__init__(
            in_dim,
            n_outputs,
            dim=dim,
            heads=heads,
            landmarks=landmarks,
            vectors=vectors,
            dropout=dropout,
            patch_dropout=patch_dropout,
            warmup_epochs=warmup_epochs,
            diversity_weight=diversity_weight,
            triplet_weight=triplet_weight,
        )
        if vectors < 1 or not 0 <= patch_dropout < 1:
            raise ValueError(
                f"vectors is at least 1, patch_dropout below 1: {vectors=}, {patch_dropout=}."
            )
        attention: dict[str, Any] = {"heads": heads, "landmarks": landmarks, "dropout": dropout}
        self.patch_dropout, self.warmup_epochs = patch_dropout, warmup_epochs
        self.diversity_weight, self.triplet_weight = diversity_weight, triplet_weight
        self.warmed_up = True  # until an epoch starts, all terms count
        self.global_vectors = nn.Parameter(torch.randn(1, vectors, in_dim))
        self.class_token = nn.Parameter(torch.randn(1, 1, dim))
        self.projections = nn.ModuleList([Linear(in_dim, dim), Linear(dim, dim)])
        self.patch_layer = nn.Sequential(NystromLayer(dim, **attention), nn.LayerNorm(dim))
        self.global_layer = nn.Sequential(NystromLayer(dim, **attention), nn.LayerNorm(dim))
        self.cross_attention = CrossAttention(dim, heads=heads, dropout=dropout)
        self.head = nn.Sequential(Linear(dim, dim), nn.LayerNorm(dim))
        self.classify = nn.Linear(dim, n_outputs)
        self.register_buffer("centres", torch.randn(2, dim))

    def forward_bag(
        self, features: Features, grid: Cells | None, counts: Counts | None = None
    ) -> Output:
        bag = self.encode(features, grid, counts)
        token, weights = self.cross_attention(bag.queries[:, :1], bag.in_context, bag.counts)
        embedding = self.head(token[:, 0])
        centre = bag.patches.detach().mean(dim=1, dtype=summing_dtype(bag.patches))
        return Output(
            logits=self.classify(embedding),
            embedding=embedding,
            attention=weights[:, :, 0].mean(dim=1)[:, bag.restore],
            aux={"globals": bag.vectors, "centre": centre},
        )

    def global_attention(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None = None
    ) -> Float[Tensor, "1 G N"]:
        """Return the attention of each global vector to the patches of a bag."""
        bag = self.encode(self.validate(features, None)[0], grid)
        weights = self.cross_attention.weights(bag.queries[:, 1:], bag.in_context)
        return weights.mean(dim=1)[:, :, bag.restore]

    def encode(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None, counts: Counts | None = None
    ) -> Encoded:
        """Return the patches of a bag and the global vectors after self-attention."""
        kept = self.draw_patches(features.shape[1]) if self.training else None
        patches, restore = sort_by_grid(self.project(features, kept), grid)
        vectors = self.project(self.global_vectors)
        token = self.class_token.to(vectors.dtype)
        queries = self.global_layer(torch.cat([token, vectors], dim=1))
        if counts is not None:
            counts = sort_by_grid(counts[None, :, None], grid)[0][0, :, 0]
        attend, norm = self.patch_layer
        in_context = norm(attend(patches, counts))
        return Encoded(patches, in_context, vectors, queries, restore, counts)

    def project(self, rows: Features, kept: Float[Tensor, "2 N 1"] | None = None) -> Patches:
        """Return rows at the width of the model, after two layers with a factor per patch."""
        for step, layer in enumerate(self.projections):
            rows = F.relu(layer(rows))
            if kept is not None:
                rows = rows * kept[step].to(rows.dtype)
        return rows

    def draw_patches(self, n: int) -> Float[Tensor, "2 N 1"]:
        """Return the dropout factors of whole patches in both layers. At least one patch stays."""
        device = self.centres.device
        factors = F.dropout(torch.ones(2, n, device=device), self.patch_dropout)
        all_dropped = ~factors.all(dim=0).any()
        spared = torch.arange(n, device=device) == torch.randint(n, (1,), device=device)
        return factors.masked_fill(all_dropped & spared, 1 / (1 - self.patch_dropout)).unsqueeze(-1)

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        """Receive the epoch. The first ones have only the bag loss."""
        self.warmed_up = epoch >= self.warmup_epochs

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        """Return the bag loss and, after the warm-up, the terms of the global vectors.

        In training, each bag first updates the centre of its label.
        """
        if self.training:
            self.update_centres(output.aux["centre"], labels)
        zero = output.logits.new_zeros(())
        terms = {"bag": self.criterion(output.logits, labels)}
        if not self.warmed_up:
            return terms | {"diversity": zero, "triplet": zero}
        vectors = F.normalize(output.aux["globals"][0].double(), dim=-1)  # the same for all bags
        cosines = vectors @ F.normalize(self.centres.double(), dim=-1).mT
        identity = torch.eye(len(vectors), dtype=vectors.dtype, device=vectors.device)
        diversity = -torch.logdet(vectors @ vectors.mT + JITTER * identity)
        triplet = F.relu(1 + cosines[:, 0] - cosines[:, 1]).mean()
        return terms | {
            "diversity": self.diversity_weight * diversity.to(terms["bag"]),
            "triplet": self.triplet_weight * triplet.to(terms["bag"]),
        }

    @torch.no_grad()
    def update_centres(self, bags: Float[Tensor, "B D"], labels: Labels) -> None:
        """Move the centre of negative or positive bags towards each bag in turn."""
        for bag, positive in zip(bags.to(self.centres), (labels > 0).long(), strict=True):
            self.centres[positive] = MOMENTUM * self.centres[positive] + (1 - MOMENTUM) * bag
