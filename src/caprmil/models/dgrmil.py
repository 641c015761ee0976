"""DGRMIL: a few learnt vectors describe what bags hold; a class token asks the patches with them.

Zhu, Chen, Qiu, Sotiras, Razi, Wang: "DGR-MIL: Exploring Diverse Global Representation in Multiple
Instance Learning for Whole Slide Image Classification", ECCV 2024.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from caprmil.models.base import Cells, Features, Labels, MILModel, Output, Patches
from caprmil.models.layers import Dropout, summing_dtype, weighted_sum
from caprmil.models.nystrom import NystromLayer, Rows, RowWeights, in_reading_order

STAYS = 0.4  # of a centre, when a bag of its kind moves it
JITTER = 1e-6  # on the diagonal, so that equal global vectors are costly and not infinite

Vectors = Float[Tensor, "B G D"]


class CrossAttention(nn.Module):
    """Some rows ask the patches.

    The rows are few, so the maps of keys and values act on what is asked and on what was heard,
    never on the patches. That is the same in exact arithmetic, gradients and dropout included.
    """

    def __init__(self, dim: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        for part in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(part.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.dropout = Dropout(dropout)

    def weigh(self, rows: Rows, patches: Patches) -> RowWeights:
        """Return the weights of the rows on the patches: they sum to one, head by head."""
        query = rearrange(self.query(rows), "b r (h k) -> b h r k", h=self.heads)
        query = query * query.shape[-1] ** -0.5
        weight = rearrange(self.key.weight, "(h k) d -> h k d", h=self.heads)
        bias = rearrange(self.key.bias, "(h k) -> h k 1", h=self.heads)
        asked = rearrange(query @ weight, "b h r d -> b (h r) d")
        scores = rearrange(asked @ patches.mT, "b (h r) n -> b h r n", h=self.heads) + query @ bias
        return scores.softmax(dim=-1, dtype=summing_dtype(scores))

    def forward(self, rows: Rows, patches: Patches) -> tuple[Rows, RowWeights]:
        """Return what each row heard, and its weights on the patches."""
        weights = self.weigh(rows, patches)
        counted = self.dropout(weights)
        sums = weighted_sum(rearrange(counted, "b h r n -> b n (h r)"), patches)
        sums = rearrange(sums, "b (h r) d -> b h r d", h=self.heads).to(patches.dtype)
        weight = rearrange(self.value.weight, "(h k) d -> h d k", h=self.heads)
        bias = rearrange(self.value.bias, "(h k) -> h 1 k", h=self.heads)
        heard = sums @ weight + counted.sum(dim=-1, keepdim=True).to(patches.dtype) * bias
        return self.out(rearrange(heard, "b h r k -> b r (h k)")), weights


class Reading(NamedTuple):
    """A bag on its way: what it holds, and what is asked of it."""

    patches: Patches  # x in the paper, in reading order
    in_context: Patches  # y
    vectors: Vectors  # l
    questions: Rows  # t: of the class token, then of each global vector
    back: Int[Tensor, " N"] | slice  # to the file's order


class DGRMIL(MILModel):
    """Global vectors, kept apart from each other, pulled to positive bags and off negative ones.

    Label 0 is "negative" and any other "positive", also where classes are subtypes. With a grid,
    patches are sorted by row and column: a file's order is then no matter.

    Differs from the authors' code: cross-entropy over all classes, also if there are two; centres
    move in training alone, never by the labels of a test; the diversity term is finite. Two
    matrices of 256 x 256 that nothing uses are not built: 131,072 parameters fewer. Only the class
    token asks, as no other answer is read. The 80 GFLOPs of the comparison are not reproduced: by
    this evaluation a bag of 1000 patches takes 11.
    """

    order_matters: ClassVar[bool] = True
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
        warmup_epochs: int = 10,
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
                f"One vector and some patches must stay: {vectors=}, {patch_dropout=}."
            )
        attention: dict[str, Any] = {"heads": heads, "landmarks": landmarks, "dropout": dropout}
        self.patch_dropout, self.warmup_epochs = patch_dropout, warmup_epochs
        self.diversity_weight, self.triplet_weight = diversity_weight, triplet_weight
        self.warmed_up = True  # where no epochs are told, all terms count
        self.global_vectors = nn.Parameter(torch.randn(1, vectors, in_dim))
        self.class_token = nn.Parameter(torch.randn(1, 1, dim))
        self.projections = nn.ModuleList([nn.Linear(in_dim, dim), nn.Linear(dim, dim)])
        self.patch_layer = nn.Sequential(NystromLayer(dim, **attention), nn.LayerNorm(dim))
        self.global_layer = nn.Sequential(NystromLayer(dim, **attention), nn.LayerNorm(dim))
        self.ask = CrossAttention(dim, heads=heads, dropout=dropout)
        self.conclude = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.classify = nn.Linear(dim, n_outputs)
        self.register_buffer("centres", torch.randn(2, dim))

    def forward_bag(self, features: Features, grid: Cells | None) -> Output:
        bag = self.read(features, grid)
        answer, weights = self.ask(bag.questions[:, :1], bag.in_context)
        embedding = self.conclude(answer[:, 0])
        centre = bag.patches.detach().mean(dim=1, dtype=summing_dtype(bag.patches))
        return Output(
            logits=self.classify(embedding),
            embedding=embedding,
            attention=weights[:, :, 0].mean(dim=1)[:, bag.back],
            aux={"globals": bag.vectors, "centre": centre},
        )

    def global_attention(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None = None
    ) -> Float[Tensor, "1 G N"]:
        """Return the share of each patch of a bag in the answer to each global vector."""
        bag = self.read(self.validate(features, None)[0], grid)
        return self.ask.weigh(bag.questions[:, 1:], bag.in_context).mean(dim=1)[:, :, bag.back]

    def read(self, features: Float[Tensor, "1 N E"], grid: Cells | None) -> Reading:
        """Give context to the patches of a bag, and to the global vectors."""
        kept = self.keep(features.shape[1]) if self.training else None
        patches, back = in_reading_order(self.project(features, kept), grid)
        vectors = self.project(self.global_vectors)
        token = self.class_token.to(vectors.dtype)
        questions = self.global_layer(torch.cat([token, vectors], dim=1))
        return Reading(patches, self.patch_layer(patches), vectors, questions, back)

    def project(self, rows: Features, kept: Float[Tensor, "2 N 1"] | None = None) -> Patches:
        """Map rows to the model's width in two steps, each by a factor a patch if there are any."""
        for step, layer in enumerate(self.projections):
            rows = F.relu(layer(rows))
            if kept is not None:
                rows = rows * kept[step].to(rows.dtype)
        return rows

    def keep(self, n: int) -> Float[Tensor, "2 N 1"]:
        """Draw which patches stay in either step, and by what they grow. One stays in both."""
        device = self.centres.device
        factors = F.dropout(torch.ones(2, n, device=device), self.patch_dropout)
        lost = ~factors.all(dim=0).any()
        spared = torch.arange(n, device=device) == torch.randint(n, (1,), device=device)
        return factors.masked_fill(lost & spared, 1 / (1 - self.patch_dropout)).unsqueeze(-1)

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        """Hear the epoch: the first ones are for the bag loss alone."""
        self.warmed_up = epoch >= self.warmup_epochs

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        """Return the bag loss and, after the warm-up, the terms of the global vectors.

        In training, each bag first moves the centre of its kind.
        """
        if self.training:
            self.move_centres(output.aux["centre"], labels)
        nothing = output.logits.new_zeros(())
        terms = {"bag": self.bag_loss(output.logits, labels)}
        if not self.warmed_up:
            return terms | {"diversity": nothing, "triplet": nothing}
        vectors = F.normalize(output.aux["globals"][0].double(), dim=-1)  # the same for all bags
        near = vectors @ F.normalize(self.centres.double(), dim=-1).mT  # cosines
        one = torch.eye(len(vectors), dtype=vectors.dtype, device=vectors.device)
        diversity = -torch.logdet(vectors @ vectors.mT + JITTER * one)
        triplet = F.relu(1 + near[:, 0] - near[:, 1]).mean()
        return terms | {
            "diversity": self.diversity_weight * diversity.to(terms["bag"]),
            "triplet": self.triplet_weight * triplet.to(terms["bag"]),
        }

    @torch.no_grad()
    def move_centres(self, bags: Float[Tensor, "B D"], labels: Labels) -> None:
        """Move the centre of each bag's kind towards the bag, one bag after the other."""
        for bag, positive in zip(bags.to(self.centres), (labels > 0).long(), strict=True):
            self.centres[positive] = STAYS * self.centres[positive] + (1 - STAYS) * bag
