"""CLAM: attention, sharpened by asking the patches it likes best and least what they are.

Lu, Williamson, Chen, Chen, Barbieri, Mahmood: "Data-efficient and weakly supervised computational
pathology on whole-slide images", Nature Biomedical Engineering 5, 2021. One more axis in this
file: A branches of attention, one in all (SB) or one a class (MB).
"""

import math
from collections.abc import Iterator
from dataclasses import replace

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
    share_out,
)
from caprmil.models.layers import Dropout, masked_softmax, summing_dtype, weighted_sum
from caprmil.models.packing import Sizes, mask_of, sum_packed, unpack
from caprmil.models.pooling import Pool, pool_chunks

SURE = math.log(1000)  # from this margin on, either way, the smooth loss is the plain hinge


def smooth_svm(margins: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch N"]:
    """Return the smooth top-1 SVM loss of two scores, by how far the right one is ahead.

    Temperature and margin are 1 (Berrada, Zisserman, Kumar: "Smooth Loss Functions for Deep Top-k
    Classification", ICLR 2018).
    """
    short = 1 - margins.float()
    return torch.where(margins.abs() < SURE, F.softplus(short), F.relu(short))


class BranchedAttention(Pool):
    """Gated attention whose last layer scores every patch once a branch."""

    def __init__(self, dim: int, *, hidden: int, branches: int, dropout: float) -> None:
        super().__init__(dim)
        self.branches = branches
        self.content = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden)
        self.rate = nn.Linear(hidden, branches)
        self.dropout = Dropout(dropout)

    def rates(self, patches: Patches) -> Float[Tensor, "B A N"]:
        merit = self.dropout(self.content(patches).tanh())
        return self.rate(merit * self.dropout(self.gate(patches).sigmoid())).mT

    def score(self, patches: Patches) -> Weights:
        """Score one bag that stands there A times over, each time by the next branch."""
        return self.rates(patches[:1])[0]


class Listening(Pool):
    """Attention whose scores are kept in a list, for a loss that comes later."""

    def __init__(self, attend: BranchedAttention, heard: list[Tensor]) -> None:
        super().__init__(attend.dim)
        self.attend, self.heard = attend, heard

    def score(self, patches: Patches) -> Weights:
        self.heard.append(self.attend.score(patches))
        return self.heard[-1]


class CLAM(MILModel):
    """Attention pooling with a second task: to tell its favourite patches from its least ones.

    `branches` is "single", "multi" (one attention a class), or "auto": single for two classes,
    multi for more. `k` patches from each end of the attention are asked: 32 if there is a single
    branch, else 16. With `subtyping`, classes exclude each other: the patches that another class
    likes best are held against it.

    Differs from the release: labels enter the loss alone; top and bottom never share a patch, so
    k is at most half of the bag, and a bag of one patch is not asked. The sizes are those of the
    "big" network; "small" has a hidden width of 256. The instance classifiers of all classes are
    one layer.
    """

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
            raise ValueError(f"There are auto, single and multi branches: {branches=}.")
        if k is not None and k < 1:
            raise ValueError(f"One patch at least is asked from each end: {k=}.")
        if not 0 <= instance_weight <= 1:
            raise ValueError(f"The instance loss has a share from 0 to 1: {instance_weight=}.")
        self.multi = branches == "multi" or (branches == "auto" and n_outputs > 2)
        self.k = k or (16 if self.multi else 32)
        self.instance_weight, self.subtyping = instance_weight, subtyping
        self.project = nn.Sequential(nn.Linear(in_dim, dim), nn.ReLU(), Dropout(dropout))
        self.attend = BranchedAttention(
            dim, hidden=hidden, branches=n_outputs if self.multi else 1, dropout=dropout
        )
        self.classify = nn.Linear(dim, n_outputs)
        self.judge = nn.Linear(dim, 2 * n_outputs)  # against and for each class

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        patches = self.project(features)
        rates = self.attend.rates(patches)
        attention = masked_softmax(rates, mask.unsqueeze(1))
        embedding = weighted_sum(attention.mT, patches).to(patches.dtype)
        return self.conclude(embedding, attention, rates, self.margins(patches), mask)

    def forward_packed(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes, grid: Grid | None
    ) -> Output:
        patches, mask = self.project(features), mask_of(sizes, features.device)
        rates = unpack(self.attend.rates(patches).mT, sizes).mT
        attention = masked_softmax(rates, mask.unsqueeze(1))
        embedding = sum_packed(attention.mT, patches, sizes).to(patches.dtype)
        margins = unpack(self.margins(patches), sizes)
        return self.conclude(embedding, attention, rates, margins, mask)

    def conclude(
        self,
        embedding: Float[Tensor, "B A D"],
        attention: Float[Tensor, "B A N"],
        rates: Float[Tensor, "B A N"],
        margins: Float[Tensor, "B N C"],
        mask: Mask,
    ) -> Output:
        return Output(
            logits=self.decide(embedding),
            embedding=embedding if self.multi else embedding.squeeze(1),
            attention=attention.mean(dim=1),
            class_attention=attention if self.multi else None,
            scores=margins.sigmoid() * mask.unsqueeze(-1),
            aux={"rates": rates, "margins": margins, "real": mask},
        )

    def decide(self, embedding: Float[Tensor, "B A D"]) -> Logits:
        """Let each class read its own branch, or all of them the only one."""
        return (embedding * self.classify.weight).sum(dim=-1) + self.classify.bias

    def margins(self, patches: Patches) -> Float[Tensor, "B N C"]:
        """Return how much more speaks for a class than against it, patch by patch.

        Loss and probability know the two scores by their difference alone: one product does.
        """
        weight = rearrange(self.judge.weight, "(c two) d -> two c d", two=2)
        bias = rearrange(self.judge.bias, "(c two) -> two c", two=2)
        return F.linear(patches, weight[1] - weight[0], bias[1] - bias[0])

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        rates, margins = list[Tensor](), list[Tensor]()

        def pieces() -> Iterator[Patches]:
            for features in chunks():
                patches = self.project(features)
                if keep:
                    margins.append(self.margins(patches))
                yield patches.expand(self.attend.branches, -1, -1)

        pool = Listening(self.attend, rates) if keep else self.attend
        embedding, attention = (part.unsqueeze(0) for part in pool_chunks(pool, pieces()))
        output = Output(
            logits=self.decide(embedding),
            embedding=embedding if self.multi else embedding.squeeze(1),
            attention=attention.mean(dim=1),
            class_attention=attention if self.multi else None,
        )
        if not keep:
            return output
        ahead = torch.cat(margins, dim=1)
        aux = {
            "rates": torch.cat(rates, dim=-1).unsqueeze(0),
            "margins": ahead,
            "real": torch.ones_like(ahead[..., 0], dtype=torch.bool),
        }
        return replace(output, scores=ahead.sigmoid(), aux=aux)

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence:
        patches = self.project(features)
        rates = self.attend.rates(patches)[0]
        shares = rates.softmax(dim=-1, dtype=summing_dtype(rates))
        return share_out(shares, patches[0], self.classify.weight, self.classify.bias)

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        return {
            "bag": (1 - self.instance_weight) * self.bag_loss(output.logits, labels),
            "instance": self.instance_weight * self.instance_loss(labels, **output.aux),
        }

    def instance_loss(
        self,
        labels: Labels,
        *,
        rates: Float[Tensor, "B A N"],
        margins: Float[Tensor, "B N C"],
        real: Mask,
    ) -> Float[Tensor, ""]:
        """Ask k patches from each end of the attention; none, in a bag of one patch."""
        asked = labels.unsqueeze(-1)
        if self.subtyping:
            asked = torch.arange(self.n_outputs, device=labels.device).expand(len(labels), -1)
        ahead = margins.mT.take_along_dim(asked.unsqueeze(-1), dim=1)  # one row a class asked
        if self.multi:
            rates = rates.take_along_dim(asked.unsqueeze(-1), dim=1)

        # One ranking for both ends: where patches tie, two top-k could take the same one.
        rank = rates.masked_fill(~real.unsqueeze(1), torch.inf).argsort(dim=-1).argsort(dim=-1)
        size = real.sum(dim=-1)[:, None, None]
        k = (size // 2).clamp(max=self.k)
        lowest, highest = rank < k, (rank >= size - k) & (rank < size)

        against = smooth_svm(-ahead)
        own = (smooth_svm(ahead) * highest + against * lowest).sum(dim=-1) / 2
        losses = torch.where(asked == labels.unsqueeze(-1), own, (against * highest).sum(dim=-1))
        return (losses / k.squeeze(-1).clamp(min=1)).mean()
