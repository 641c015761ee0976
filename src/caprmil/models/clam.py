"""CLAM: attention pooling, with a side task on the patches of highest and lowest attention.

Lu, Williamson, Chen, Chen, Barbieri, Mahmood: "Data-efficient and weakly supervised computational
pathology on whole-slide images", Nature Biomedical Engineering 5, 2021. One more axis in this
file: A attention branches, one for all classes (SB) or one per class (MB).
"""

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
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
    evidence_of_sum,
)
from caprmil.models.layers import (
    Dropout,
    masked_softmax,
    summing_dtype,
    weighted_sum,
)
from caprmil.models.packing import Sizes, mask_from_sizes, pad_packed, weighted_sum_packed
from caprmil.models.pooling import Pool, pool_chunks
from caprmil.models.products import Linear

HARD_MARGIN = math.log(1000)  # margins beyond it have the plain hinge loss


def smooth_svm(margins: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch N"]:
    """Return the smooth top-1 SVM loss of two scores from their difference, right minus wrong.

    Temperature and margin are 1 (Berrada, Zisserman, Kumar: "Smooth Loss Functions for Deep Top-k
    Classification", ICLR 2018).
    """
    violation = 1 - margins.to(summing_dtype(margins))
    return torch.where(margins.abs() < HARD_MARGIN, F.softplus(violation), F.relu(violation))


class BranchedAttention(Pool):
    """Gated attention with one score per patch and branch."""

    def __init__(self, dim: int, *, hidden: int, branches: int, dropout: float) -> None:
        super().__init__(dim)
        self.branches = branches
        self.hidden = Linear(dim, hidden)
        self.gate = Linear(dim, hidden)
        self.out = nn.Linear(hidden, branches)
        self.dropout = Dropout(dropout)

    def branch_scores(self, patches: Patches) -> Float[Tensor, "B A N"]:
        hidden = self.dropout(self.hidden(patches).tanh())
        return self.out(hidden * self.dropout(self.gate(patches).sigmoid())).mT

    def score(self, patches: Patches) -> Weights:
        """Return the scores of one bag that is repeated A times, once per branch."""
        return self.branch_scores(patches[:1])[0]


class RecordingPool(Pool):
    """Attention whose scores are also appended to a list, for the loss."""

    def __init__(self, attend: BranchedAttention, recorded: list[Tensor]) -> None:
        super().__init__(attend.dim)
        self.attend, self.recorded = attend, recorded

    def score(self, patches: Patches) -> Weights:
        self.recorded.append(self.attend.score(patches))
        return self.recorded[-1]


class CLAM(MILModel):
    """Attention pooling with an instance loss on the patches of highest and lowest attention.

    `branches` is "single", "multi" (one attention per class), or "auto": single for two classes,
    multi for more. The instance loss has `k` patches from each end of the attention: 32 for a
    single branch, otherwise 16. With `subtyping` classes are mutually exclusive: the patches with
    the highest attention of another class are negative examples of it.

    Differs from the release: labels enter only the loss; top and bottom never share a patch, so
    that k is at most half of the bag, and a bag of one patch has no instance loss. The sizes are
    those of the "big" network; "small" has a hidden width of 256. The instance classifiers of all
    classes are one layer.
    """

    needs_classes: ClassVar[bool] = True
    weighs_patches = True
    evaluates_in_chunks = True

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        dim: int = 512,
        hidden: int = 384,
        branches: str = "auto",
        k: int | None = None,
        dropout: float = 0.25,
        instance_weight: float = 0.3,
        subtyping: bool = False,
    ) -> None:
        super().__init__(
            in_dim,
            n_outputs,
            dim=dim,
            hidden=hidden,
            branches=branches,
            k=k,
            dropout=dropout,
            instance_weight=instance_weight,
            subtyping=subtyping,
        )
        if branches not in ("auto", "single", "multi"):
            raise ValueError(f"branches is auto, single or multi: {branches=}.")
        if k is not None and k < 1:
            raise ValueError(f"k is at least 1: {k=}.")
        if not 0 <= instance_weight <= 1:
            raise ValueError(f"The weight of the instance loss is 0 to 1: {instance_weight=}.")
        self.multi = branches == "multi" or (branches == "auto" and n_outputs > 2)
        self.k = k or (16 if self.multi else 32)
        self.instance_weight, self.subtyping = instance_weight, subtyping
        self.project = nn.Sequential(Linear(in_dim, dim), nn.ReLU(), Dropout(dropout))
        self.attend = BranchedAttention(
            dim, hidden=hidden, branches=n_outputs if self.multi else 1, dropout=dropout
        )
        self.classify = nn.Linear(dim, n_outputs)
        self.instance_classifier = nn.Linear(dim, 2 * n_outputs)  # (against, for) of each class

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        patches = self.project(features)
        scores = self.attend.branch_scores(patches)
        attention = masked_softmax(scores, mask.unsqueeze(1))
        embedding = weighted_sum(attention.mT, patches).to(patches.dtype)
        return self.output(embedding, attention, scores, self.margins(patches), mask)

    def forward_packed(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes, grid: Grid | None
    ) -> Output:
        patches, mask = self.project(features), mask_from_sizes(sizes, features.device)
        scores = pad_packed(self.attend.branch_scores(patches).mT, sizes).mT
        attention = masked_softmax(scores, mask.unsqueeze(1))
        embedding = weighted_sum_packed(attention.mT, patches, sizes).to(patches.dtype)
        margins = pad_packed(self.margins(patches), sizes)
        return self.output(embedding, attention, scores, margins, mask)

    def output(
        self,
        embedding: Float[Tensor, "B A D"],
        attention: Float[Tensor, "B A N"],
        scores: Float[Tensor, "B A N"],
        margins: Float[Tensor, "B N C"],
        mask: Mask,
    ) -> Output:
        return Output(
            logits=self.bag_logits(embedding),
            embedding=embedding if self.multi else embedding.squeeze(1),
            attention=attention.mean(dim=1),
            class_attention=attention if self.multi else None,
            scores=margins.sigmoid() * mask.unsqueeze(-1),
            aux={"attention_scores": scores, "margins": margins, "mask": mask},
        )

    def bag_logits(self, embedding: Float[Tensor, "B A D"]) -> Logits:
        """Return the logits: each class reads its own branch, or the only one."""
        return (embedding * self.classify.weight).sum(dim=-1) + self.classify.bias

    def margins(self, patches: Patches) -> Float[Tensor, "B N C"]:
        """Return the score for each class minus the score against it, per patch.

        Loss and probability depend only on this difference, so that one product is enough.
        """
        weight = rearrange(self.instance_classifier.weight, "(c two) d -> two c d", two=2)
        bias = rearrange(self.instance_classifier.bias, "(c two) -> two c", two=2)
        return F.linear(patches, weight[1] - weight[0], bias[1] - bias[0])

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        scores, margins = list[Tensor](), list[Tensor]()

        def projected() -> Iterator[Patches]:
            for features in chunks():
                patches = self.project(features)
                if keep:
                    margins.append(self.margins(patches))
                yield patches.expand(self.attend.branches, -1, -1)

        pool = RecordingPool(self.attend, scores) if keep else self.attend
        embedding, attention = (part.unsqueeze(0) for part in pool_chunks(pool, projected()))
        if keep:
            mask = torch.ones_like(attention[:, 0], dtype=torch.bool)
            every = torch.cat(scores, dim=-1).unsqueeze(0)
            return self.output(embedding, attention, every, torch.cat(margins, dim=1), mask)
        return Output(
            logits=self.bag_logits(embedding),
            embedding=embedding if self.multi else embedding.squeeze(1),
            attention=attention.mean(dim=1),
            class_attention=attention if self.multi else None,
        )

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence:
        patches = self.project(features)
        scores = self.attend.branch_scores(patches)[0]
        attention = scores.softmax(dim=-1, dtype=summing_dtype(scores))
        return evidence_of_sum(attention, patches[0], self.classify.weight, self.classify.bias)

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        return {
            "bag": (1 - self.instance_weight) * self.criterion(output.logits, labels),
            "instance": self.instance_weight * self.instance_loss(labels, **output.aux),
        }

    def instance_loss(
        self,
        labels: Labels,
        *,
        attention_scores: Float[Tensor, "B A N"],
        margins: Float[Tensor, "B N C"],
        mask: Mask,
    ) -> Float[Tensor, ""]:
        """Return the loss of k patches from each end of the attention; 0 for a single patch."""
        classes = labels.unsqueeze(-1)
        if self.subtyping:
            classes = torch.arange(self.n_outputs, device=labels.device).expand(len(labels), -1)
        margins = margins.mT.take_along_dim(classes.unsqueeze(-1), dim=1)
        scores = attention_scores
        if self.multi:
            scores = scores.take_along_dim(classes.unsqueeze(-1), dim=1)

        # One ranking for both ends: with equal scores, two top-k could choose the same patch.
        rank = scores.masked_fill(~mask.unsqueeze(1), torch.inf).argsort(dim=-1).argsort(dim=-1)
        size = mask.sum(dim=-1)[:, None, None]
        k = (size // 2).clamp(max=self.k)
        lowest, highest = rank < k, (rank >= size - k) & (rank < size)

        negative = smooth_svm(-margins)
        own = (smooth_svm(margins) * highest + negative * lowest).sum(dim=-1) / 2
        other = (negative * highest).sum(dim=-1)
        losses = torch.where(classes == labels.unsqueeze(-1), own, other)
        return (losses / k.squeeze(-1).clamp(min=1)).mean()
