"""Faithfulness: how the prediction changes when the patches go that a map ranks high or low.

Deletion curves, also called patch flipping (Samek et al.: "Evaluating the Visualization of What a
Deep Neural Network Has Learned", TNNLS 2017). Patches are removed from the bag, not painted over:
a model of bags takes fewer patches, and sees no patch that does not occur on slides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from caprmil.explain.attribution import gradient_times_input
from caprmil.explain.explanation import Explanation
from caprmil.explain.map_kinds import (
    COMPUTED,
    GRADIENTS,
    INPUT_GRADIENTS,
    available,
    of_contrasts,
)
from caprmil.features.bags import Bag
from caprmil.figures import DeletionCurve, DeletionPanel, deletion_curves
from caprmil.io.progress import Step
from caprmil.io.tables import markdown_table
from caprmil.models import MILModel
from caprmil.models.base import Cells
from caprmil.runs.inference import largest_feature, no_number
from caprmil.targets import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (*(0.0, 0.01, 0.02, 0.05), *np.arange(0.1, 0.95, 0.1).round(1).tolist(), 0.95, 0.98, 0.99)
"""Dense at both ends: where few patches carry a prediction, it changes as the first or last go."""
MANY = 20  # contrasts, above which only maps of the wanted one are computed
PAIRS = 3  # of random orders and their reverses, for maps that are constant on most patches
RANDOM = "random"

Values = NDArray[np.floating[Any]]
Numbers = NDArray[np.float64]
Rows = NDArray[np.int64]


class AnswerCurve(NamedTuple):
    """A prediction as patches are removed: one number of the answer, and its contrast of outputs.

    For a classification these are the probability of a class, and its lead over the others.
    """

    answer: Numbers
    contrast: Numbers


@dataclass(frozen=True, eq=False, kw_only=True)
class DeletionCurves:
    """A prediction as patches are removed in the order of one map, the highest or lowest first."""

    removed: Numbers  # share of the patches, from 0
    most: AnswerCurve  # the most relevant first
    least: AnswerCurve

    @property
    def area(self) -> float:
        """The area between the curves of the answer: 0 by chance, higher is more faithful.

        NaN for a bag of one patch.
        """
        return area_between(self.removed, self.most.answer, self.least.answer)

    @property
    def contrast_area(self) -> float:
        """The area between the curves of the contrast, which does not saturate."""
        return area_between(self.removed, self.most.contrast, self.least.contrast)

    def at(self, shares: Sequence[float]) -> "DeletionCurves":
        """Return the curves at other shares, by linear interpolation. The last value is kept."""

        def interpolate(curve: AnswerCurve) -> AnswerCurve:
            return AnswerCurve(*(np.interp(shares, self.removed, values) for values in curve))

        removed = np.array(shares, dtype=np.float64)
        most, least = interpolate(self.most), interpolate(self.least)
        return DeletionCurves(removed=removed, most=most, least=least)

    def as_dict(self, target: Target) -> dict[str, Any]:
        """Return the curves for JSON, under the target's names."""
        curves = {"most_first": self.most, "least_first": self.least}
        kinds = (target.number_name, "contrast")
        return {
            "area": self.area,
            "contrast_area": self.contrast_area,
            "removed": self.removed.tolist(),
            **{
                f"{name}_{kind}": values.tolist()
                for name, curve in curves.items()
                for kind, values in zip(kinds, curve, strict=True)
            },
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class Faithfulness:
    """The deletion curves of every map of one slide, for one model and one contrast."""

    slide: str
    model: str
    fold: str
    target: Target
    followed: str  # the contrast, e.g. the class
    method: str  # of the evidence
    patches: int
    curves: Mapping[str, DeletionCurves]  # by the name of the map, random last

    def as_dict(self) -> dict[str, Any]:
        names = ("slide", "model", "fold", "followed", "method", "patches")
        maps = {name: curves.as_dict(self.target) for name, curves in self.curves.items()}
        return {**{name: getattr(self, name) for name in names}, "maps": maps}

    def as_markdown(self) -> str:
        """Return a table of the areas, the most faithful map first."""
        ranked = sorted(self.curves.items(), key=lambda item: -np.nan_to_num(item[1].area))
        rows = [[name, f"{c.area:.3f}", f"{c.contrast_area:.3f}"] for name, c in ranked]
        note = f"Area between the curves of {self.followed}, least relevant first minus most."
        header = ["map", self.target.answer_name, f"{self.target.output_name} contrast"]
        columns = 3 if self.target.saturates else 2
        return markdown_table(header[:columns], [row[:columns] for row in rows], [note])

    def panel(self) -> DeletionPanel:
        """Return the curves of the answer, for a figure of several slides."""
        return panels(self.slide, self.target, self.followed, self.curves)[0]

    def draw(self) -> "Figure":
        """Draw the curves of the answer, and of the contrast if the answer saturates."""
        return deletion_curves(panels(self.slide, self.target, self.followed, self.curves))


def faithfulness(
    model: MILModel,
    bag: Bag,
    explanation: Explanation,
    *,
    of: int | None = None,
    maps: Mapping[str, Values] | None = None,
    shares: Sequence[float] = SHARES,
    pairs: int = PAIRS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
) -> Faithfulness:
    """Return how a prediction changes as patches are removed by each map, and at random.

    `of` is the contrast, e.g. the class, by default the predicted one. `maps` hold one number per
    patch, higher for more relevant; the default is `relevance_maps`. At least one patch of the bag
    remains.

    Patches of equal value are removed in a random order. Where most are equal, as in the attention
    of a mean, the curves are the mean over several orders and their reverses, so that the area of a
    random map is exactly 0.
    """
    if len(bag.features) != len(explanation):
        raise ValueError(f"{len(bag.features)=} patches, but {len(explanation)=}.")
    of = explanation.predicted if of is None else of
    model = model.eval().to(device)
    features = torch.from_numpy(bag.features)[None].to(device)
    cells = bag.grid()
    grid = None if cells is None else torch.from_numpy(cells).to(device)
    if maps is None:
        maps = relevance_maps(model, features, grid, explanation, of=of)
    n = len(explanation)
    if not all(np.isfinite(values).all() for values in maps.values()):
        raise no_number("map", explanation.slide or "The bag", largest_feature(bag))
    maps = {**maps, RANDOM: np.zeros(n)}
    counts = removal_counts(n, shares)
    slide_seed = (seed, crc32(explanation.slide.encode()))  # other orders for each slide
    orders = {
        name: removal_orders(values, pairs=pairs, seed=slide_seed) for name, values in maps.items()
    }
    informative = {name: found for name, found in orders.items() if not is_symmetric(found)}
    total_orders = len(orders[RANDOM]) + 2 * sum(map(len, informative.values()))
    total = 1 + total_orders * (len(counts) - 1)
    done = 0

    def predict(rows: Rows | None) -> tuple[float, float]:
        nonlocal done
        done += 1
        found = predict_rows(model, features, grid, rows, target=explanation.target, of=of)
        if progress:
            progress(done, total)
        return found

    complete = predict(None)
    random = _deletion_curves(orders[RANDOM], counts, complete, predict)
    return Faithfulness(
        slide=explanation.slide,
        model=explanation.model,
        fold=explanation.fold,
        target=explanation.target,
        followed=explanation.names[of],
        method=explanation.method,
        patches=n,
        curves={
            name: _deletion_curves(orders[name], counts, complete, predict)
            if name in informative
            else random
            for name in maps
        },
    )


def panels(
    title: str, target: Target, followed: str, curves: Mapping[str, DeletionCurves]
) -> list[DeletionPanel]:
    """Return the panels of a figure: the answer, and the contrast if the answer saturates."""
    answers = {
        name: DeletionCurve(c.removed, c.most.answer, c.least.answer, c.area)
        for name, c in curves.items()
    }
    axis = target.answer_axis.format(followed)
    found = [DeletionPanel(title, axis, answers, target.answer_bounds)]
    if target.saturates:
        contrasts = {
            name: DeletionCurve(c.removed, c.most.contrast, c.least.contrast, c.contrast_area)
            for name, c in curves.items()
        }
        axis = f"{target.output_name.capitalize()} contrast of {followed}"
        found.append(DeletionPanel(title, axis, contrasts))
    return found


def relevance_maps(
    model: MILModel,
    features: Float[Tensor, "1 N E"],
    grid: Cells | None,
    explanation: Explanation,
    *,
    of: int,
) -> dict[str, Values]:
    """Return every map of the relevance of patches for a contrast, by name."""
    contrast = explanation.target.contrasts[of]
    maps = {name: explanation.values(name, of) for name in explanation.map_names}
    for name in available(model):
        if name not in maps and not (name == GRADIENTS.name and not explanation.exact):
            compute = partial(COMPUTED[name], model, features, grid)
            if len(explanation.target.contrasts) > MANY:
                terms = compute(contrast.of(torch.eye(model.n_outputs))[None])[:, 0]
            else:
                terms = of_contrasts(explanation.target, model.n_outputs, compute)[:, of]
            maps[name] = terms.float().cpu().numpy()
    gradients = gradient_times_input(model, features, grid, contrast=contrast)
    return {**maps, INPUT_GRADIENTS.name: gradients.float().cpu().numpy()}


def removal_counts(n: int, shares: Sequence[float] = SHARES) -> Rows:
    """Return how many of n patches are removed at each step. At least one patch remains."""
    if not shares or min(shares) < 0 or max(shares) > 1:
        raise ValueError(f"Shares are between 0 and 1: {shares=}.")
    counts = np.rint(np.array(shares) * n).astype(np.int64)
    return np.unique(np.append(np.minimum(counts, n - 1), 0))


def removal_orders(
    values: Values, *, pairs: int = PAIRS, seed: int | Sequence[int] = 0
) -> list[Rows]:
    """Return rows from the highest value to the lowest, ties at random.

    If most values are equal, several orders are returned, each followed by its reverse. Ties are
    broken by the seed alone, so a constant map has the orders of the random one.
    """
    if not np.isfinite(values).all():
        raise ValueError("A map has finite numbers only: there is a NaN or an infinity in it.")
    rng = np.random.default_rng(seed)
    if 2 * len(np.unique(values)) > len(values):
        ties = [rng.permutation(len(values))]
    else:
        drawn = [rng.permutation(len(values)) for _ in range(pairs)]
        ties = [each for one in drawn for each in (one, -one)]
    return [np.lexsort((each, -values)) for each in ties]


def is_symmetric(orders: Sequence[Rows]) -> bool:
    """Return whether each order is followed by its reverse: most and least relevant are alike."""
    return len(orders) > 1 and np.array_equal(orders[0], orders[1][::-1])


def _deletion_curves(
    orders: Sequence[Rows],
    counts: Rows,
    complete: tuple[float, float],
    predict: Callable[[Rows], tuple[float, float]],
) -> DeletionCurves:
    """Return the mean curves over the orders of a map. `predict` takes the remaining rows."""

    def curve(orders: Sequence[Rows]) -> AnswerCurve:
        each = [
            [complete, *(predict(np.sort(order[count:])) for count in counts[1:])]
            for order in orders
        ]
        return AnswerCurve(*np.mean(each, axis=0).T)

    most = curve(orders)
    least = most if is_symmetric(orders) else curve([order[::-1] for order in orders])
    return DeletionCurves(removed=counts / len(orders[0]), most=most, least=least)


@torch.no_grad()
def predict_rows(
    model: MILModel,
    features: Float[Tensor, "1 N E"],
    grid: Cells | None,
    rows: Rows | None,
    *,
    target: Target,
    of: int,
) -> tuple[float, float]:
    """Return the answer and the contrast for a bag of these rows; None stands for all."""
    if rows is not None:
        kept = torch.from_numpy(rows).to(features.device)
        features, grid = features[:, kept], None if grid is None else grid[kept]
    logits = model(features, grid=None if grid is None else grid[None]).logits[0].cpu().double()
    return float(target.followed(target.answer(logits))[of]), float(target.contrasts[of].of(logits))


def area_between(removed: Numbers, most: Numbers, least: Numbers) -> float:
    """Return the area between two curves by the trapezoidal rule, positive if `least` is higher."""
    if len(removed) < 2:
        return float("nan")
    difference = least - most
    return float((np.diff(removed) * (difference[1:] + difference[:-1]) / 2).sum())
