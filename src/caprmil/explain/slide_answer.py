"""The answer of a run for a slide: the mean over the models that have not seen it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.explain.slide_reference import SlideReference
from caprmil.features import batches
from caprmil.features.bags import Bag, Stream
from caprmil.features.batches import Sample
from caprmil.models import MILModel
from caprmil.runs.inference import TrainedModel, predict_batch, predict_stream
from caprmil.runs.run import Run


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
    chosen = {}
    for name in names:
        model = run.for_slide(loaded.get(name) or run.model(name), reference.name)
        chosen[name] = TrainedModel(model.to(device), run.fold_target(name))
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
