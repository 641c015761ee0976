"""Checks of maps that can fail: what a map claims, measured on one slide and one trained model.

Other weights must give another map: a map that hardly depends on the weights cannot explain the
model (Adebayo et al.: "Sanity Checks for Saliency Maps", NeurIPS 2018).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caprmil.explain.attribution import Features
from caprmil.explain.map_kinds import (
    ATTENTION,
    CLASS_ATTENTION,
    COMPUTED,
    EVIDENCE,
    GRADIENTS,
    INFLUENCE,
    SCORES,
    available,
)
from caprmil.explain.map_ranking import map_ranking, validation_slides
from caprmil.features.bag_files import BagFiles, paths_of
from caprmil.features.bags import Bag
from caprmil.models import MILModel
from caprmil.models.base import Cells
from caprmil.runs.facts import MAPS
from caprmil.runs.inference import TrainedModel
from caprmil.runs.run import Run
from caprmil.targets import Contrast

DRAWS = 5  # models with shuffled weights
REMOVED = 64  # patches that are left out, one at a time
PATCHES = 500  # of a slide; a larger one is sampled
EXTREME = 8  # patches of the most and of the least effect are compared: an eighth
CONSTANT = 1e-6  # a map whose values differ by less, relative to their size, is constant

Values: TypeAlias = NDArray[np.float64]
Map: TypeAlias = Callable[[MILModel, Features, Cells | None], Values]
"""A map: one number per patch of a bag, for one contrast."""


@dataclass(frozen=True, kw_only=True)
class MapFinding:
    """The result of one check of one map."""

    map: str
    check: str
    measured: float | None  # None where the model makes no such claim
    bound: float

    @property
    def holds(self) -> bool:
        return self.measured is None or self.measured <= self.bound


@dataclass(frozen=True, eq=False)
class MapOnBag:
    """A map of a model on one bag."""

    compute: Map
    model: MILModel
    features: Features
    grid: Cells | None
    contrast: Contrast

    @cached_property
    def values(self) -> Values:
        return self.compute(self.model, self.features, self.grid)

    def total(self, rows: Tensor | None = None, features: Features | None = None) -> float:
        """Return the contrast of the outputs for some rows of the bag, or for other features."""
        own = self.features if features is None else features
        cells = self.grid
        if rows is not None:
            own, cells = own[:, rows], None if cells is None else cells[rows]
        with torch.no_grad():
            output = self.model(own, grid=None if cells is None else cells[None])
        return float(self.contrast.of(output.logits[0].double()))

    @cached_property
    def depends_on_shares(self) -> bool:
        """Whether the prediction stays if every patch occurs twice.

        Not so for a model that reads a sequence, draws at random or adds up without a mean.
        """
        rows = torch.arange(self.features.shape[1]).repeat(2)
        change = abs(self.total(rows) - self.total())
        return change <= 1e-3 * float(np.abs(self.values).sum())

    @cached_property
    def copies_are_counts(self) -> bool:
        """Whether a patch that occurs twice is one that counts twice: not so with pseudo-bags."""
        n = self.features.shape[1]
        with torch.no_grad():
            counts = torch.where(torch.arange(n) == 0, 2.0, 1.0)
            counted = self.model.forward_weighted(self.features, counts, self.grid).logits[0]
        repeated = self.total(torch.arange(n + 1) % n)
        shift = abs(repeated - float(self.contrast.of(counted.double())))
        return shift <= max(0.01 * float(np.abs(self.values).mean()), 1e-5)


def other_weights(found: MapOnBag) -> float:
    """Return the rank correlation with the map of a model whose weights are shuffled.

    It is the median size over several shuffles; 1 for a constant map.
    """
    if is_constant(found.values):
        return 1.0
    sizes = []
    for seed in range(DRAWS):
        other = found.compute(shuffled(found.model, seed), found.features, found.grid)
        sizes.append(abs(rank_correlation(found.values, other)))
    return float(np.median(sizes))


def shared_by_copies(found: MapOnBag) -> float | None:
    """Return by how much a patch and its copy miss half of the influence, relative to the largest.

    Every patch of the bag occurs twice.
    """
    if not (found.depends_on_shares and found.copies_are_counts):
        return None
    n = found.features.shape[1]
    rows = torch.arange(n).repeat(2)
    cells = None if found.grid is None else found.grid[rows]
    copies = found.compute(found.model, found.features[:, rows], cells).reshape(2, n)
    return float(2 * np.abs(copies - found.values / 2).max() / _size(found.values))


def without_effect(found: MapOnBag) -> float | None:
    """Return the mean size of patches that make no difference, relative to those that do.

    Patches are left out one at a time. The eighth with the least effect on the contrast is compared
    with the eighth with the most.
    """
    n = found.features.shape[1]
    if n < EXTREME:
        return None
    chosen = np.random.default_rng(0).permutation(n)[:REMOVED]
    whole, everything = found.total(), torch.arange(n)
    effects = [abs(whole - found.total(everything[everything != row])) for row in chosen.tolist()]
    sizes = np.abs(found.values[chosen])[np.argsort(effects, kind="stable")]
    few = max(len(chosen) // EXTREME, 1)
    return float(sizes[:few].mean() / max(float(sizes[-few:].mean()), 1e-30))


def sum_of_influence(found: MapOnBag) -> float | None:
    """Return the sum of a map, relative to the sum of its sizes: influences sum to zero."""
    if not found.depends_on_shares:
        return None
    return float(abs(found.values.sum()) / max(float(np.abs(found.values).sum()), 1e-30))


def gap_of_gradients(found: MapOnBag) -> float:
    """Return by how much a map misses the change from a bag of mean patches, relative to it."""
    mean = found.features.mean(dim=1, keepdim=True).expand_as(found.features)
    change = found.total() - found.total(features=mean)
    return float(abs(found.values.sum() - change) / max(abs(change), 1e-6))


def gap_of_evidence(found: MapOnBag) -> float:
    """Return by how much evidence and rest miss the output, relative to it."""
    evidence = found.model.evidence(found.features, found.grid)
    assert evidence is not None, "only exact evidence is checked"
    with torch.no_grad():
        output = found.model(found.features, grid=None if found.grid is None else found.grid[None])
    outputs = output.aux.get("mean_logits", output.logits)[0]
    rest, total = (
        float(found.contrast.of(part.detach().double())) for part in (evidence.rest, outputs)
    )
    return abs(float(found.values.sum()) + rest - total) / max(abs(total), 1.0)


@dataclass(frozen=True, kw_only=True)
class MapCheck:
    """A check: what a map claims, how that is measured, and how much is allowed."""

    name: str
    bound: float
    measure: Callable[[MapOnBag], float | None]


# Bounds: small models of this package have correlations up to 0.4, and a map that does not depend
# on the weights has 1. Integrated gradients allow an error of 1 %.
OTHER_WEIGHTS = MapCheck(
    name="rank correlation with the map of shuffled weights", bound=0.7, measure=other_weights
)
COPIES = MapCheck(
    name="copies of a patch share its influence: deviation", bound=0.02, measure=shared_by_copies
)
WITHOUT_EFFECT = MapCheck(
    name="patches without effect, relative to those with the most",
    bound=0.25,
    measure=without_effect,
)
SUM_TO_ZERO = MapCheck(
    name="influences sum to zero: deviation", bound=1e-3, measure=sum_of_influence
)
COMPLETE_GRADIENTS = MapCheck(
    name="terms sum to the change of the output: deviation", bound=0.01, measure=gap_of_gradients
)
COMPLETE_EVIDENCE = MapCheck(
    name="evidence and rest sum to the output: deviation", bound=1e-3, measure=gap_of_evidence
)

CLAIMS: dict[str, tuple[MapCheck, ...]] = {
    INFLUENCE.name: (OTHER_WEIGHTS, COPIES, WITHOUT_EFFECT, SUM_TO_ZERO),
    GRADIENTS.name: (OTHER_WEIGHTS, COMPLETE_GRADIENTS),
    EVIDENCE.name: (OTHER_WEIGHTS, COMPLETE_EVIDENCE),
}
"""The checks of each map. Every other map must depend on the weights."""


def check_maps(trained: TrainedModel, bag: Bag, *, first: str | None = None) -> list[MapFinding]:
    """Measure what the maps of a model claim, on one bag, for its predicted contrast.

    These are the maps that are computed on demand, exact evidence, and the first map of a run.
    """
    model = trained.model.cpu().eval()
    bag = sampled(bag)
    cells = bag.grid()
    features = torch.from_numpy(bag.features)[None].to(next(model.parameters()).dtype)
    grid = None if cells is None else torch.from_numpy(cells)
    with torch.no_grad():
        logits = model(features, grid=None if grid is None else grid[None]).logits[0]
    of = trained.target.contrast_of(trained.answer(logits))
    names = list(available(model))
    if model.evidence(features, grid) is not None:
        names.append(EVIDENCE.name)
    if first is not None and first not in (*names, EVIDENCE.name):
        names.append(first)
    contrast = trained.target.contrasts[of]
    return [
        finding
        for name in names
        for finding in check_map(
            name,
            MapOnBag(map_function(name, contrast, of), model, features, grid, contrast),
            CLAIMS.get(name, (OTHER_WEIGHTS,)),
        )
    ]


def check_map(name: str, found: MapOnBag, checks: Sequence[MapCheck]) -> list[MapFinding]:
    """Return what the checks of one map found."""
    measured = [(check, check.measure(found)) for check in checks]
    return [
        MapFinding(
            map=name,
            check=check.name,
            measured=np.inf if value is not None and np.isnan(value) else value,
            bound=check.bound,
        )
        for check, value in measured
    ]


def slide_to_check(run: Run, bag: BagFiles | None = None) -> tuple[str, str, BagFiles]:
    """Return fold, name and bag of a validation slide of a run, or of a bag that the user names."""
    if bag is None:
        for fold, slide in validation_slides(run):
            if (files := run.bags[slide]).exists():
                return fold, f"{slide}, a validation {run.unit}", files
        bag = run.bag_paths()[0]
    return run.trained_folds()[0].name, paths_of(bag)[0].name, bag


def stored_first(run: Run) -> str | None:
    """Return the first map of a run, if its maps have been measured."""
    ranking = map_ranking(run) if (run.folder / MAPS).exists() else None
    return None if ranking is None else ranking.first


def map_function(name: str, contrast: Contrast, of: int) -> Map:
    """Return how a map is computed for any model and bag."""

    def values(model: MILModel, features: Features, grid: Cells | None) -> Values:
        if name in COMPUTED:
            directions = contrast.of(torch.eye(model.n_outputs))[None]
            found = COMPUTED[name](model, features, grid, directions)[:, 0]
        elif name == EVIDENCE.name:
            evidence = model.evidence(features, grid)
            if evidence is None:
                raise ValueError(f"{model.title} has no exact evidence.")
            found = contrast.of(evidence.terms)
        else:
            with torch.no_grad():
                output = model(features, grid=None if grid is None else grid[None])
            parts = {
                ATTENTION.name: output.attention[0],
                CLASS_ATTENTION.name: None
                if output.class_attention is None
                else output.class_attention[0, of],
                SCORES.name: None if output.scores is None else output.scores[0, :, of],
            }
            found = parts[name]
        return np.asarray(found.detach().double().numpy())

    return values


def shuffled(model: MILModel, seed: int) -> MILModel:
    """Return a model in which the numbers of each weight tensor are shuffled.

    The layers keep the distribution of their weights, so that activations stay in their range.
    """
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in other.parameters():
            order = torch.randperm(weights.numel(), generator=generator)
            weights.copy_(weights.flatten()[order].view_as(weights))
    return other.eval()


def sampled(bag: Bag) -> Bag:
    """Return a bag of at most `PATCHES` random patches, in their order."""
    n = len(bag.features)
    if n <= PATCHES:
        return bag
    return bag.select(np.sort(np.random.default_rng(0).permutation(n)[:PATCHES]))


def rank_correlation(one: Values, other: Values) -> float:
    """Return Spearman's correlation; 0 if one of both is constant."""
    from scipy.stats import spearmanr

    if is_constant(one) or is_constant(other):
        return 0.0
    return float(spearmanr(one, other).statistic)


def is_constant(values: Values) -> bool:
    return bool(np.ptp(values) <= CONSTANT * _size(values))


def _size(values: Values) -> float:
    return max(float(np.abs(values).max()), 1e-30)
