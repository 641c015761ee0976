"""An explained slide: the answer of a run to a slide, and the explanation by one of its models."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.explain.attribution import Method
from caprmil.explain.explanation import Explanation, can_stream, explain
from caprmil.explain.patch_boxes import PatchBoxes, open_slide, patch_boxes
from caprmil.explain.slide_reference import SlideReference
from caprmil.features import bags, batches
from caprmil.features.bags import Bag, Stream
from caprmil.features.batches import Sample
from caprmil.io.progress import Step
from caprmil.models import MILModel
from caprmil.models.device import pick_device
from caprmil.runs.inference import TrainedModel, is_large, predict_batch, predict_stream
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """The answer of a run for a slide: the mean over its models, as in `predict`."""

    mean: NDArray[np.float64]  # (A,), e.g. the probability of each class
    calibrated: NDArray[np.float64] | None  # the same with the temperature of each fold, if known
    by_fold: Mapping[str, NDArray[np.float64]]
    unseen: bool  # whether these models have not seen the slide in training

    @property
    def nearest(self) -> str:
        """The fold whose model is nearest to the mean. Its model is the one to explain."""
        return min(self.by_fold, key=lambda fold: abs(self.by_fold[fold] - self.mean).max())


@dataclass(frozen=True, eq=False, kw_only=True)
class ExplainedSlide:
    """A slide, the answer of a run to it, and the explanation by one model."""

    reference: SlideReference
    label: str | None  # the true class or value, if the run has it
    answer: Answer
    explanation: Explanation

    @property
    def name(self) -> str:
        return self.reference.name

    def open_slide(self) -> Slide | None:
        """Open the slide, if its file was found. The caller closes it."""
        path = self.reference.pixels
        return None if path is None else open_slide(path, self.explanation.info)

    def mpp(self, slide: Slide | None) -> float | None:
        """Return the microns per pixel at level 0, if they are known from the bag or the slide."""
        return self.explanation.info.slide_mpp or (
            slide.reported_mpp if slide is not None else None
        )

    def patch_boxes(self, slide: Slide | None = None) -> PatchBoxes | None:
        """Return where the patches are, if that is known from the bag and the slide's scale."""
        return patch_boxes(self.explanation.info, self.explanation.coords, self.mpp(slide))


def predict_slide(
    run: Run,
    reference: SlideReference,
    bag: Bag | Stream,
    *,
    fold: str | None = None,
    models: Mapping[str, MILModel] | None = None,
    device: torch.device | str = "cpu",
) -> Answer:
    """Predict a slide with the models that have not seen it, or with all of them if all have.

    `models` are those that are loaded already, by fold.
    """
    unseen = run.unseen_folds(reference.name, fold)
    names = [each.name for each in unseen or run.trained_folds(fold)]
    device, loaded = torch.device(device), models or {}
    chosen = {
        name: TrainedModel((loaded.get(name) or run.model(name)).to(device), run.fold_target(name))
        for name in names
    }
    if isinstance(bag, Stream):
        by_fold = {name: predict_stream(each, bag, device)[0] for name, each in chosen.items()}
    else:
        batch = batches.collate([(Sample(reference.name, bag), bag)])
        by_fold = {name: predict_batch(each, batch, device)[0] for name, each in chosen.items()}
    return Answer(
        mean=np.mean(list(by_fold.values()), axis=0),
        calibrated=run.calibrate(by_fold),
        by_fold=by_fold,
        unseen=bool(unseen),
    )


def explain_slide(
    run: Run,
    reference: SlideReference,
    *,
    fold: str | None = None,
    method: Method | None = None,
    force: bool = False,
    device: str = "auto",
    progress: Step | None = None,
) -> ExplainedSlide:
    """Predict a slide with a run, and explain the prediction.

    With several models, the explanation is that of the model nearest to their mean. `force` accepts
    a bag of another encoder or scale.
    """
    used = pick_device(device)
    info = bags.inspect(reference.bag)
    run.check_bag(reference.name, info, force=force)
    exact = method in (None, "exact")
    with ExitStack() as stack:
        bag: Bag | Stream
        if exact and is_large(info) and can_stream(run.model(run.trained_folds(fold)[0].name)):
            bag = stack.enter_context(bags.streaming(reference.bag))
        else:
            bag = bags.read(reference.bag)
        answer = predict_slide(run, reference, bag, fold=fold, device=used)
        explanation = explain(
            run.model(answer.nearest),
            bag,
            target=run.fold_target(answer.nearest),
            slide=reference.name,
            fold=answer.nearest,
            method=method,
            device=used,
            progress=progress,
        )
    return ExplainedSlide(
        reference=reference,
        label=label_of(run, reference.name),
        answer=answer,
        explanation=explanation,
    )


def label_of(run: Run, slide: str) -> str | None:
    """Return the label of a slide as text, if it is a test slide of the run."""
    if not run.finished or run.predictions.labels is None or slide not in run.predictions.slides:
        return None
    label = run.predictions.labels[run.predictions.slides.index(slide)]
    return run.target.show_label(label.item()) or None
