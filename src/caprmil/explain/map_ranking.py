"""The ranking of the maps of a run, by their faithfulness on validation slides.

It is measured once, after training or when a slide is first explained, and kept in maps.json.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from math import nan
from typing import Any
from zlib import crc32

import numpy as np
import torch

from caprmil import config
from caprmil.errors import BagError, CaprmilError
from caprmil.explain.explanation import explain
from caprmil.explain.faithfulness import RANDOM, Faithfulness, faithfulness
from caprmil.explain.faithfulness_summary import FEW, summarise_faithfulness
from caprmil.explain.map_kinds import INPUT_GRADIENTS, KINDS, available
from caprmil.features import bag_files
from caprmil.features.bags import Bag
from caprmil.io.atomic import remove_leftovers, write_text
from caprmil.io.json_files import as_json, parse_json
from caprmil.io.progress import Step
from caprmil.models import average_slide
from caprmil.runs.facts import MAPS
from caprmil.runs.inference import is_large
from caprmil.runs.run import Run

SLIDES = 8  # of the validation parts
PATCHES = 2000  # per slide; larger slides are sampled
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98)  # that are removed


@dataclass(frozen=True, kw_only=True)
class StoredRanking:
    """A ranking as it is in the file."""

    first: str
    beats_chance: bool
    slides: int
    areas: dict[str, tuple[float | None, ...]]
    verdict: str


@dataclass(frozen=True, kw_only=True)
class MapRanking:
    """The faithfulness of the maps of a run: area between the deletion curves, 0 by chance."""

    first: str  # the map to show first
    beats_chance: bool  # whether the interval of its area lies above 0
    slides: int
    areas: dict[str, tuple[float, float, float]]  # mean, and interval over patients; best first
    verdict: str = field(default="")

    def as_dict(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "beats_chance": self.beats_chance,
            "slides": self.slides,
            "areas": {name: list(numbers) for name, numbers in self.areas.items()},
            "verdict": self.verdict,
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "MapRanking":
        stored = config.parse(found, into=StoredRanking, name=MAPS)
        areas = {
            name: tuple(nan if n is None else n for n in numbers)  # of one patient
            for name, numbers in stored.areas.items()
        }
        if (
            not {stored.first, *areas} <= KINDS.keys()
            or any(len(numbers) != 3 for numbers in areas.values())
            or stored.slides < 1
        ):
            raise ValueError("not a ranking of maps")
        return cls(**{**vars(stored), "areas": areas})

    def in_words(self, name: str) -> str:
        """Return how faithful a map is on this run, in a sentence."""
        if name not in self.areas:
            return "The faithfulness of this map was not measured on this run."
        mean, low, high = self.areas[name]
        interval = "" if np.isnan(low) else f" ({low:.2f} to {high:.2f})"
        few = ", which are few" if self.slides < FEW else ""
        text = (
            f"Faithfulness on {self.slides} validation slide{'s' * (self.slides != 1)}{few}: "
            f"{mean:.2f}{interval}; a random map has 0."
        )
        if not low > 0:
            text += " It is not shown to be better than a random map."
        return text


def map_ranking(
    run: Run,
    *,
    store: bool = True,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
) -> MapRanking | None:
    """Return the ranking of the maps of a run. It is measured and stored if it is not known.

    None if there are no validation slides to measure it on, e.g. where only the run was copied.
    """
    path = run.folder / MAPS
    if path.exists():
        try:
            return MapRanking.from_dict(parse_json(path.read_bytes()))
        except (OSError, ValueError, TypeError) as problem:
            raise CaprmilError(
                f"{path} is damaged ({str(problem).rstrip('.')}). Remove it: it is measured again."
            ) from None
    ranking = measure_ranking(run, device=device, progress=progress)
    if store and ranking is not None and run.finished:
        remove_leftovers(path)
        with suppress(CaprmilError):  # in a folder without write access it is measured again
            write_text(path, as_json(ranking.as_dict()), replace=True)
    return ranking


def measure_ranking(
    run: Run, *, device: torch.device | str = "cpu", progress: Step | None = None
) -> MapRanking | None:
    """Measure the faithfulness of every map on a few validation slides."""
    chosen = validation_slides(run)
    found: list[Faithfulness] = []
    for fold, slide in chosen:
        with suppress(BagError):  # a missing or damaged bag does not cost the others
            files = run.bags[slide]
            if is_large(bag_files.inspect(files)):
                continue
            bag = sample_patches(bag_files.read(files), slide)
            if len(bag.features) < 2:
                continue
            model = run.for_slide(run.model(fold), slide).to(device)
            target = run.fold_target(fold)
            explanation = explain(model, bag, target=target, slide=slide, fold=fold, device=device)
            found.append(faithfulness(model, bag, explanation, shares=SHARES, device=device))
        if progress and found:
            progress(len(found), min(SLIDES, len(chosen)))
        if len(found) == SLIDES:
            break
    if not found:
        return None
    summary = summarise_faithfulness(found, run.patients)
    ranked = [area for area in summary.areas if area.map not in (RANDOM, INPUT_GRADIENTS.name)]
    usual = available(average_slide(run.model(chosen[0][0])))[0]
    best = ranked[0]
    return MapRanking(
        first=best.map if best.above_chance or summary.patients < 2 else usual,
        beats_chance=best.above_chance,
        slides=summary.slides,
        areas={area.map: (area.mean, *area.interval) for area in ranked},
        verdict=summary.verdict(),
    )


def validation_slides(run: Run) -> list[tuple[str, str]]:
    """Return pairs of a fold and a slide of its validation part, from each fold in turn."""

    def shuffled(fold: str, slides: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        known = [slide for slide in slides if slide in run.bags]
        order = np.random.default_rng(crc32(fold.encode())).permutation(len(known))
        return ((fold, known[index]) for index in order)

    columns = [shuffled(fold.name, fold.validation) for fold in run.trained_folds()]
    return [pair for row in zip_longest(*columns) for pair in row if pair is not None]


def sample_patches(bag: Bag, name: str) -> Bag:
    """Return a bag of at most `PATCHES` random patches, in their order."""
    n = len(bag.features)
    if n <= PATCHES:
        return bag
    rng = np.random.default_rng(crc32(name.encode()))
    return bag.select(np.sort(rng.permutation(n)[:PATCHES]))
