"""The kinds of maps: their names, what they say of a patch, and how they are computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from caprmil.explain.attribution import (
    Directions,
    Features,
    Terms,
    integrated_gradients,
    sampled_influence,
)
from caprmil.models import MILModel
from caprmil.models.base import Cells
from caprmil.targets import Contrast, Target


@dataclass(frozen=True, kw_only=True)
class MapKind:
    """A kind of map."""

    name: str
    title: str  # {} is what the map is for, e.g. a class
    meaning: str  # of the value of a patch; {} is the total, e.g. the log-odds of a class
    signed: bool = True  # whether values below zero are against it

    @property
    def key(self) -> str:
        return self.name.replace(" ", "-")

    def title_of(self, contrast: Contrast) -> str:
        return self.title.format(contrast.name)

    def meaning_of(self, contrast: Contrast) -> str:
        return self.meaning.format(contrast.total)


SAMPLED = MapKind(
    name="sampled influence",
    title="Influence on {}",
    meaning="how much the {} rises if the patch is added to a small random sample of the slide, on "
    "a logarithmic scale",
)
INFLUENCE = MapKind(
    name="influence",
    title="Influence on {} within the slide",
    meaning="how fast the {} falls if the patch counts less in the sums over the slide",
)
GRADIENTS = MapKind(
    name="integrated gradients",
    title="Integrated gradients for {}",
    meaning="an estimate of what the patch adds to the {}, compared with the mean patch",
)
EVIDENCE = MapKind(
    name="evidence",
    title="Evidence for {}",
    meaning="what the patch contributes to the {}, after it has received the context of all others",
)
ATTENTION = MapKind(
    name="attention",
    title="Attention",
    meaning="the weight of the patch in the pooled representation",
    signed=False,
)
CLASS_ATTENTION = MapKind(
    name="class attention",
    title="Attention for {}",
    meaning="the weight of the patch in the pooled representation of this class",
    signed=False,
)
SCORES = MapKind(
    name="patch scores",
    title="Patch score for {}",
    meaning="the score of the patch alone",
    signed=False,
)
INPUT_GRADIENTS = MapKind(
    name="gradients",
    title="Gradient times input for {}",
    meaning="the gradient of the {} times the features of the patch",
)

KINDS: Mapping[str, MapKind] = {
    kind.name: kind
    for kind in (
        SAMPLED,
        INFLUENCE,
        GRADIENTS,
        EVIDENCE,
        ATTENTION,
        CLASS_ATTENTION,
        SCORES,
        INPUT_GRADIENTS,
    )
}
"""Every kind of map by name. To add one, describe it here and compute it below."""

COMPUTED: Mapping[str, Callable[[MILModel, Features, Cells | None, Directions], Terms]] = {
    SAMPLED.name: sampled_influence,
    INFLUENCE.name: lambda model, features, grid, directions: model.eval().influence(
        features, grid, directions=directions
    ),
    GRADIENTS.name: lambda model, features, grid, directions: (
        integrated_gradients(model, features, grid, directions).terms
    ),
}
"""The maps that are computed only if they are wanted, for linear functions of the outputs."""


def of_contrasts(target: Target, outputs: int, compute: Callable[[Directions], Terms]) -> Terms:
    """Return a map for each contrast of a target. Of two opposite ones, one is computed."""
    directions = torch.stack([contrast.of(torch.eye(outputs)) for contrast in target.contrasts])
    if len(directions) == 2 and torch.equal(directions[0], -directions[1]):
        terms = compute(directions[1:])
        return torch.cat([-terms, terms], dim=1)
    return compute(directions)


def available(model: MILModel) -> tuple[str, ...]:
    """Return the names of the computed maps that a model can have, the usual first choice first."""
    return tuple(name for name in COMPUTED if model.weighs_patches or name == GRADIENTS.name)
