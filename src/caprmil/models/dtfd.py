"""DTFD-MIL: a bag is split at random into pseudo-bags, and a second tier pools what they distil.

Zhang, Meng, Zhao, Qiao, Yang, Coupland, Zheng: "DTFD-MIL: Double-Tier Feature Distillation
Multiple Instance Learning for Histopathology Whole Slide Image Classification", CVPR 2022. One
more axis in this file: G pseudo-bags.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from caprmil.models.base import (
    Cells,
    Counts,
    Evidence,
    Features,
    Labels,
    MILModel,
    Output,
    evidence_of_sum,
)
from caprmil.models.layers import (
    content_order,
    masked_softmax,
    seeded,
    summing_dtype,
    weighted_sum,
)
from caprmil.models.pooling import AttentionPool
from caprmil.models.products import Linear


class Tier(nn.Module):
    """A gated attention pool and a classifier."""

    def __init__(self, dim: int, n_outputs: int, *, hidden: int) -> None:
        super().__init__()
        self.pool = AttentionPool(dim, hidden=hidden, gated=True, dropout=0.0)
        self.classify = nn.Linear(dim, n_outputs)


class DTFDMIL(MILModel):
    """Two tiers of attention: within pseudo-bags, then over the features distilled from each.

    `distil` is "afs" (the pooled vector of a pseudo-bag), "maxs" (its patches with the highest
    activation of the class) or "maxmins" (the highest and the lowest); `distilled` is their number
    per bag, with at least one from each end of a pseudo-bag. In evaluation the split depends on
    `seed` and on the features of the patches, so that the output of a bag is repeatable.

    Differs from the release: the split is repeatable in evaluation; patches are ranked by the last
    class only for two classes, and otherwise by the class that tier one predicts; both tiers are
    trained in one step, each by its own loss, which is equivalent. `scores` are the class
    probabilities of tier one for bags of one patch, not the class activations times attention,
    which are nearly constant in a large bag.
    """

    needs_classes: ClassVar[bool] = True
    weighs_patches = True
    export_problem = "splits a bag at random, and another program would split it differently"

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        dim: int = 512,
        hidden: int = 128,
        groups: int = 4,
        distil: str = "afs",
        distilled: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(
            in_dim,
            n_outputs,
            dim=dim,
            hidden=hidden,
            groups=groups,
            distil=distil,
            distilled=distilled,
            seed=seed,
        )
        if distil not in ("afs", "maxs", "maxmins"):
            raise ValueError(f"distil is afs, maxs or maxmins: {distil=}.")
        if groups < 1 or distilled < 1:
            raise ValueError(f"groups and distilled are at least 1: {groups=}, {distilled=}.")
        self.groups, self.distil, self.seed = groups, distil, seed
        self.distilled_per_end = max(distilled // groups, 1)
        self.project = Linear(in_dim, dim, bias=False)
        self.first = Tier(dim, n_outputs, hidden=hidden)
        self.second = Tier(dim, n_outputs, hidden=hidden)

    def shared_parts(self, features: Float[Tensor, "1 N E"]) -> tuple[Tensor, ...]:
        patches = F.relu(self.project(features))
        return patches[0], self.first.pool.score(patches)[0], self.first.classify(patches)[0]

    def forward_bag(
        self,
        features: Features,
        grid: Cells | None,
        counts: Counts | None = None,
        shared: tuple[Tensor, ...] | None = None,
    ) -> Output:
        shared = self.shared_parts(features) if shared is None else shared
        patches, scores, patch_logits = (part[None] for part in shared)

        # Tier one: attention within each pseudo-bag.
        members = self.split(features[0])
        if counts is not None:
            scores = scores + counts.log()
        attention = masked_softmax(scores.expand(len(members), -1), members)
        pooled = weighted_sum(attention.mT, patches[0]).to(patches.dtype)
        group_logits = self.first.classify(pooled)
        group_logits = group_logits.to(summing_dtype(group_logits))

        # Distillation.
        rows, weights, row_counts = pooled, attention, None
        if self.distil != "afs":
            unbiased = patch_logits[0] - self.first.classify.bias
            activations = (attention.sum(dim=0).unsqueeze(-1) * unbiased).softmax(dim=-1)
            predicted = int(group_logits.log_softmax(dim=-1).mean(dim=0).argmax())
            wanted = -1 if self.n_outputs == 2 else predicted
            chosen = self.choose(activations[:, wanted], members)
            rows, weights = patches[0, chosen], F.one_hot(chosen, len(unbiased)).to(attention)
            row_counts = None if counts is None else counts[None, chosen]

        # Tier two: attention over the distilled features. It does not train what lies below it.
        if self.training:
            rows = rows.detach()
        rows = rows.unsqueeze(0)
        everything = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        mask = everything if row_counts is None else row_counts
        embedding, row_attention = self.second.pool(rows, mask)
        return Output(
            logits=self.second.classify(embedding),
            embedding=embedding,
            attention=row_attention @ weights,
            scores=patch_logits.softmax(dim=-1),
            aux={
                "groups": members.new_tensor([len(members)], dtype=torch.long),
                "group_logits": group_logits,
            },
        )

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence:
        # Tier two pools sums of patches or patches, so that attention has all the weights.
        attention = self.forward_bag(features, grid).attention
        patches, classify = F.relu(self.project(features[0])), self.second.classify
        return evidence_of_sum(attention, patches, classify.weight, classify.bias)

    def split(self, features: Float[Tensor, "N E"]) -> Bool[Tensor, "G N"]:
        """Draw the pseudo-bags. Their sizes differ by at most one patch, and none is empty."""
        n, device = len(features), features.device
        generator = None if self.training else seeded(self.seed, torch.device("cpu"))
        order = torch.randperm(n, generator=generator).to(device)  # the same on every device
        if not self.training:
            order = content_order(features)[order]
        groups = torch.arange(min(self.groups, n), device=device)
        group = torch.empty_like(order)
        group[order] = torch.arange(n, device=device) % len(groups)
        return group == groups.unsqueeze(-1)

    def choose(
        self, activations: Float[Tensor, " N"], members: Bool[Tensor, "G N"]
    ) -> Int[Tensor, " R"]:
        """Return the patches with the highest activations of each pseudo-bag, or both ends."""
        k = min(self.distilled_per_end, int(members.sum(dim=-1).min()))
        chosen = torch.where(members, activations, -torch.inf).topk(k).indices
        if self.distil == "maxmins":
            lowest = torch.where(members, activations, torch.inf).topk(k, largest=False).indices
            chosen = torch.cat([chosen, lowest])
        return torch.unique(chosen)  # in a small pseudo-bag, a patch may be at both ends

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        """Return the loss of each tier. That of tier one is the mean over its pseudo-bags."""
        bags = torch.split(output.aux["group_logits"], output.aux["groups"].tolist())
        tier_one = [
            self.criterion(logits, label.expand(len(logits)))
            for logits, label in zip(bags, labels, strict=True)
        ]
        return {
            "bag": self.criterion(output.logits, labels),
            "tier_one": torch.stack(tier_one).mean(),
        }
