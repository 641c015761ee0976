"""Inference: the answers of trained models for bags, in memory or read in chunks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.errors import BagError
from caprmil.features import bag_files, bags, batches
from caprmil.features.bag_files import BagFiles
from caprmil.features.bags import Bag, BagInfo
from caprmil.features.batches import Cache, Sample
from caprmil.models import MILModel
from caprmil.models.base import Chunks
from caprmil.targets import Target

LARGE = 2**30  # bytes of a bag in float32 beyond which it is read in chunks
KEEPABLE = 400_000  # patches whose projections a model may keep between two passes over a bag


class TrainedModel(NamedTuple):
    """A model, and the target that turns its outputs into answers."""

    model: MILModel
    target: Target

    def answer(self, outputs: torch.Tensor) -> NDArray[np.float64]:
        """Return the answers of outputs, in float64."""
        answers: NDArray[np.float64] = self.target.answer(outputs.detach().cpu().double()).numpy()
        return answers


@torch.no_grad()
def predict_batch(
    trained: TrainedModel, batch: batches.Batch, device: torch.device
) -> NDArray[np.float64]:
    """Return the answers for a batch of bags."""
    answers = trained.answer(trained.model.eval()(**_inputs(batch, device)).logits)
    for slide, answer in zip(batch.slides, answers, strict=True):
        if not np.isfinite(answer).all():
            raise no_number("answer", slide, float(batch.features.abs().max()))
    return answers


def _inputs(batch: batches.Batch, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of a model on a device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.inputs.items()
    }


@torch.no_grad()
def complete_target(
    trained: TrainedModel,
    samples: Sequence[Sample],
    *,
    cache: Cache | None = None,
    device: torch.device | str = "cpu",
) -> TrainedModel:
    """Return a model with its target, after it has got the outputs for the training slides."""
    if not trained.target.completes:
        return trained
    device, loader = torch.device(device), batches.load(samples, cache=cache)
    model = trained.model.to(device).eval()
    outputs = [model(**_inputs(batch, device)).logits.cpu().double() for batch in loader]
    labels = trained.target.as_labels(sample.label for sample in samples)
    return trained._replace(target=trained.target.complete(torch.cat(outputs), labels))


def predict_file(
    trained: Sequence[TrainedModel], files: BagFiles, device: torch.device
) -> NDArray[np.float64]:
    """Return the answer of each model for the bag in a file, or in the files of a patient.

    A large bag is read in chunks, a few times over, if the models allow it.
    """
    if not is_large(bag_files.inspect(files)) or not all(each.model.streams for each in trained):
        name = bag_files.paths_of(files)[0].stem
        batch = batches.collate([(Sample(name, files), bag_files.read(files))])
        return np.concatenate([predict_batch(each, batch, device) for each in trained])
    with bag_files.streaming(files) as stream:
        return np.concatenate([predict_stream(each, stream, device) for each in trained])


def is_large(info: BagInfo) -> bool:
    """Return whether a bag is better read in chunks."""
    return 4 * info.n_patches * info.width > LARGE


def may_keep(info: BagInfo) -> bool:
    """Return whether a model may keep projections of patches while it reads a bag in chunks."""
    return info.n_patches <= KEEPABLE


def predict_stream(
    trained: TrainedModel, stream: bags.Stream, device: torch.device
) -> NDArray[np.float64]:
    """Return the answer for a bag that is read in chunks."""
    chunks = chunks_of(stream, device)
    output = trained.model.eval().to(device).stream(chunks, keep=may_keep(stream.info))
    answers = trained.answer(output.logits)
    if not np.isfinite(answers).all():
        raise no_number("answer", str(stream.info.path), largest_feature(stream))
    return answers


def no_number(what: str, slide: str, largest: float) -> BagError:
    """Return the error of a slide for which a model computes something that is not a number."""
    return BagError(
        f"{slide} has no {what}: the model computes no finite number from its features, which go "
        f"up to {largest:.3g}. Extract them again. If no slide has one, train the model again."
    )


def largest_feature(bag: Bag | bags.Stream) -> float:
    """Return the largest feature of a bag, in memory or in chunks."""
    parts = [bag.features] if isinstance(bag, Bag) else bag()
    return max((float(np.abs(part).max()) for part in parts if part.size), default=0.0)


def chunks_of(stream: bags.Stream, device: torch.device) -> Chunks:
    """Return the chunks of an open bag as a model takes them."""
    return lambda: (torch.from_numpy(chunk)[None].to(device) for chunk in stream())


def predict_each(
    trained: TrainedModel,
    samples: Sequence[Sample],
    failed: dict[str, BagError],
    *,
    cache: Cache | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, NDArray[np.float64]]:
    """Return the answer for each slide. Slides without one are added to `failed`."""
    if len(samples) > 1:
        try:
            found = predict_samples(trained, samples, cache=cache, device=device)
            return dict(zip((sample.slide for sample in samples), found, strict=True))
        except BagError:  # which ones, is found one by one
            pass
    answers = {}
    for sample in samples:
        try:
            found = predict_samples(trained, [sample], cache=cache, device=device)
            answers[sample.slide] = found[0]
        except BagError as problem:
            failed[sample.slide] = problem
    return answers


def report_failed(
    problems: Mapping[str, BagError], failed: dict[str, BagError] | None, slides: int
) -> None:
    """Add slides without an answer to those of the caller, or log them; raise if all are."""
    if problems and len(problems) == slides:
        raise BagError(f"None of these bags has an answer. {next(iter(problems.values()))}")
    if failed is not None:
        failed.update(problems)
        return
    for problem in problems.values():
        logging.getLogger("caprmil").error("not predicted: %s", problem)


def predict_samples(
    trained: TrainedModel,
    samples: Sequence[Sample],
    *,
    cache: Cache | None = None,
    device: torch.device | str = "cpu",
) -> NDArray[np.float64]:
    """Return the answers for many slides, bag by bag."""
    device = torch.device(device)
    trained.model.to(device)
    loader = batches.load(samples, cache=cache)
    return np.concatenate([predict_batch(trained, batch, device) for batch in loader])
