"""Flips: how many patches must be removed before the prediction of a slide turns.

Patches are removed in the order of the first map of the run and, as a comparison, in a random
order. It is measured on test slides, each by a model that has not seen it, and kept in flips.json.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from math import ceil, inf
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil import config
from caprmil.errors import BagError, CaprmilError, RecipeError, count
from caprmil.explain.chosen_patches import support_order
from caprmil.explain.explanation import explain
from caprmil.explain.map_kinds import KINDS
from caprmil.explain.map_ranking import PATCHES, map_ranking, sample_patches
from caprmil.features import bag_files, batches
from caprmil.features.bags import Bag
from caprmil.features.batches import Sample
from caprmil.io.atomic import remove_leftovers, write_text
from caprmil.io.json_files import as_json, parse_json
from caprmil.io.progress import Step
from caprmil.runs.inference import TrainedModel, predict_batch
from caprmil.runs.run import Run

FILE = "flips.json"
SLIDES = 40  # of the test parts
SHARES = (0.01, 0.02, 0.05, *np.arange(0.1, 0.95, 0.1).round(1).tolist(), 0.95, 0.98, 1.0)
"""The grid on which the first turn is looked for; of 1.0, one patch is left."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SlideFlip:
    """How many patches of a slide must go before its prediction turns; None if it never does."""

    slide: str
    fold: str
    patches: int
    by_map: int | None
    by_chance: int | None  # in a random order

    def __post_init__(self) -> None:
        for removed in (self.by_map, self.by_chance):
            if removed is not None and not 0 < removed <= self.patches:
                raise RecipeError(f"{removed} of {self.patches} patches cannot be removed")


@dataclass(frozen=True, kw_only=True)
class Flips:
    """The flips of a run."""

    map: str  # the first map of the run
    rule: str  # when a prediction has turned, in words
    slides: tuple[SlideFlip, ...]

    def as_dict(self, unit: str = "slide") -> dict[str, Any]:
        return {
            "map": self.map,
            "rule": self.rule,
            "patches_at_most": PATCHES,
            "slides": [asdict(slide) for slide in self.slides],
            "verdict": self.in_words(unit),
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "Flips":
        own = {name: found[name] for name in ("map", "rule", "slides")}
        flips = config.parse(own, into=cls, name=FILE)
        if flips.map not in KINDS or not flips.slides:
            raise ValueError("not the flips of a run")
        return flips

    def shares(self) -> tuple[list[float], list[float]]:
        """Return the share of each slide's patches, by the map and at random; inf for never."""
        return (
            [_share(slide.by_map, slide.patches) for slide in self.slides],
            [_share(slide.by_chance, slide.patches) for slide in self.slides],
        )

    def in_words(self, unit: str = "slide") -> str:
        """Return how much must go on half of the slides or patients, in a sentence or two."""
        by_map, by_chance = (_half(shares) for shares in self.shares())
        if by_map < inf:
            text = (
                f"On half of the {unit}s, removing {_percent(by_map)} of the patches turns the "
                "prediction; "
            )
            if by_chance < inf:
                return f"{text}at random {_percent(by_chance)}."
            return f"{text}at random, half of them or more never turn."
        never = sum(slide.by_map is None for slide in self.slides)
        others = sum(slide.by_chance is None for slide in self.slides)
        return (
            f"On {never} of {count(len(self.slides), unit)}, the prediction never turns, "
            f"however many patches are removed in the order of the map; at random on {others}."
        )


def flips_of(
    run: Run, *, device: torch.device | str = "cpu", progress: Step | None = None
) -> Flips | None:
    """Return the flips of a run. They are measured and stored if they are not known.

    None if the bags of its test slides no longer exist.
    """
    ranking = map_ranking(run, device=device)  # without one, the usual map is the first
    first = None if ranking is None else ranking.first
    path = run.folder / FILE
    if path.exists():
        try:
            stored = Flips.from_dict(parse_json(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise CaprmilError(
                f"{path} is damaged ({str(problem).rstrip('.')}). Remove it: it is measured again."
            ) from None
        if first in (None, stored.map):
            return stored
    found = measure_flips(run, first=first, device=device, progress=progress)
    if found is not None and run.finished:
        remove_leftovers(path)
        with suppress(CaprmilError):  # a report of a run that cannot be written to
            write_text(path, as_json(found.as_dict(run.unit)), replace=True)
    return found


def measure_flips(
    run: Run,
    *,
    first: str | None = None,
    slides: int | None = None,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
) -> Flips | None:
    """Measure how many patches must go before the prediction turns, on at most 40 test slides."""
    drawn = unseen_slides(run)[: slides or SLIDES]
    chosen = sorted(drawn)  # by fold, so that each model is loaded once
    found, used = list[SlideFlip](), ""
    models: dict[str, TrainedModel] = {}
    for number, (fold, slide) in enumerate(chosen, 1):
        if fold not in models:
            models = {fold: run.trained(fold)}
            models[fold].model.to(device)
        with suppress(BagError):  # a damaged bag does not cost the others
            bag = sample_patches(bag_files.read(run.bags[slide]), slide)
            trained = models[fold]
            trained = trained._replace(model=run.for_slide(trained.model, slide).to(device))
            explanation = explain(
                trained.model,
                bag,
                target=trained.target,
                slide=slide,
                fold=fold,
                first=first,
                device=device,
            )
            used, n = explanation.first, len(explanation)
            random = np.random.default_rng([1, crc32(slide.encode())]).permutation(n)
            by_map, by_chance = (
                removals_to_turn(trained, bag, order, device=device)
                for order in (support_order(explanation), random)
            )
            found.append(
                SlideFlip(slide=slide, fold=fold, patches=n, by_map=by_map, by_chance=by_chance)
            )
        if progress:
            progress(number, len(chosen))
    if not found:
        return None
    ordered = sorted(found, key=lambda flip: flip.slide)
    return Flips(map=used, rule=run.target.turn_name, slides=tuple(ordered))


def unseen_slides(run: Run) -> list[tuple[str, str]]:
    """Return pairs of a fold and a slide of its test part, in a random order, by fold in turn.

    Each slide occurs once, and only slides whose bags exist.
    """
    taken: set[str] = set()
    columns = []
    for fold in run.trained_folds():
        own = [name for name in fold.test if name in run.bags and name not in taken]
        own = [name for name in own if run.bags[name].exists()]
        taken |= set(own)
        order = np.random.default_rng(crc32(fold.name.encode())).permutation(len(own))
        columns.append([(fold.name, own[index]) for index in order])
    return [pair for row in zip_longest(*columns) for pair in row if pair is not None]


def removals_to_turn(
    trained: TrainedModel, bag: Bag, order: Rows, *, device: torch.device | str = "cpu"
) -> int | None:
    """Return how many patches of a bag must be removed in this order before the answer turns."""

    def answer(removed: int) -> NDArray[np.float64]:
        rest = bag.select(np.sort(order[removed:]))
        batch = batches.collate([(Sample("", rest), rest)])
        return predict_batch(trained, batch, torch.device(device))[0]

    before = answer(0)
    return first_turn(lambda n: trained.target.turned(before, answer(n)), len(order))


def first_turn(
    turned: Callable[[int], bool], n: int, shares: Sequence[float] = SHARES
) -> int | None:
    """Return the first number of removed patches at which an answer has turned. One remains.

    The answer need not turn only once. So the first number on a grid of shares is found, and then
    the turn between it and the one before by bisection. A turn and return between two points of the
    grid is missed.
    """
    counts = np.unique(np.clip(np.rint(np.array(shares) * n).astype(int), 1, max(n - 1, 0)))
    low = 0
    for high in counts.tolist():
        if 0 < high < n and turned(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if turned(middle) else (middle, high)
            return int(high)
        low = high
    return None


def _share(removed: int | None, patches: int) -> float:
    return inf if removed is None else removed / patches


def _half(shares: Sequence[float]) -> float:
    """Return the share that is enough on half of the slides."""
    return sorted(shares)[ceil(len(shares) / 2) - 1]


def _percent(share: float) -> str:
    digits = 1 if share < 0.0095 else 0
    return f"{100 * share:.{digits}f} %"
