"""DTFD-MIL: a bag is split at random into pseudo-bags; what they distil is the bag's bag.

Zhang, Meng, Zhao, Qiao, Yang, Coupland, Zheng: "DTFD-MIL: Double-Tier Feature Distillation
Multiple Instance Learning for Histopathology Whole Slide Image Classification", CVPR 2022. One
more axis in this file: G pseudo-bags.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from caprmil.models.base import (
    Cells,
    Evidence,
    Features,
    Labels,
    MILModel,
    Output,
    share_out,
)
from caprmil.models.layers import content_order, masked_softmax, seeded, weighted_sum
from caprmil.models.pooling import AttentionPool


class Tier(nn.Module):
    """An attention-based model of its own: a pool and a classifier."""

    def __init__(self, dim: int, n_outputs: int, *, hidden: int) -> None:
        super().__init__()
        self.pool = AttentionPool(dim, hidden=hidden, gated=True, dropout=0.0)
        self.classify = nn.Linear(dim, n_outputs)


class DTFDMIL(MILModel):
    """Two tiers of attention: within pseudo-bags, then over what is distilled from each.

    `distil` is "afs" (the pooled vector of a pseudo-bag), "maxs" (its patches that speak most for
    the class) or "maxmins" (those that speak most and least); `distilled` patches from the bag as
    a whole, one at least from each end of a pseudo-bag. In evaluation, the split is drawn by
    `seed` and by what the patches hold: the same bag gives the same answer.

    Differs from the release: the split is repeatable in evaluation; patches are ranked by the
    last class for two classes only, and else by the class that tier one predicts; both tiers
    learn in one step, each from its own loss, which comes to the same. `scores` are tier one's
    answers to bags of one patch, not the class activations times their attention, which are
    nearly flat in a large bag.
    """

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
            raise ValueError(f"There are afs, maxs and maxmins: {distil=}.")
        if groups < 1 or distilled < 1:
            raise ValueError(f"There is one of each at least: {groups=}, {distilled=}.")
        self.groups, self.distil, self.seed = groups, distil, seed
        self.each = max(distilled // groups, 1)  # patches from one end of a pseudo-bag
        self.project = nn.Linear(in_dim, dim, bias=False)
        self.first = Tier(dim, n_outputs, hidden=hidden)
        self.second = Tier(dim, n_outputs, hidden=hidden)

    def forward_bag(self, features: Features, grid: Cells | None) -> Output:
        patches = F.relu(self.project(features))
        members = self.split(features[0])
        rates = self.first.pool.score(patches).expand(len(members), -1)
        attention = masked_softmax(rates, members)  # each pseudo-bag sums to one
        pooled = weighted_sum(attention.mT, patches[0]).to(patches.dtype)
        answer = self.first.classify(pooled).float().log_softmax(dim=-1).mean(dim=0)
        opinions = self.first.classify(patches)

        rows, shares = pooled, attention
        if self.distil != "afs":
            said = opinions[0] - self.first.classify.bias
            activations = (attention.sum(dim=0).unsqueeze(-1) * said).softmax(dim=-1)
            wanted = -1 if self.n_outputs == 2 else int(answer.argmax())
            chosen = self.choose(activations[:, wanted], members)
            rows, shares = patches[0, chosen], F.one_hot(chosen, len(said)).to(attention)
        if self.training:
            rows = rows.detach()  # tier two does not teach what lies below it
        rows = rows.unsqueeze(0)
        every = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        embedding, weights = self.second.pool(rows, every)
        return Output(
            logits=self.second.classify(embedding),
            embedding=embedding,
            attention=weights @ shares,
            scores=opinions.softmax(dim=-1),
            aux={"tier_one": answer.unsqueeze(0)},
        )

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence:
        # What tier two pools are sums of patches or patches themselves, so attention has it all.
        shares = self.forward_bag(features, grid).attention
        patches, classify = F.relu(self.project(features[0])), self.second.classify
        return share_out(shares, patches, classify.weight, classify.bias)

    def split(self, features: Float[Tensor, "N E"]) -> Bool[Tensor, "G N"]:
        """Draw who is in which pseudo-bag. They differ by one patch at most; none is empty."""
        n, device = len(features), features.device
        generator = None if self.training else seeded(self.seed, torch.device("cpu"))
        order = torch.randperm(n, generator=generator).to(device)  # the same on every device
        if not self.training:
            order = content_order(features)[order]
        groups = torch.arange(min(self.groups, n), device=device)
        group = torch.empty_like(order)
        group[order] = torch.arange(n, device=device) % len(groups)
        return group == groups.unsqueeze(-1)

    def choose(self, merit: Float[Tensor, " N"], members: Bool[Tensor, "G N"]) -> Int[Tensor, " R"]:
        """Return the patches of most merit in each pseudo-bag, and of least if they are wanted."""
        k = min(self.each, int(members.sum(dim=-1).min()))
        chosen = torch.where(members, merit, -torch.inf).topk(k).indices
        if self.distil == "maxmins":
            least = torch.where(members, merit, torch.inf).topk(k, largest=False).indices
            chosen = torch.cat([chosen, least])
        return torch.unique(chosen)  # in a small pseudo-bag, one patch may be both

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        # The mean log-probability of the pseudo-bags is minus their mean cross-entropy.
        losses = F.nll_loss(output.aux["tier_one"], labels, reduction="none")
        if self.class_weights is not None:
            losses = losses * self.class_weights[labels]
        return {"bag": self.bag_loss(output.logits, labels), "tier_one": losses.mean()}
