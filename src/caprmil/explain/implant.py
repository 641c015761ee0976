"""Implants: patches of one slide are added to the bag of another. Does the answer follow them?

Kaczmarzyk et al. test models of pathology in this way: "Explainable AI for computational pathology
identifies model limitations and tissue biomarkers" (HIPPO), arXiv 2409.03080.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.encoders.card import same_encoder
from caprmil.errors import BagError, CaprmilError, count
from caprmil.explain.chosen_patches import (
    Mask,
    Region,
    patches_inside,
    patches_marked_most,
)
from caprmil.explain.explanation import explain
from caprmil.explain.map_ranking import map_ranking
from caprmil.explain.slide_reference import SlideReference
from caprmil.features import bag_files, batches
from caprmil.features.bags import Bag, BagInfo
from caprmil.features.batches import Sample
from caprmil.models.device import pick_device
from caprmil.runs.bag_checks import check_bag
from caprmil.runs.inference import TrainedModel, predict_batch
from caprmil.runs.run import Run
from caprmil.slides.regions import Regions
from caprmil.slides.scale import same_scale
from caprmil.targets import Target

DRAWS = 5  # of random patches, whose mean answer is the control
GAP = 1  # empty columns between the patches of the slide and those that are added

Answers = NDArray[np.float64]  # (F, A), one row per model


@dataclass(frozen=True, eq=False, kw_only=True)
class ImplantAnswers:
    """The answers of several models (F, A) for each bag. None for a bag without patches."""

    slide: Answers
    with_region: Answers
    with_others: Answers | None  # as many random patches of the source; a mean over draws
    source: Answers
    without_region: Answers | None
    without_others: Answers | None


def implant_answers(
    models: Sequence[TrainedModel],
    source: Bag,
    slide: Bag,
    inside: Mask,
    *,
    of_source: Sequence[TrainedModel] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ImplantAnswers:
    """Predict a slide with the region of the source added, and the source without it.

    The control adds or removes as many patches of the source from outside of the region, or all of
    them if there are fewer. `of_source` are the models for the source, if they are others.
    """

    def predict(bag: Bag, used: Sequence[TrainedModel] = models) -> Answers:
        batch = batches.collate([(Sample("", bag), bag)])
        found = [predict_batch(each, batch, torch.device(device)) for each in used]
        return np.concatenate(found)

    region, others = np.flatnonzero(inside), np.flatnonzero(~inside)
    rng, size = np.random.default_rng(seed), min(len(region), len(others))
    drawn = [np.sort(rng.permutation(others)[:size]) for _ in range(draws if size else 0)]
    with_others = [predict(implanted(slide, source.select(rows))) for rows in drawn]
    own = of_source or models
    without_others = [predict(without(source, rows), own) for rows in drawn]
    return ImplantAnswers(
        slide=predict(slide),
        with_region=predict(implanted(slide, source.select(region))),
        with_others=np.mean(with_others, axis=0) if drawn else None,
        source=predict(source, own),
        without_region=predict(source.select(others), own) if len(others) else None,
        without_others=np.mean(without_others, axis=0) if drawn else None,
    )


def implanted(slide: Bag, part: Bag) -> Bag:
    """Return a bag with the patches of a slide and, after and to the right of them, a part.

    The part keeps its own arrangement. Positions are cells of a grid, since slides may differ in
    size; they are left out if one of the bags has none.
    """
    features = np.concatenate([slide.features, part.features])
    cells, own = slide.grid(), part.grid()
    coords = None
    if cells is not None and own is not None:
        right = cells[:, 0].max() + 1 + GAP
        coords = np.concatenate([cells, own - own.min(axis=0) + [right, cells[:, 1].min()]])
    info = replace(
        slide.info, path=None, kind="memory", n_patches=len(features), step=1.0, patch_level0=None
    )
    return Bag(features=features, coords=coords, info=info)


def without(bag: Bag, rows: NDArray[np.int64]) -> Bag:
    """Return a bag without some of its patches."""
    kept = np.ones(len(bag.features), dtype=np.bool_)
    kept[rows] = False
    return bag.select(kept)


@dataclass(frozen=True, eq=False, kw_only=True)
class BagAnswer:
    """A bag of the comparison, and its answer as the mean over models."""

    title: str
    patches: int
    answer: NDArray[np.float64]  # (A,)
    by_fold: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Implant:
    """What happens to a slide if a region of another one is added to it."""

    source: str
    slide: str
    region: int  # patches in it
    others: int  # patches of the control
    map: str | None  # that chose the region, if a map did
    folds: tuple[str, ...]
    seen: tuple[str, ...]  # the slides that a model of these folds saw in training
    target: Target
    followed: int  # the contrast that is predicted for the source
    answers: ImplantAnswers
    sizes: tuple[int, int]  # patches of slide and source

    def rows(self) -> list[BagAnswer]:
        """Return every bag, in the order to show them."""
        slide, source = self.sizes
        others = count(self.others, "other patch")
        found = self.answers
        bags = [
            (self.slide, slide, found.slide),
            (f"{self.slide} with the region", slide + self.region, found.with_region),
            (f"{self.slide} with {others}", slide + self.others, found.with_others),
            (self.source, source, found.source),
            (f"{self.source} without the region", source - self.region, found.without_region),
            (f"{self.source} without {others}", source - self.others, found.without_others),
        ]
        return [
            BagAnswer(
                title=title,
                patches=patches,
                answer=answers.mean(axis=0),
                by_fold=dict(zip(self.folds, answers, strict=True)),
            )
            for title, patches, answers in bags
            if answers is not None
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "slide": self.slide,
            "region_patches": self.region,
            "other_patches": self.others,
            "map": self.map,
            "folds": list(self.folds),
            "seen_in_training": list(self.seen),
            "followed": self.target.names[self.followed],
            "bags": [
                {
                    "bag": row.title,
                    "patches": row.patches,
                    **self.target.describe(row.answer),
                    "by_fold": {f: own.tolist() for f, own in row.by_fold.items()},
                }
                for row in self.rows()
            ],
            "verdict": self.in_words(),
            "models": self.models_in_words(),
        }

    def in_words(self) -> str:
        """Return whether the answer follows the tissue, in a sentence or two."""
        found, show = self.answers, self.target.show
        before, after = found.slide.mean(axis=0), found.with_region.mean(axis=0)
        control = None if found.with_others is None else found.with_others.mean(axis=0)
        change = f"{show(before)} before, {show(after)} with the region"
        if control is not None:
            change += f", {show(control)} with as many other patches of {self.source}"
            if self.others < self.region:
                change = change.replace("as many other patches", f"all {self.others} others")
        turned = self.target.turned
        turns = turned(before, after)
        alone = control is None or (not turned(before, control) and turned(control, after))
        if turns and alone:
            verdict = f"The prediction of {self.slide} follows the region"
        elif turns:
            verdict = f"The prediction of {self.slide} turns, but other patches move it too"
        else:
            verdict = f"The prediction of {self.slide} does not turn"
        text = f"{verdict}: {change}."
        if not turns and not self.target.turned(before, found.source.mean(axis=0)):
            text += f" {self.source} has the same prediction."
        return text

    def models_in_words(self) -> str:
        """Return which models answered, and whether they know the slides."""
        models = count(len(self.folds), "model")
        if not self.seen:
            return f"Predicted by {models} that saw neither slide in training."
        seen = " and ".join(self.seen)
        return f"Predicted by {models} that saw {seen} in training or validation: none saw neither."


def implant_region(
    run: Run,
    source: SlideReference,
    region: Region,
    slide: SlideReference,
    *,
    fold: str | None = None,
    first: str | None = None,
    force: bool = False,
    device: str = "auto",
) -> Implant:
    """Add the patches in a region of the source to a slide, and predict both with and without them.

    The models are those that saw neither slide or, if there are none, those that did not see the
    slide. `first` is the map for a region of top patches; the default is the first map of the run.
    """
    if source.name == slide.name:
        raise CaprmilError(f"{source.name} cannot be added to itself. Name another slide.")
    own, other = bag_files.read(source.bag), bag_files.read(slide.bag)
    for reference, bag in ((source, own), (slide, other)):
        check_bag(run, reference.name, bag.info, force=force)
    check_alike(source.name, own.info, slide.name, other.info, force=force)
    used = pick_device(device)
    names, seen = unseen_models(run, source.name, slide.name, fold)
    loaded = {name: run.trained(name) for name in names}
    models, others = (
        {
            name: each._replace(model=run.for_slide(each.model, reference.name).to(used))
            for name, each in loaded.items()
        }
        for reference in (source, slide)
    )
    whole = batches.collate([(Sample(source.name, own), own)])
    answers = {name: predict_batch(each, whole, used)[0] for name, each in models.items()}
    mean = np.mean(list(answers.values()), axis=0)
    nearest = min(answers, key=lambda name: abs(answers[name] - mean).max())
    target, chosen_by = models[nearest].target, None
    if isinstance(region, Regions):
        inside = patches_inside(region, source, own)
    else:
        ranking = map_ranking(run, device=used) if first is None else None
        explanation = explain(
            models[nearest].model,
            own,
            target=target,
            first=ranking.first if ranking else first,
            slide=source.name,
            fold=nearest,
            device=used,
        )
        inside, chosen_by = patches_marked_most(region, explanation), explanation.first
    return Implant(
        source=source.name,
        slide=slide.name,
        region=int(inside.sum()),
        others=min(int(inside.sum()), int((~inside).sum())),
        map=chosen_by,
        folds=names,
        seen=seen,
        target=target,
        followed=target.contrast_of(mean),
        answers=implant_answers(
            *(list(others.values()), own, other, inside),
            of_source=list(models.values()),
            device=used,
        ),
        sizes=(len(other.features), len(own.features)),
    )


def unseen_models(
    run: Run, source: str, slide: str, fold: str | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folds to predict with, and which of two slides their models saw in training."""
    trained = run.trained_folds(fold)
    for wanted in ((source, slide), (slide,), ()):
        folds = [each for each in trained if not any(each.saw(name) for name in wanted)]
        if folds:
            break
    seen = [name for name in (source, slide) if any(each.saw(name) for each in folds)]
    return tuple(each.name for each in folds), tuple(seen)


def check_alike(
    source: str, own: BagInfo, slide: str, other: BagInfo, *, force: bool = False
) -> None:
    """Raise unless two bags are of the same encoder and scale, as far as these are known."""
    differs = ""
    if own.width != other.width:
        differs = f"{own.width} and {other.width} features"
        force = False
    elif own.encoder and other.encoder and not same_encoder(own.encoder, other.encoder):
        differs = f"the encoders {own.encoder} and {other.encoder}"
    elif own.fingerprint and other.fingerprint and own.fingerprint != other.fingerprint:
        differs = "different weights or transforms of one encoder"
    elif own.mpp and other.mpp and not same_scale(own.mpp, other.mpp):
        differs = f"{own.mpp:g} and {other.mpp:g} um/px"
    if differs and not force:
        raise BagError(
            f"The bags of {source} and {slide} are of {differs}. Patches can be added only to a "
            "bag of the same encoder and scale: encode both in the same way."
        )
