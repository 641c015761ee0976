"""The atlas of a run: what each token collects over the cohort, and what it does to the answer.

Each slide is evaluated by a model that has not seen it. The tokens of different folds have no
common order, so those of a reference fold are matched to the others (`token_matching`): a token of
the atlas is a token of the reference fold, with its matches.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.errors import BagError, RunError, shorten
from caprmil.explain.explanation import TOP
from caprmil.explain.patient_means import Estimates, PatientMeans
from caprmil.explain.slide_reference import locate_slide
from caprmil.explain.slide_tokens import (
    SlideTokens,
    check_tokens,
    opened_bag,
    sampled_assignments,
    slide_tokens,
)
from caprmil.explain.token_matching import (
    Moments,
    Stability,
    measure_stability,
    redundant_groups,
)
from caprmil.io.progress import Step
from caprmil.models import MILModel, average_slide
from caprmil.runs.bag_checks import check_bag
from caprmil.runs.run import Run
from caprmil.targets import Target

COMMON_SLIDES = 16  # on which the models of all folds are run
COMMON_PATCHES = 5000  # of each of these slides that are compared
MOST_FOLDS = 10  # that one fold is compared with

Shape = tuple[int, int, int]  # blocks, heads, tokens per head
Groups = tuple[tuple[int, ...], ...]


class TypicalPatch(NamedTuple):
    """A patch that a token collects."""

    slide: str
    patient: str
    row: int
    weight: float
    x: float | None  # as in the bag
    y: float | None


@dataclass(frozen=True, eq=False, kw_only=True)
class AtlasToken:
    """A token over the cohort. Numbers count from 0."""

    block: int
    head: int
    token: int
    usage: Estimates  # the share of a slide's patches that is assigned to it
    effect: Estimates  # how far the contrast of the answer falls without its message
    turned: float  # the share of the slides for which the answer turns without it
    stability: float  # its mean correlation with its matches in the other folds
    redundant: tuple[tuple[int, int], ...]  # head and token of those that do the same
    patches: tuple[TypicalPatch, ...]

    @property
    def title(self) -> str:
        return f"Head {self.head + 1}, token {self.token + 1}"

    @property
    def effect_size(self) -> float:
        """The largest mean effect over the groups, without its sign."""
        means = [abs(each.mean) for each in self.effect.groups if not np.isnan(each.mean)]
        return max(means, default=abs(self.effect.overall.mean))


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenAtlas:
    """The tokens of a run over its cohort."""

    model: str
    target: Target
    groups: Mapping[str, int]  # slides of each class or, for a value, of each quarter
    slides: tuple[str, ...]
    patients: int
    folds: Mapping[str, int]  # how many slides the model of each fold evaluates
    reference: str  # the fold whose order of tokens is used
    shape: Shape
    tokens: tuple[AtlasToken, ...]  # of all blocks
    stability: Stability
    redundant: Mapping[str, tuple[Groups, ...]]  # by fold and block
    examples: tuple[str, ...]  # slides of the reference, that with the most even usage first
    left_out: Mapping[str, str]  # slides that could not be read, and why

    @property
    def last(self) -> tuple[AtlasToken, ...]:
        """The tokens of the last block."""
        return tuple(each for each in self.tokens if each.block == self.shape[0] - 1)

    @property
    def ranked(self) -> list[AtlasToken]:
        """The tokens of the last block, that with the largest effect first."""
        return sorted(self.last, key=lambda token: token.effect_size, reverse=True)

    @property
    def is_stable(self) -> bool:
        """Whether matched tokens are nearer to a correlation of 1 than to chance."""
        block = self.shape[0] - 1
        return self.stability.mean(block) > (1 + self.stability.chance(block)) / 2

    @property
    def head_to_draw(self) -> int:
        """The head of the last block whose tokens have the largest effects."""
        effects = np.zeros(self.shape[1])
        for each in self.last:
            effects[each.head] += each.effect_size
        return int(effects.argmax())


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluatedSlide:
    """A slide, and what the tokens of a fold's model do on it."""

    slide: str
    patient: str
    fold: str
    tokens: SlideTokens


def make_atlas(
    run: Run,
    *,
    fold: str | None = None,
    most: int | None = None,
    top: int = TOP,
    force: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Step | None = None,
) -> TokenAtlas:
    """Return the atlas of a run, over all slides that a model has not seen.

    With `fold`, only the model of that fold is used. `most` slides are drawn at random.
    """
    chosen = choose_slides(run, fold, most, seed)
    used = Counter(chosen.values())
    reference = max(used, key=lambda name: used[name])
    compared = _compared_folds(run, reference, used, alone=fold is not None)
    models = {name: run.model(name).eval().to(device) for name in {*used, *compared}}
    shape = check_tokens(models[reference])
    common = list(chosen)[:COMMON_SLIDES] if len(compared) > 1 else []
    total = len(chosen) + len(common)

    moments = {name: [Moments() for _ in range(shape[0])] for name in used}
    found, left_out = list[EvaluatedSlide](), dict[str, str]()
    for done, (slide, name) in enumerate(chosen.items(), 1):
        try:
            with opened_bag(locate_slide(run, slide)) as bag:
                check_bag(run, slide, bag.info, force=force)
                tokens = slide_tokens(
                    run.for_slide(models[name], slide),
                    bag,
                    target=run.fold_target(name),
                    moments=moments[name],
                    device=device,
                )
        except (BagError, RunError) as problem:  # one broken bag does not cost the others
            left_out[slide] = str(problem)
        else:
            patient = run.owner(slide)
            found.append(EvaluatedSlide(slide=slide, patient=patient, fold=name, tokens=tokens))
        if progress:
            progress(done, total)
    if not found:
        raise RunError(f"No slide can be used. {shorten(left_out.values(), separator=' ')}")

    def compare() -> Iterator[dict[str, list[NDArray[np.float32]]]]:
        for number, slide in enumerate(common):
            if slide not in left_out:
                yield _assignments(run, slide, [(f, models[f]) for f in compared], seed, device)
            if progress:
                progress(len(chosen) + number + 1, total)

    stability = measure_stability(compare(), seed=seed)
    redundant = {name: tuple(_redundant(each, shape) for each in moments[name]) for name in used}
    cohort = TokenCohort(run, found, stability, reference, shape, seed=seed)
    return TokenAtlas(
        model=models[reference].title,
        target=run.target,
        groups=cohort.groups,
        slides=tuple(each.slide for each in found),
        patients=len(set(cohort.patients)),
        folds=Counter(each.fold for each in found),
        reference=reference,
        shape=shape,
        tokens=tuple(cohort.tokens(redundant[reference], top)),
        stability=stability,
        redundant=redundant,
        examples=_examples(found, reference),
        left_out=left_out,
    )


def choose_slides(run: Run, fold: str | None, most: int | None, seed: int) -> dict[str, str]:
    """Return slides in random order, each with the first fold whose model has not seen it."""
    unseen = {slide: run.unseen_folds(slide, fold) for slide in run.bags}
    found = {slide: folds[0].name for slide, folds in unseen.items() if folds}
    if not found:
        raise RunError(
            f"The models of {run.folder} have seen all its slides. An atlas needs slides that a "
            "model has not seen: train again with a test part."
        )
    names = list(found)
    order = np.random.default_rng(seed).permutation(len(names))[:most]
    return {names[index]: found[names[index]] for index in order}


def _compared_folds(run: Run, reference: str, used: Mapping[str, int], *, alone: bool) -> list[str]:
    """Return the folds whose tokens are compared, the reference first.

    If the atlas is of one fold `alone`, it is compared with those that it does not use.
    """
    others = [fold.name for fold in run.trained_folds() if fold.name != reference]
    if alone:
        return [reference, *others[:MOST_FOLDS]]
    return [reference, *(name for name in others if name in used)]


def _assignments(
    run: Run,
    slide: str,
    models: Sequence[tuple[str, MILModel]],
    seed: int,
    device: torch.device | str,
) -> dict[str, list[NDArray[np.float32]]]:
    """Return the assignments of the same patches of a slide by several models."""
    with opened_bag(locate_slide(run, slide)) as bag:
        order = np.random.default_rng(seed).permutation(bag.info.n_patches)
        rows = np.sort(order[:COMMON_PATCHES])
        return {
            name: sampled_assignments(average_slide(model), bag, rows, device)
            for name, model in models
        }


def _redundant(moments: Moments, shape: Shape) -> Groups:
    if not moments.n:
        return ()
    _, heads, per_head = shape
    return redundant_groups(
        moments.correlation(), [h for h in range(heads) for _ in range(per_head)]
    )


def _examples(slides: Sequence[EvaluatedSlide], reference: str) -> tuple[str, ...]:
    """Return the slides of a fold, that which uses the tokens of the last block most evenly first.

    If it has none, e.g. since they cannot be read, those of all folds.
    """

    def entropy(each: EvaluatedSlide) -> float:
        usage = each.tokens.usage[-1].clip(1e-12, 1)
        return float(-(usage * np.log(usage)).sum())

    own = [each for each in slides if each.fold == reference] or slides
    return tuple(each.slide for each in sorted(own, key=entropy, reverse=True))


class TokenCohort:
    """Evaluated slides, with the tokens of all folds in the order of those of the reference."""

    def __init__(
        self,
        run: Run,
        slides: Sequence[EvaluatedSlide],
        stability: Stability,
        reference: str,
        shape: Shape,
        *,
        seed: int = 0,
    ) -> None:
        self.slides, self.shape = slides, shape
        self.stability, self.reference = stability, reference
        self.patients = [each.patient for each in slides]
        labels = {slide: run.target.parse_label(cell) for slide, cell in run.labels.items()}
        strata, names = run.target.strata(labels)
        groups = np.array([strata[each.slide] for each in slides])
        self.groups = {name: int((groups == n).sum()) for n, name in enumerate(names)}
        self.means = PatientMeans(self.patients, groups, len(names), seed=seed)
        self.order = np.stack([self._order(each.fold) for each in slides])  # (slides, T, H M)

    def _order(self, fold: str) -> NDArray[np.int64]:
        """Return the tokens of a fold, by block, in the order of the reference's tokens."""
        blocks, heads, per_head = self.shape
        found = [
            None if fold == self.reference else self.stability.matched(self.reference, fold, block)
            for block in range(blocks)
        ]
        own = np.arange(heads * per_head)
        return np.stack([own if match is None else match.tokens for match in found])

    def aligned(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return an array (T, H, M, ...) of each slide as (slides, T, H M, ...), in order."""
        blocks, heads, per_head = self.shape
        flat = np.stack(
            [each.reshape(blocks, heads * per_head, *each.shape[3:]) for each in arrays]
        )
        where = self.order.reshape(*self.order.shape, *[1] * (flat.ndim - 3))
        return np.take_along_axis(flat, where, axis=2)

    def tokens(self, redundant: Sequence[Groups], top: int) -> Iterator[AtlasToken]:
        """Yield the tokens of all blocks."""
        found = [each.tokens for each in self.slides]
        usage = self.aligned([each.usage for each in found])
        effect = self.aligned([each.effect for each in found])
        turned = self.aligned([each.turned for each in found])
        weights, rows = (
            self.aligned([each.weights for each in found]),
            self.aligned([each.rows for each in found]),
        )
        nowhere = np.full((*found[0].rows.shape, 2), np.nan)
        coords = self.aligned([nowhere if e.coords is None else e.coords for e in found])
        blocks, heads, per_head = self.shape
        for block in range(blocks):
            correlations = self.stability.correlations(self.reference, block)
            usages, effects = (self.means.of(values[:, block]) for values in (usage, effect))
            for index in range(heads * per_head):
                group = next((group for group in redundant[block] if index in group), ())
                here = np.s_[:, block, index]
                yield AtlasToken(
                    block=block,
                    head=index // per_head,
                    token=index % per_head,
                    usage=usages[index],
                    effect=effects[index],
                    turned=float(turned[here].mean()),
                    stability=float(correlations[index]) if len(correlations) else float("nan"),
                    redundant=tuple(divmod(other, per_head) for other in group if other != index),
                    patches=self._typical(weights[here], rows[here], coords[here], top),
                )

    def _typical(
        self, weights: NDArray[Any], rows: NDArray[Any], coords: NDArray[Any], top: int
    ) -> tuple[TypicalPatch, ...]:
        found = []
        for slide, rank in choose_typical(weights, self.patients, top):
            x, y = (None if np.isnan(v) else float(v) for v in coords[slide, rank])
            found.append(
                TypicalPatch(
                    slide=self.slides[slide].slide,
                    patient=self.patients[slide],
                    row=int(rows[slide, rank]),
                    weight=float(weights[slide, rank]),
                    x=x,
                    y=y,
                )
            )
        return tuple(found)


def choose_typical(
    weights: NDArray[np.floating], patients: Sequence[str], top: int
) -> list[tuple[int, int]]:
    """Return slide and rank of the most typical patches, the highest weight first.

    `weights` (slides, k) are the highest of each slide. Each patch is of another patient; only if
    there are too few patients, several of one patient are taken, at most k of a slide.
    """
    order = np.argsort(-weights, axis=None, kind="stable")
    pairs = [divmod(int(index), weights.shape[1]) for index in order]
    pairs = [pair for pair in pairs if weights[pair] >= 0]  # a slide may have fewer patches
    first, others, used = list[tuple[int, int]](), list[tuple[int, int]](), set[str]()
    for pair in pairs:
        (others if patients[pair[0]] in used else first).append(pair)
        used.add(patients[pair[0]])
    return sorted([*first, *others][:top], key=lambda pair: -weights[pair])
