"""Inference: class probabilities of bags, whole or read in chunks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.features import bags, batches
from caprmil.features.bags import BagInfo
from caprmil.features.batches import Cache, Sample
from caprmil.models import MILModel
from caprmil.models.base import Chunks

LARGE = 2**30  # bytes of a bag in float32 beyond which it is read in pieces
KEEPABLE = 400_000  # patches of which a model may keep what it knows between two readings


@torch.no_grad()
def predict_batch(
    model: MILModel, batch: batches.Batch, device: torch.device
) -> NDArray[np.float64]:
    """Return the class probabilities of a batch of bags."""
    mask, grid = (None if t is None else t.to(device) for t in (batch.mask, batch.grid))
    output = model.eval()(batch.features.to(device), mask=mask, grid=grid, sizes=batch.sizes)
    probabilities: NDArray[np.float64] = output.logits.cpu().double().softmax(dim=-1).numpy()
    return probabilities


def predict_file(
    models: Sequence[MILModel], path: Path, device: torch.device
) -> NDArray[np.float64]:
    """Return the class probabilities that each model gives a bag's file.

    A large file is read piece by piece, a few times over, if the models can do with that.
    """
    if not is_large(bags.inspect(path)) or not all(model.streams for model in models):
        batch = batches.collate([(Sample(path.stem, path), bags.read(path))])
        return np.concatenate([predict_batch(model, batch, device) for model in models])
    with bags.streaming(path) as stream:
        return np.concatenate([predict_stream(model, stream, device) for model in models])


def is_large(info: BagInfo) -> bool:
    """Tell whether a bag is better read in pieces."""
    return 4 * info.n_patches * info.width > LARGE


def may_keep(info: BagInfo) -> bool:
    """Tell whether a model may keep what it knows of patches while it reads a bag in pieces."""
    return info.n_patches <= KEEPABLE


def predict_stream(
    model: MILModel, stream: bags.Stream, device: torch.device
) -> NDArray[np.float64]:
    """Return the class probabilities of a bag that is read piece by piece."""
    pieces = chunks_of(stream, device)
    output = model.eval().to(device).stream(pieces, keep=may_keep(stream.info))
    return np.asarray(output.logits.cpu().double().softmax(dim=-1).numpy())


def chunks_of(stream: bags.Stream, device: torch.device) -> Chunks:
    """Return the pieces of an open bag as a model takes them."""
    return lambda: (torch.from_numpy(piece)[None].to(device) for piece in stream())


def predict_samples(
    model: MILModel,
    samples: Sequence[Sample],
    *,
    cache: Cache | None = None,
    device: torch.device | str = "cpu",
) -> NDArray[np.float64]:
    """Return the class probabilities of many slides, bag by bag."""
    device = torch.device(device)
    model.to(device)
    return np.concatenate(
        [predict_batch(model, b, device) for b in batches.load(samples, cache=cache)]
    )
