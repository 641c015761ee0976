"""Linear probes: directions of feature space in which the top patches of a class stand out.

A signal of few patches is lost in the mean of a slide, but not in its top patches. A probe is a
linear score of single patches, and the mean of its k highest scores has to separate one class from
the others. It has few parameters and sees all slides in every step, so that some random starts find
such a direction within a few steps. The best directions then replace rows of a model's first layer,
before training: the model is the same, and starts with units that respond to the rare patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from caprmil.features.batches import BagDataset, Cache, Sample
from caprmil.models import MILModel
from caprmil.models.base import CHUNK

STARTS = 8  # random probes per class
COLUMNS = 64  # probes of all classes together
STEPS = 30
LEARNING_RATE = 0.28  # of a probe's norm, whatever the number of features
CLIP = 1.5  # a patch further from its slide's mean than this, in units of a usual one, is pulled in
SIMILAR = 0.7  # cosine from which two directions count as one
SAMPLED = 100  # patches per slide that the scale of a unit is measured on

Probes = Float[Tensor, "E P"]


@dataclass(frozen=True)
class ProbedBag:
    """A bag whose patches are compared with the mean of their slide."""

    features: Float[Tensor, "N E"]  # in the stored precision
    centre: Float[Tensor, " E"]
    scale: Float[Tensor, " E"]  # of each feature, the same in all bags
    weights: Float[Tensor, " N"]  # below 1 for patches far from the mean

    @classmethod
    def of(cls, features: Float[Tensor, "N E"], scale: Float[Tensor, " E"]) -> "ProbedBag":
        centre = features.float().mean(dim=0)
        lengths = ((features.float() - centre) * scale).norm(dim=1).clamp(min=1e-12)
        weights = (CLIP * sqrt(len(centre)) / lengths).clamp(max=1)
        return cls(features, centre, scale, weights)

    def top_patches(self, probes: Probes, k: int) -> Float[Tensor, "P E"]:
        """Return the mean of the k patches that each probe scores highest."""
        directions = (probes * self.scale[:, None]).T
        scores = directions @ self.features.float().T - (directions @ self.centre)[:, None]
        rows = (scores * self.weights).topk(min(k, len(self.weights)), dim=1).indices
        patches = (self.features[rows].float() - self.centre) * self.scale
        return (patches * self.weights[rows].unsqueeze(-1)).mean(dim=1)


def fit_probes(
    bags: Sequence[ProbedBag], labels: Sequence[int], n_classes: int, *, k: int, seed: int
) -> tuple[Float[Tensor, "P E"], list[int]]:
    """Return directions of feature space and the class of each, the best first, none twice."""
    scale = bags[0].scale
    width = len(scale)
    starts = max(1, min(STARTS, COLUMNS // n_classes))
    classes = torch.arange(n_classes).repeat_interleave(starts)
    truth = (torch.tensor(labels)[:, None] == classes).float()  # B P
    # Both sides of a probe count alike, however rare its class is.
    weights = truth / truth.sum(dim=0).clamp(min=1)
    weights = weights + (1 - truth) / (1 - truth).sum(dim=0).clamp(min=1)

    random = torch.Generator().manual_seed(seed)
    probes = torch.randn(width, len(classes), generator=random) / sqrt(width)
    probes.requires_grad_(True)
    bias = torch.zeros(len(classes), requires_grad=True)
    rate = LEARNING_RATE / sqrt(width)
    optimizer = torch.optim.AdamW([probes, bias], lr=rate, weight_decay=1e-3)
    losses = torch.zeros(len(classes))
    for step in range(STEPS):
        with torch.no_grad():
            top = torch.stack([bag.top_patches(probes, k) for bag in bags])  # B P E
        with torch.enable_grad():
            scores = torch.einsum("bpe,ep->bp", top, probes)
            if step == 0:
                bias.data = -scores.detach().mean(dim=0)
            terms = F.binary_cross_entropy_with_logits(scores + bias, truth, reduction="none")
            losses = (terms * weights).sum(dim=0) / 2
            optimizer.zero_grad()
            torch.autograd.backward(losses.sum())
        optimizer.step()
    order = losses.detach().argsort()
    directions = F.normalize((probes.detach() * scale[:, None]).T[order], dim=1)
    own = distinct(directions)
    return directions[own], classes[order][own].tolist()


def distinct(directions: Float[Tensor, "P E"]) -> list[int]:
    """Return the rows that are not similar to an earlier one."""
    kept: list[int] = []
    for row, direction in enumerate(directions):
        if not kept or float((directions[kept] @ direction).max()) < SIMILAR:
            kept.append(row)
    return kept


@torch.no_grad()
def init_from_probes(
    model: MILModel,
    train: Sequence[Sample],
    *,
    count: int,
    k: int,
    seed: int,
    cache_gb: float,
) -> None:
    """Start units of the first layer, and what gathers them, from the best probes.

    Bags are drawn in random order until the memory for bags is used; probes are fitted on these.
    """
    read: list[Tensor] = []
    labels: list[int] = []
    dataset, free = BagDataset(train, Cache(0)), cache_gb * 1e9
    for number in np.random.default_rng([seed, 0]).permutation(len(train)):
        sample, bag = dataset[int(number)]
        free -= bag.features.nbytes
        if read and free < 0:
            break
        read.append(torch.from_numpy(bag.features))
        labels.append(int(sample.label))
    spread = torch.stack([each.float().var(dim=0, correction=0) for each in read]).mean(dim=0)
    scale = torch.where(spread > 0, spread.clamp(min=1e-24).rsqrt(), 0)
    bags = [ProbedBag.of(each, scale) for each in read]
    directions, classes = fit_probes(bags, labels, model.n_outputs, k=k, seed=seed)
    directions, classes = directions[:count], classes[:count]
    units = list(model.probe_units)[: len(classes)]
    set_units(cast(nn.Linear, model.input_layer), units, directions, bags)
    training = model.training
    model.eval()
    tops = torch.stack([top_values(model, bag, units, k) for bag in bags])  # B P
    model.train(training)
    own = torch.tensor(labels)[:, None] == torch.tensor(classes)
    thresholds = (mean_where(tops, own) + mean_where(tops, ~own)) / 2
    model.gather_units(units, thresholds)


def set_units(
    layer: nn.Linear,
    units: list[int],
    directions: Float[Tensor, "P E"],
    bags: Sequence[ProbedBag],
) -> None:
    """Give units of a layer new directions, with the mean 0 and the spread of the others."""
    some = [bag.features[:: max(1, len(bag.features) // SAMPLED)].float() for bag in bags]
    patches = torch.cat(some)
    usual = F.linear(patches, layer.weight.float()).std(dim=0).mean()
    along = F.linear(patches, directions)
    gain = usual / along.std(dim=0).clamp(min=1e-12)
    layer.weight[units] = (directions * gain[:, None]).to(layer.weight.dtype)
    layer.bias[units] = (-along.mean(dim=0) * gain).to(layer.weight.dtype)


def top_values(model: MILModel, bag: ProbedBag, units: list[int], k: int) -> Float[Tensor, " P"]:
    """Return the mean of the k highest values of each unit in a bag."""
    dtype = next(model.parameters()).dtype
    parts = [
        model.unit_values(part.to(dtype))[:, units] for part in torch.split(bag.features, CHUNK)
    ]
    values = torch.cat(parts).float()
    return values.topk(min(k, len(values)), dim=0).values.mean(dim=0)


def mean_where(values: Float[Tensor, "B P"], chosen: Bool[Tensor, "B P"]) -> Float[Tensor, " P"]:
    return (values * chosen).sum(dim=0) / chosen.sum(dim=0).clamp(min=1)
