"""Marked regions: adjacent patches of equal sign on a map, and what their joint removal changes.

A map has a number per patch. The effect of removing a region as a whole, after which the model
predicts again, is not the sum of these numbers: it is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from caprmil.explain.explanation import Explanation
from caprmil.explain.map_kinds import EVIDENCE
from caprmil.explain.removal import outputs_of
from caprmil.features.bags import Bag, Stream, grid_cells
from caprmil.io.progress import Step
from caprmil.models import MILModel
from caprmil.targets import Target

Rows = NDArray[np.int64]

CORE = 0.5  # the fewest patches that hold this share of the relevance are marked
GROW = 0.5  # neighbours are joined if they have this share of the weakest of them
LEAST = 0.02  # share of the relevance of a region; smaller ones are noise
MOST = 10  # regions of a sign
FEWEST = 3  # regions of a sign, if the slide is large
DRAWS = 10  # of as many random patches
BUDGET = 50_000  # patches in the forwards of one sign: a larger slide has fewer regions
RANDOM_BUDGET = 100_000  # patches in the forwards of all draws: a larger slide has fewer
NEIGHBOURS = ((1, 0), (0, 1), (1, 1), (1, -1))  # the other four are the same pairs


@dataclass(frozen=True, eq=False, kw_only=True)
class MarkedRegion:
    """Adjacent patches that a map marks with the same sign."""

    sign: int  # 1: for the contrast, -1: against it
    rows: Rows  # in the order of the bag
    share: float  # of the relevance of all patches of this sign


@dataclass(frozen=True, eq=False, kw_only=True)
class JointRemoval:
    """What a model answers without some patches."""

    rows: Rows
    answer: NDArray[np.float64]  # a number for each contrast
    total: float  # of the contrast; it also changes where a probability is close to 1
    random: NDArray[np.float64]  # the same without as many random patches, the mean over draws


@dataclass(frozen=True, eq=False, kw_only=True)
class MeasuredRegion(JointRemoval):
    """A region, and what a model answers without it."""

    number: int  # from 1, in the order of the effect: those for the contrast, then those against
    sign: int
    share: float


@dataclass(frozen=True, eq=False, kw_only=True)
class RegionEffects:
    """The regions of a slide in the order of their effect, and the answer with all patches."""

    map: str
    of: int  # the contrast
    answer: NDArray[np.float64]  # a number for each contrast
    total: float
    regions: tuple[MeasuredRegion, ...] = ()
    together: dict[int, JointRemoval] = field(default_factory=dict)
    """All regions of a sign removed at once, for a sign with several: they can replace each
    other."""
    reason: str = ""  # why there are none

    def of_sign(self, sign: int) -> tuple[MeasuredRegion, ...]:
        return tuple(region for region in self.regions if region.sign == sign)

    def effect(self, removal: JointRemoval) -> float:
        """Return how much the answer falls without these patches."""
        return float(self.answer[self.of] - removal.answer[self.of])

    def within(self, rows: Rows) -> "RegionEffects":
        """Return the regions in some rows, e.g. those of one slide, counted from 0 there."""
        first = {int(row): at for at, row in enumerate(rows)}
        own = tuple(
            replace(region, rows=np.array([first[int(row)] for row in region.rows]))
            for region in self.regions
            if int(region.rows[0]) in first
        )
        return replace(self, regions=own, together={})

    def numbers(self, n: int) -> NDArray[np.int64]:
        """Return the number of the region of each of n patches; 0: in none."""
        found = np.zeros(n, dtype=np.int64)
        for region in self.regions:
            found[region.rows] = region.number
        return found


def find_regions(explanation: Explanation) -> tuple[MarkedRegion, ...]:
    """Return the regions that the first map with a sign marks most, the strongest first.

    Of each sign, the fewest patches that hold half of the relevance are marked. Neighbours at least
    half as strong as the weakest of them are joined, so that a weaker patch in their midst does
    not split a region, and an even region is not cut off where the half is reached.
    """
    cells = grid_cells(explanation.coords, explanation.info, explanation.slide_of)
    if cells is None:
        return ()
    values = relevance_of(explanation)
    most = int(np.clip(BUDGET // len(values), FEWEST, MOST))
    return tuple(
        MarkedRegion(sign=sign, rows=rows, share=share)
        for sign in (1, -1)
        for rows, share in _of_one_sign((sign * values).clip(min=0), cells)[:most]
    )


def why_no_regions(explanation: Explanation) -> str:
    """Return why no region was found, in a sentence."""
    if explanation.coords is None:
        return "There are no regions: the bag has no coordinates."
    if grid_cells(explanation.coords, explanation.info, explanation.slide_of) is None:
        return "There are no regions: the distance of neighbouring patches is not known."
    if not relevance_of(explanation).any():
        return "There are no regions: all patches have the same value on the map."
    return (f"There are no regions: no adjacent patches hold {LEAST:.0%} of the map.").replace(
        "%", " %"
    )


def relevance_of(explanation: Explanation) -> NDArray[np.float64]:
    """Return the map that regions are found on: values above zero are for the contrast.

    Evidence is taken relative to the slide's mean: a patch with less than the mean is replaced by
    better ones if it is removed, even if it is positive.
    """
    name = explanation.first_signed
    values = explanation.values(name, explanation.predicted).astype(np.float64)
    values = np.where(np.isfinite(values), values, 0.0)
    return values - values.mean() if name == EVIDENCE.name else values


def _of_one_sign(
    relevance: NDArray[np.float64], cells: NDArray[np.int64]
) -> list[tuple[Rows, float]]:
    """Return rows and share of each region, the largest share first."""
    whole = relevance.sum()
    if not whole > 0:
        return []
    order = np.argsort(-relevance, kind="stable")
    held = np.cumsum(relevance[order])
    core = order[: np.searchsorted(held, CORE * whole) + 1]
    wide = np.flatnonzero((relevance > 0) & (relevance >= GROW * relevance[core[-1]]))
    labels = connected(cells[wide])
    shares = np.bincount(labels, weights=relevance[wide]) / whole
    has_core = np.bincount(labels, weights=np.isin(wide, core)) > 0
    kept = np.flatnonzero(has_core & (shares >= LEAST))
    found = [(wide[labels == label], float(shares[label])) for label in kept]
    found = [region for region in found if len(region[0]) < len(relevance)]  # one patch must stay
    return sorted(found, key=lambda region: -region[1])


def connected(cells: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the component of each cell (column, row), with eight neighbours each.

    Two patches in one cell, as CLAM has them, are connected.
    """
    unique, owner = np.unique(cells, axis=0, return_inverse=True)
    first = unique.min(axis=0)
    wide = int(unique[:, 1].max() - first[1]) + 3  # rows, and one on each side that stays empty
    keys = (unique - first) @ np.array([wide, 1])  # in order, as `unique` is
    pairs = []
    for right, down in NEIGHBOURS:
        wanted = keys + right * wide + down
        at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        met = np.flatnonzero(keys[at] == wanted)
        pairs.append(np.stack([met, at[met]]))
    start, end = np.concatenate(pairs, axis=1)
    graph = coo_array((np.ones(len(start)), (start, end)), shape=(len(keys), len(keys)))
    labels: NDArray[np.int64] = connected_components(graph, directed=False)[1].astype(np.int64)
    return labels[owner.ravel()]


def measure_regions(
    model: MILModel,
    bag: Bag | Stream,
    regions: Sequence[MarkedRegion],
    *,
    target: Target,
    of: int,
    map_name: str,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
) -> RegionEffects:
    """Remove each region from the bag, predict again, and return the regions by their effect.

    Costs a forward for each region, one for all of a sign, and for each number of patches that is
    removed at random one to ten.
    """
    n, device = bag.info.n_patches, torch.device(device)
    model, rng = model.eval().to(device), np.random.default_rng(0)
    signs = {sign: [region for region in regions if region.sign == sign] for sign in (1, -1)}
    unions = {
        sign: np.sort(np.concatenate([region.rows for region in own]))
        for sign, own in signs.items()
        if len(own) > 1
    }
    unions = {sign: rows for sign, rows in unions.items() if len(rows) < n}
    sizes = {len(rows) for rows in (*(region.rows for region in regions), *unions.values())}
    draws = int(np.clip(RANDOM_BUDGET // (n * max(len(sizes), 1)), 1, DRAWS))
    forwards, done = 1 + len(regions) + len(unions) + draws * len(sizes), 0

    def without(rows: Rows) -> tuple[NDArray[np.float64], float]:
        nonlocal done
        kept = np.ones(n, dtype=np.bool_)
        kept[rows] = False
        outputs = outputs_of(model, bag, kept, device).cpu().double()
        done += 1
        if progress:
            progress(done, forwards)
        return target.followed(target.answer(outputs)).numpy(), float(
            target.contrasts[of].of(outputs)
        )

    answer, total = without(np.empty(0, dtype=np.int64))
    random = {
        size: np.mean([without(rng.permutation(n)[:size])[0] for _ in range(draws)], axis=0)
        for size in sorted(sizes)
    }
    measured = [(region, *without(region.rows)) for region in regions]
    # Those whose removal changes the contrast most in the direction of their sign come first.
    measured.sort(key=lambda found: (-found[0].sign, found[0].sign * found[2]))
    together = {sign: (rows, *without(rows)) for sign, rows in unions.items()}
    return RegionEffects(
        map=map_name,
        of=of,
        answer=answer,
        total=total,
        regions=tuple(
            MeasuredRegion(
                number=number,
                sign=region.sign,
                share=region.share,
                rows=region.rows,
                answer=own,
                total=own_total,
                random=random[len(region.rows)],
            )
            for number, (region, own, own_total) in enumerate(measured, 1)
        ),
        together={
            sign: JointRemoval(rows=rows, answer=own, total=own_total, random=random[len(rows)])
            for sign, (rows, own, own_total) in together.items()
        },
    )


def region_effects(
    model: MILModel,
    bag: Bag | Stream,
    explanation: Explanation,
    *,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
) -> RegionEffects:
    """Return the regions of an explanation, with the effect of removing each of them."""
    regions = find_regions(explanation)
    of, name = explanation.predicted, explanation.first_signed
    if not regions:
        return RegionEffects(
            map=name,
            of=of,
            answer=explanation.target.followed(explanation.answer),
            total=float(explanation.target.contrasts[of].of(explanation.logits.astype(np.float64))),
            reason=why_no_regions(explanation),
        )
    return measure_regions(
        model,
        bag,
        regions,
        target=explanation.target,
        of=of,
        map_name=name,
        device=device,
        progress=progress,
    )
