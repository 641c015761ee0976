"""DSMIL: the highest-scoring patch of each class attends to all patches by their similarity to it.

Li, Li, Eliceiri: "Dual-stream Multiple Instance Learning Network for Whole Slide Image
Classification with Self-supervised Contrastive Learning", CVPR 2021.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models.base import (
    Cells,
    Chunks,
    Evidence,
    Features,
    Grid,
    Labels,
    Logits,
    Mask,
    MILModel,
    Output,
    Patches,
    Weights,
)
from caprmil.models.layers import masked_softmax, summing_dtype, weighted_sum
from caprmil.models.pooling import Pool, pool_chunks
from caprmil.models.products import Linear

Queries = Float[Tensor, "B C K"]


class DSMIL(MILModel):
    """Two streams: a classifier of patches, and a bag pooled by similarity to critical patches.

    The logits are those of the bag stream. With `both_streams`, the probabilities are the mean of
    those of the bag and of the highest patch logits. The logits are then their logarithms: these
    are not sums over patches, so that there is no exact evidence. `value_map` maps patches by a
    layer of the same width before they are summed, with `dropout` before it.

    Differs from the release: a softmax over all classes, also over two, where the release has one
    sigmoid per class and a single logit for two classes. There is no projection before the two
    streams; toolkits that add one have a different model.
    """

    needs_classes: ClassVar[bool] = True
    logits_in_aux = ("bag",)
    weighs_patches = True

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        hidden: int = 128,
        value_map: bool = False,
        dropout: float = 0.0,
        both_streams: bool = False,
    ) -> None:
        super().__init__(
            in_dim,
            n_outputs,
            hidden=hidden,
            value_map=value_map,
            dropout=dropout,
            both_streams=both_streams,
        )
        if dropout and not value_map:
            raise ValueError(f"Only the value map has dropout: {dropout=}, {value_map=}.")
        self.value_map, self.both_streams = value_map, both_streams
        self.instance_classifier = nn.Linear(in_dim, n_outputs)
        self.query = nn.Sequential(
            Linear(in_dim, hidden), nn.ReLU(), Linear(hidden, hidden), nn.Tanh()
        )
        self.value = (
            nn.Sequential(nn.Dropout(dropout), Linear(in_dim, in_dim), nn.ReLU())
            if value_map
            else nn.Identity()
        )
        self.classify = nn.Linear(n_outputs * in_dim, n_outputs)  # each class reads all embeddings
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        patch_logits = self.instance_classifier(features)
        # The choice of the critical patches has no gradient; their queries have one.
        best, critical = patch_logits.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).max(dim=1)
        queries = self.query(features)
        chosen = queries.gather(1, critical.unsqueeze(-1).expand(-1, -1, queries.shape[-1]))
        attention = masked_softmax(similarity(chosen, queries), mask.unsqueeze(1))  # U in the paper
        values = self.value(features)
        embedding = weighted_sum(attention.mT, values).to(values.dtype)
        bag = self.classify(rearrange(embedding, "b c e -> b (c e)"))
        return Output(
            logits=self.combine(bag, best),
            embedding=embedding,
            attention=attention.mean(dim=1),
            class_attention=attention,
            scores=patch_logits.softmax(dim=-1) * mask.unsqueeze(-1),
            aux={"bag": bag, "best": best},
        )

    def combine(self, bag: Logits, best: Logits) -> Logits:
        """Return the logits of the model from those of the two streams."""
        if not self.both_streams:
            return bag
        return torch.stack([bag, best]).log_softmax(dim=-1).logsumexp(dim=0) - math.log(2)

    @property
    def streams(self) -> bool:
        return not self.value_map

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        """Find the critical patches in a first pass, and pool in a second one."""
        if self.value_map:
            return super().stream_bag(chunks, keep=keep)
        best, chosen = torch.tensor(-torch.inf), torch.zeros(())
        for features in chunks():
            highest, critical = self.instance_classifier(features).max(dim=1)
            higher = (highest > best).unsqueeze(-1)  # the first of equal patches
            chosen = torch.where(higher, self.query(features[:, critical[0]]), chosen)
            best = torch.maximum(highest, best)
        # One running softmax per class, over views of the same patches.
        views = (features.expand(self.n_outputs, -1, -1) for features in chunks())
        embedding, attention = pool_chunks(CriticalPool(self.query, chosen), views)
        bag = self.classify(rearrange(embedding, "c e -> 1 (c e)"))
        return Output(
            logits=self.combine(bag, best),
            embedding=embedding.unsqueeze(0),
            attention=attention.mean(dim=0, keepdim=True),
            class_attention=attention.unsqueeze(0),
        )

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence | None:
        if self.both_streams:
            return None
        patch_logits, queries = self.instance_classifier(features[0]), self.query(features)
        critical = patch_logits.argmax(dim=0)
        attention = similarity(queries[:, critical], queries)[0]
        attention = attention.softmax(dim=-1, dtype=summing_dtype(attention))
        # Each class c reads the embeddings of all classes k.
        weight = rearrange(self.classify.weight, "c (k e) -> (c k) e", k=self.n_outputs)
        values = F.linear(self.value(features[0]), weight)
        values = rearrange(values, "n (c k) -> n c k", c=self.n_outputs)
        terms = einsum(values, attention, "n c k, k n -> n c")
        return Evidence(terms=terms, rest=self.classify.bias)

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        return {
            "bag": 0.5 * self.criterion(output.aux["bag"], labels),
            "max": 0.5 * self.criterion(output.aux["best"], labels),
        }


def similarity(chosen: Queries, queries: Float[Tensor, "B N K"]) -> Float[Tensor, "B C N"]:
    """Return the similarity of each patch to the critical patch of each class."""
    return einsum(chosen, queries, "b c k, b n k -> b c n") / queries.shape[-1] ** 0.5


class CriticalPool(Pool):
    """Pools one bag that is repeated C times, once per class."""

    def __init__(self, query: nn.Module, chosen: Queries) -> None:
        super().__init__(chosen.shape[-1])
        self.query, self.chosen = query, chosen

    def score(self, patches: Patches) -> Weights:
        return similarity(self.chosen, self.query(patches[:1]))[0]
