"""DSMIL: the patch that speaks loudest for a class asks all others how alike they are.

Li, Li, Eliceiri: "Dual-stream Multiple Instance Learning Network for Whole Slide Image
Classification with Self-supervised Contrastive Learning", CVPR 2021.
"""

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

Queries = Float[Tensor, "B C K"]


class DSMIL(MILModel):
    """Two streams: patches classified one by one, and a bag pooled by likeness to the best.

    The bag stream answers; with `both_streams`, the mean of its logits and the best patches'.
    `value_map` sends patches through a layer of their own width before they are summed, with
    `dropout` before it. With `multilabel`, each class is a question of its own: sigmoids and
    binary cross-entropies in the place of one softmax.

    Differs from the release: a softmax over all classes by default, also over two, where the
    release has a sigmoid each and a single logit for two classes. No projection before the two
    streams: toolkits that add one have another model.
    """

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        hidden: int = 128,
        value_map: bool = False,
        dropout: float = 0.0,
        both_streams: bool = False,
        multilabel: bool = False,
    ) -> None:
        super().__init__(
            in_dim,
            n_outputs,
            hidden=hidden,
            value_map=value_map,
            dropout=dropout,
            both_streams=both_streams,
            multilabel=multilabel,
        )
        if dropout and not value_map:
            raise ValueError(f"Only the value map has dropout: {dropout=}, {value_map=}.")
        self.value_map, self.both_streams, self.multilabel = value_map, both_streams, multilabel
        self.judge = nn.Linear(in_dim, n_outputs)  # the patch stream
        self.query = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.value = (
            nn.Sequential(nn.Dropout(dropout), nn.Linear(in_dim, in_dim), nn.ReLU())
            if value_map
            else nn.Identity()
        )
        self.classify = nn.Linear(n_outputs * in_dim, n_outputs)  # each class reads all of them
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        opinions = self.judge(features)
        # The choice has no gradient; the query of the patch that was chosen has.
        best, critical = opinions.masked_fill(~mask.unsqueeze(-1), -torch.inf).max(dim=1)
        queries = self.query(features)
        asking = queries.gather(1, critical.unsqueeze(-1).expand(-1, -1, queries.shape[-1]))
        attention = masked_softmax(likeness(asking, queries), mask.unsqueeze(1))  # U in the paper
        values = self.value(features)
        embedding = weighted_sum(attention.mT, values).to(values.dtype)
        bag = self.classify(rearrange(embedding, "b c e -> b (c e)"))
        return Output(
            logits=self.answer(bag, best),
            embedding=embedding,
            attention=attention.mean(dim=1),
            class_attention=attention,
            scores=self.probabilities(opinions) * mask.unsqueeze(-1),
            aux={"bag": bag, "best": best},
        )

    def answer(self, bag: Logits, best: Logits) -> Logits:
        return (bag + best) / 2 if self.both_streams else bag

    def probabilities(self, opinions: Float[Tensor, "B N C"]) -> Float[Tensor, "B N C"]:
        return opinions.sigmoid() if self.multilabel else opinions.softmax(dim=-1)

    @property
    def streams(self) -> bool:
        return not self.value_map

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        """Find the critical patches in one pass, and who is like them in another."""
        if self.value_map:
            return super().stream_bag(chunks, keep=keep)
        best, asking = torch.tensor(-torch.inf), torch.zeros(())
        for features in chunks():
            here, critical = self.judge(features).max(dim=1)
            louder = (here > best).unsqueeze(-1)  # of equals, the first
            asking = torch.where(louder, self.query(features[:, critical[0]]), asking)
            best = torch.maximum(here, best)
        # A running softmax a class, over views of the same patches.
        pieces = (features.expand(self.n_outputs, -1, -1) for features in chunks())
        embedding, attention = pool_chunks(CriticalPool(self.query, asking), pieces)
        bag = self.classify(rearrange(embedding, "c e -> 1 (c e)"))
        return Output(
            logits=self.answer(bag, best),
            embedding=embedding.unsqueeze(0),
            attention=attention.mean(dim=0, keepdim=True),
            class_attention=attention.unsqueeze(0),
        )

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence:
        opinions, queries = self.judge(features[0]), self.query(features)
        critical = opinions.argmax(dim=0)
        attention = likeness(queries[:, critical], queries)[0]
        attention = attention.softmax(dim=-1, dtype=summing_dtype(attention))
        # Each class reads the embeddings of all: K of them, and one share of a patch in each.
        readers = rearrange(self.classify.weight, "c (k e) -> (c k) e", k=self.n_outputs)
        said = rearrange(
            F.linear(self.value(features[0]), readers), "n (c k) -> n c k", c=self.n_outputs
        )
        terms = einsum(said, attention, "n c k, k n -> n c")
        rest: Tensor = self.classify.bias
        if self.both_streams:
            loudest = F.one_hot(critical, len(terms)).mT
            terms = (terms + loudest * (opinions - self.judge.bias)) / 2
            rest = (rest + self.judge.bias) / 2
        return Evidence(terms=terms, rest=rest)

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        measure = self.each_class_loss if self.multilabel else self.bag_loss
        return {
            "bag": 0.5 * measure(output.aux["bag"], labels),
            "max": 0.5 * measure(output.aux["best"], labels),
        }

    def each_class_loss(self, logits: Logits, labels: Labels) -> Float[Tensor, ""]:
        """Return the mean binary cross-entropy of the classes, each bag weighed by its own."""
        truth = F.one_hot(labels, self.n_outputs).float()
        losses = F.binary_cross_entropy_with_logits(logits.float(), truth, reduction="none")
        if self.class_weights is not None:
            losses = losses * self.class_weights[labels].unsqueeze(-1)
        return losses.mean()


def likeness(asking: Queries, queries: Float[Tensor, "B N K"]) -> Float[Tensor, "B C N"]:
    """Return how alike each patch is to the critical one of each class."""
    return einsum(asking, queries, "b c k, b n k -> b c n") / queries.shape[-1] ** 0.5


class CriticalPool(Pool):
    """Pools one bag that stands there C times over, each time for the next class."""

    def __init__(self, query: nn.Module, asking: Queries) -> None:
        super().__init__(asking.shape[-1])
        self.query, self.asking = query, asking

    def score(self, patches: Patches) -> Weights:
        return likeness(self.asking, self.query(patches[:1]))[0]
