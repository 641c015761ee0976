"""An explained patient whose slides were answered alone: each slide, and its weight in the answer.

The patches of all slides are explained side by side, as if they were one bag. What a patch adds to
an output of its slide is times the weight of the slide: all evidence adds up to the mean of the
slides' outputs with these weights. Under max one slide has all the weight, so that its evidence is
that of the patient; under mean it is the mean over slides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.evaluation.patient_answers import How
from caprmil.explain.combination import Combination, per_part
from caprmil.explain.covariate_terms import CovariateTerm
from caprmil.explain.explained_slide import ExplainedSlide, explain_slide, label_of
from caprmil.explain.explanation import Explanation, square_cells
from caprmil.explain.map_kinds import EVIDENCE
from caprmil.explain.map_ranking import MapRanking, map_ranking
from caprmil.explain.slide_answer import Answer
from caprmil.explain.slide_reference import SlideReference, references_of_slides
from caprmil.features import bag_files
from caprmil.io.progress import Step
from caprmil.models.device import pick_device
from caprmil.runs.bag_checks import check_bag
from caprmil.runs.inference import predict_file
from caprmil.runs.run import Run
from caprmil.targets.target import weighted_mean

Array = NDArray[Any]


def explain_patient(
    run: Run,
    reference: SlideReference,
    *,
    how: How,
    fold: str | None = None,
    ranking: MapRanking | None = None,
    force: bool = False,
    device: str = "auto",
    progress: Step | None = None,
    **options: Any,
) -> ExplainedSlide:
    """Predict a patient as `Run.predict` does, and explain the prediction slide by slide.

    With several models, all slides are explained by the one whose answer for the patient is the
    nearest to the mean. For `options` see `explain_slide`. Regions are measured on single slides.
    """
    slides, used = references_of_slides(reference), pick_device(device)
    for slide in slides:
        check_bag(run, slide.name, bag_files.inspect(slide.bag), force=force)
    ranking = ranking or map_ranking(run, device=used)
    unseen, by_fold = _answers(run, slides, fold, used)
    weights = _weights(run, how, by_fold)
    answer = Answer(
        mean=np.mean([weighted_mean(weights[f], own) for f, own in by_fold.items()], axis=0),
        calibrated=run.calibrate({f: weighted_mean(weights[f], own) for f, own in by_fold.items()}),
        by_fold={f: weighted_mean(weights[f], own) for f, own in by_fold.items()},
        unseen=unseen,
    )
    cases = []
    for slide in slides:
        cases.append(
            explain_slide(
                run,
                slide,
                fold=answer.nearest,
                ranking=ranking,
                regions=False,
                force=force,
                device=device,
                **options,
            )
        )
        if progress:
            progress(len(cases), len(slides))
    return ExplainedSlide(
        reference=reference,
        label=label_of(run, reference.name),
        answer=answer,
        explanation=join_explanations(
            reference,
            [case.explanation for case in cases],
            weights[answer.nearest],
            answer.by_fold[answer.nearest],
        ),
        ranking=ranking,
        unlike=max((case.unlike for case in cases if case.unlike is not None), default=None),
        combination=Combination(
            how=how,
            target=run.target,
            slides=tuple(slide.name for slide in slides),
            answers=np.mean([*by_fold.values()], axis=0),
            weights=np.mean([*weights.values()], axis=0),
            adds=np.mean([weights[f] * own for f, own in by_fold.items()], axis=0),
        ),
    )


def _answers(
    run: Run, slides: Sequence[SlideReference], fold: str | None, device: torch.device
) -> tuple[bool, dict[str, Array]]:
    """Return the answers (S, A) of each fold's model, and whether it has not seen the slides.

    The models are those that have not seen any of the slides, or all if there are none.
    """
    known = run.trained_folds(fold)
    unseen = [each for each in known if not any(each.saw(slide.name) for slide in slides)]
    found = {}
    for name in [each.name for each in unseen or known]:
        trained = run.trained(name)
        model = trained.model.to(device)
        own = [trained._replace(model=run.for_slide(model, slide.name)) for slide in slides]
        answers = [
            predict_file([each], slide.bag, device)[0]
            for each, slide in zip(own, slides, strict=True)
        ]
        found[name] = np.stack(answers)
    return bool(unseen), found


def _weights(run: Run, how: How, by_fold: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights (S, A) of the slides by fold. Only learned ones differ between folds."""
    if how == "learned":
        learned = run.combinations(by_fold)
        return {name: learned[name].weights(own) for name, own in by_fold.items()}
    shared = run.target.slide_weights(np.mean([*by_fold.values()], axis=0), how)
    return dict.fromkeys(by_fold, shared)


def join_explanations(
    reference: SlideReference, slides: Sequence[Explanation], weights: Array, answer: Array
) -> Explanation:
    """Return the explanations of a patient's slides as one, each times the slide's weight.

    `weights` (S, A) are for the numbers of the answer. Attention, which is one for all of them,
    has their mean, so that it sums to one.
    """
    first, target = slides[0], slides[0].target
    by_output = per_part(target, weights, lambda each: each.n_outputs)
    by_contrast = per_part(target, weights, lambda each: len(each.contrasts))
    whole = weights.mean(axis=1)
    with bag_files.streaming(reference.bag) as stream:
        info, coords, slide_of = stream.info, stream.coords, stream.slide_of
        cells = stream.grid()
    n = sum(len(each) for each in slides)
    names = [name for name in first.maps if all(name in each.maps for each in slides)]

    def rows(each_of: Callable[[Explanation], Array], by: Array, axis: int = 0) -> Array:
        parts = zip(slides, by, strict=True)
        return np.concatenate(
            [(each_of(each) * weight).astype(np.float32) for each, weight in parts], axis=axis
        )

    def optional(each_of: Callable[[Explanation], Array | None], by: Array, axis: int = 0) -> Any:
        if any(each_of(each) is None for each in slides):
            return None
        return rows(lambda each: np.asarray(each_of(each)), by, axis)

    ones = np.ones(len(slides))
    return replace(
        first,
        slide=reference.name,
        info=info,
        coords=coords,
        cells=square_cells(n) if cells is None else cells,
        answer=answer,
        logits=_sum(by_output, [each.logits for each in slides]).astype(np.float32),
        evidence=rows(lambda each: each.evidence, by_output),
        rest=_sum(by_output, [each.rest for each in slides]).astype(np.float32),
        covariates=_covariates(slides, by_output),
        attention=rows(lambda each: each.attention, whole),
        class_attention=optional(lambda each: each.class_attention, by_output[..., None], 1),
        scores=optional(lambda each: each.scores, ones),
        spread=optional(lambda each: each.spread, whole),
        assignments=optional(lambda each: each.assignments, ones, 2),
        before=None,
        after=None,
        slide_of=slide_of,
        maps={name: rows(partial(_map_of, name), by_contrast) for name in names},
        first=first.first if len({each.first for each in slides}) == 1 else EVIDENCE.name,
    )


def _map_of(name: str, explanation: Explanation) -> Array:
    return explanation.maps[name]


def _covariates(slides: Sequence[Explanation], by_output: Array) -> tuple[CovariateTerm, ...]:
    """Return the terms of the covariates of a patient: those of the slides with their weights."""
    return tuple(
        replace(
            each[0],
            term=_sum(by_output, [own.term for own in each]),
            scaling=None
            if each[0].scaling is None
            else _sum(by_output, [np.asarray(own.scaling) for own in each]),
        )
        for each in zip(*(slide.covariates for slide in slides), strict=True)
    )


def _sum(weights: Array, values: Array | Sequence[Array]) -> Array:
    """Return the sum over slides (rows) of values times weights."""
    found: Array = (weights * np.asarray(values)).sum(axis=0)
    return found
