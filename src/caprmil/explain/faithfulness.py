"""Faithfulness: does the answer change when the patches go that a map calls relevant?

Patch flipping (Samek et al.: "Evaluating the Visualization of What a Deep Neural Network Has
Learned", TNNLS 2017), with patches taken out of the bag instead of painted over: a model of bags
can be asked of fewer patches, and none of them is one that no slide has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from caprmil.explain.attribution import gradient, lead_of
from caprmil.explain.explanation import Explanation
from caprmil.features.bags import Bag
from caprmil.figures import Flip, FlipPanel, flipping
from caprmil.io.progress import Step
from caprmil.io.tables import markdown
from caprmil.models import MILModel
from caprmil.models.base import Cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (*(0.0, 0.01, 0.02, 0.05), *np.arange(0.1, 0.95, 0.1).round(1).tolist(), 0.95, 0.98, 0.99)
"""Close at both ends: where few patches carry an answer, all happens as they go, first or last."""
PAIRS = 3  # of random orders, each with its mirror, of patches between which a map does not decide
RANDOM = "random"

Values = NDArray[np.floating[Any]]
Numbers = NDArray[np.float64]


class Track(NamedTuple):
    """A class as patches go: its probability, and its lead in logits over the mean of the rest."""

    probability: Numbers
    lead: Numbers


@dataclass(frozen=True, eq=False, kw_only=True)
class Curves:
    """What becomes of an answer as patches go by one map, the most relevant first or the least."""

    removed: Numbers  # share of the patches, from 0
    most: Track
    least: Track

    @property
    def area(self) -> float:
        """Area between the curves of probability: 0 by chance, higher is more faithful.

        NaN where nothing can be taken out.
        """
        return between(self.removed, self.most.probability, self.least.probability)

    @property
    def lead_area(self) -> float:
        """The same of the lead, which goes on changing where a probability is as good as 1."""
        return between(self.removed, self.most.lead, self.least.lead)

    def at(self, shares: Sequence[float]) -> "Curves":
        """Return the curves at other shares, on straight lines; a last value stays."""

        def read(track: Track) -> Track:
            return Track(*(np.interp(shares, self.removed, values) for values in track))

        there = np.array(shares, dtype=np.float64)
        return Curves(removed=there, most=read(self.most), least=read(self.least))

    def as_dict(self) -> dict[str, Any]:
        tracks = {"most_first": self.most, "least_first": self.least}
        return {
            "area": self.area,
            "lead_area": self.lead_area,
            "removed": self.removed.tolist(),
            **{
                f"{name}_{kind}": values.tolist()
                for name, track in tracks.items()
                for kind, values in track._asdict().items()
            },
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class Faithfulness:
    """How far each map of one slide tells what one model's answer rests on."""

    slide: str
    model: str
    fold: str
    followed: str  # the class
    method: str  # how evidence was found
    patches: int
    curves: Mapping[str, Curves]  # by the name of the map, random last

    def as_dict(self) -> dict[str, Any]:
        named = ("slide", "model", "fold", "followed", "method", "patches")
        maps = {name: curves.as_dict() for name, curves in self.curves.items()}
        return {**{name: getattr(self, name) for name in named}, "maps": maps}

    def as_markdown(self) -> str:
        """Return a table of the areas, the most faithful map first."""
        ranked = sorted(self.curves.items(), key=lambda item: -np.nan_to_num(item[1].area))
        rows = [[name, f"{c.area:.3f}", f"{c.lead_area:.3f}"] for name, c in ranked]
        note = f"Area between the curves of {self.followed}, least relevant first minus most."
        return markdown(["map", "probability", "logit lead"], rows, [note])

    def panel(self) -> FlipPanel:
        """Return the curves of probability, to be drawn beside those of other slides."""
        return panels(self.slide, self.followed, self.curves)[0]

    def draw(self) -> "Figure":
        """Draw the curves of probability and of the lead."""
        return flipping(panels(self.slide, self.followed, self.curves))


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
    """Take patches out of a bag by each map, and by chance, and follow a class.

    `of` is the class, by default the one that is predicted. `maps` hold one number a patch, higher
    for more relevant; by default all that there are, see `relevance`. Of a bag of N patches, N - 1
    are taken out at most. Patches that are equal to a map go in a random order; where that is most
    of them, as in the attention of a mean, the curves are the mean over several orders and their
    mirrors. So chance has an area of 0, not only on average.
    """
    if len(bag.features) != len(explanation):
        raise ValueError(f"{len(bag.features)=} patches, but {len(explanation)=}.")
    of = explanation.predicted if of is None else of
    model = model.eval().to(device)
    features = torch.from_numpy(bag.features)[None].to(device)
    cells = bag.grid()
    grid = None if cells is None else torch.from_numpy(cells).to(device)
    if maps is None:
        maps = relevance(model, features, grid, explanation, of=of)
    n = len(explanation)
    maps = {**maps, RANDOM: np.zeros(n)}
    counts = steps(n, shares)
    chance = (seed, crc32(explanation.slide.encode()))  # each slide has orders of its own
    orders = {name: rank(values, pairs=pairs, seed=chance) for name, values in maps.items()}
    telling = {name: found for name, found in orders.items() if not mirrored(found)}
    ways = len(orders[RANDOM]) + 2 * sum(map(len, telling.values()))
    total = 1 + ways * (len(counts) - 1)
    asked = 0

    def ask(rows: NDArray[np.int64] | None) -> tuple[float, float]:
        nonlocal asked
        asked += 1
        found = answer(model, features, grid, rows, of=of)
        if progress:
            progress(asked, total)
        return found

    whole = ask(None)
    by_chance = flip(orders[RANDOM], counts, whole, ask)
    return Faithfulness(
        slide=explanation.slide,
        model=explanation.model,
        fold=explanation.fold,
        followed=explanation.classes[of],
        method=explanation.method,
        patches=n,
        curves={
            name: flip(orders[name], counts, whole, ask) if name in telling else by_chance
            for name in maps
        },
    )


def panels(title: str, followed: str, curves: Mapping[str, Curves]) -> list[FlipPanel]:
    """Return curves to be drawn: of probability, and of the lead."""
    probability = {
        name: Flip(c.removed, c.most.probability, c.least.probability, c.area)
        for name, c in curves.items()
    }
    lead = {
        name: Flip(c.removed, c.most.lead, c.least.lead, c.lead_area) for name, c in curves.items()
    }
    return [
        FlipPanel(title, f"Probability of {followed}", probability, (0, 1)),
        FlipPanel(title, f"Lead of {followed} in logits", lead),
    ]


def relevance(
    model: MILModel,
    features: Float[Tensor, "1 N E"],
    grid: Cells | None,
    explanation: Explanation,
    *,
    of: int,
) -> dict[str, Values]:
    """Return each map of how much patches matter to a class, by name."""
    maps: dict[str, Values] = {
        "evidence": explanation.towards(of),
        "attention": explanation.attention,
    }
    if explanation.class_attention is not None:
        maps["class attention"] = explanation.class_attention[of]
    if explanation.scores is not None:
        maps["patch scores"] = explanation.scores[:, of]
    maps["gradients"] = gradient(model, features, grid, of=of).float().cpu().numpy()
    return maps


def steps(n: int, shares: Sequence[float] = SHARES) -> NDArray[np.int64]:
    """Return how many of n patches are taken out, step by step; one patch stays at the least."""
    if not shares or min(shares) < 0 or max(shares) > 1:
        raise ValueError(f"Shares lie between 0 and 1: {shares=}.")
    counts = np.rint(np.array(shares) * n).astype(np.int64)
    return np.unique(np.append(np.minimum(counts, n - 1), 0))


def rank(
    values: Values, *, pairs: int = PAIRS, seed: int | Sequence[int] = 0
) -> list[NDArray[np.int64]]:
    """Return rows from the highest value down, equals at random; in many ways if most are equal.

    The same seed breaks ties in the same way, so a map that says nothing is the random one.
    """
    if not np.isfinite(values).all():
        raise ValueError("A map has numbers only: there is a NaN or an infinity in it.")
    rng = np.random.default_rng(seed)
    if 2 * len(np.unique(values)) > len(values):
        tickets = [rng.permutation(len(values))]
    else:
        drawn = [rng.permutation(len(values)) for _ in range(pairs)]
        tickets = [ticket for one in drawn for ticket in (one, -one)]
    return [np.lexsort((ticket, -values)) for ticket in tickets]


def mirrored(orders: Sequence[NDArray[np.int64]]) -> bool:
    """Tell whether each order has its mirror beside it: most and least relevant are the same."""
    return len(orders) > 1 and np.array_equal(orders[0], orders[1][::-1])


def flip(
    orders: Sequence[NDArray[np.int64]],
    counts: NDArray[np.int64],
    whole: tuple[float, float],
    ask: Callable[[NDArray[np.int64]], tuple[float, float]],
) -> Curves:
    """Return the curves of a map, the mean over its orders. `ask` is told who stays."""

    def fall(ways: Sequence[NDArray[np.int64]]) -> Track:
        tracks = [[whole, *(ask(np.sort(way[count:])) for count in counts[1:])] for way in ways]
        return Track(*np.mean(tracks, axis=0).T)

    most = fall(orders)
    least = most if mirrored(orders) else fall([order[::-1] for order in orders])
    return Curves(removed=counts / len(orders[0]), most=most, least=least)


@torch.no_grad()
def answer(
    model: MILModel,
    features: Float[Tensor, "1 N E"],
    grid: Cells | None,
    rows: NDArray[np.int64] | None,
    *,
    of: int,
) -> tuple[float, float]:
    """Return probability and lead of a class in a bag of these rows alone; None is all of them."""
    if rows is not None:
        kept = torch.from_numpy(rows).to(features.device)
        features, grid = features[:, kept], None if grid is None else grid[kept]
    logits = model(features, grid=None if grid is None else grid[None]).logits[0].cpu().double()
    return float(logits.softmax(dim=-1)[of]), float(lead_of(logits, of))


def between(removed: Numbers, most: Numbers, least: Numbers) -> float:
    """Return the area by which one curve lies over another, by trapezoids."""
    if len(removed) < 2:
        return float("nan")
    apart = least - most
    return float((np.diff(removed) * (apart[1:] + apart[:-1]) / 2).sum())
