"""The tokens of one model on one slide: usage, most typical patches, and effect on the answer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caprmil.errors import RunError
from caprmil.explain.slide_reference import SlideReference
from caprmil.explain.token_matching import Moments, match_tokens
from caprmil.features import bag_files
from caprmil.features.bags import Bag, BagInfo, Stream
from caprmil.models import MILModel, Output
from caprmil.models.token_removal import TokenRemoval
from caprmil.runs.inference import chunks_of, is_large, may_keep
from caprmil.targets import Target

PER_SLIDE = 2  # typical patches of a token that are kept of one slide


@dataclass(frozen=True, eq=False, kw_only=True)
class SlideTokens:
    """What the tokens of a model do on one slide. Arrays start with (T, H, M)."""

    info: BagInfo
    usage: NDArray[np.float64]  # the share of the patches that is assigned to each token
    effect: NDArray[np.float64]  # how far the contrast of the answer falls without the token
    turned: NDArray[np.bool_]  # whether another contrast is predicted without the token
    predicted: int  # the contrast of the answer
    weights: NDArray[np.float64]  # (T, H, M, k): the highest assignments; -1 where there is none
    rows: NDArray[np.int64]  # (T, H, M, k): their patches
    coords: NDArray[Any] | None  # (T, H, M, k, 2): where these are, as in the bag


def check_tokens(model: MILModel) -> tuple[int, int, int]:
    """Return blocks, heads and tokens of a model; raise if it has no tokens."""
    shape = model.token_shape
    if shape is None:
        raise RunError(
            f"{model.title} has no tokens. Only CAPRMIL with at least one context block has them: "
            "train it (caprmil train), or see caprmil explain for the maps of this model."
        )
    return shape


@contextmanager
def opened_bag(reference: SlideReference) -> Iterator[Bag | Stream]:
    """Yield the bag of a slide, in memory or, if it is large, as a stream."""
    if is_large(bag_files.inspect(reference.bag)):
        with bag_files.streaming(reference.bag) as stream:
            yield stream
    else:
        yield bag_files.read(reference.bag)


def remove_tokens(
    model: MILModel, bag: Bag | Stream, device: torch.device | str = "cpu"
) -> TokenRemoval:
    """Return a bag, to be evaluated without the messages of some tokens."""
    device, cells = torch.device(device), bag.grid()
    grid = None if cells is None else torch.from_numpy(cells).to(device)
    if isinstance(bag, Stream):
        chunks = chunks_of(bag, device)
    else:
        features = torch.from_numpy(bag.features)[None].to(device)
        chunks = lambda: [features]  # noqa: E731
    return model.eval().to(device).token_removal(chunks, grid=grid, keep=may_keep(bag.info))


def slide_tokens(
    model: MILModel,
    bag: Bag | Stream,
    *,
    target: Target,
    moments: list[Moments] | None = None,
    device: torch.device | str = "cpu",
) -> SlideTokens:
    """Measure the tokens of a model on one slide.

    The effect of a token is exact: the slide is predicted without its message, token by token.
    `moments` has an entry per block, to which the assignments are added.
    """
    shape = check_tokens(model)
    removal = remove_tokens(model, bag, device)
    usage, weights, rows = [], [], []
    for block in range(shape[0]):
        total, top = torch.zeros(()), TopRows(PER_SLIDE)
        for chunk in removal.assignments(block):
            total = total + chunk.sum(dim=0, dtype=torch.float64).cpu()
            top.add(chunk.cpu())
            if moments is not None:
                flat = chunk.flatten(1).cpu().numpy()
                moments[block].add(flat, flat)
        usage.append((total / bag.info.n_patches).numpy())
        weights.append(top.values.numpy())
        rows.append(top.rows.numpy())
    effect, turned, predicted = token_effects(removal, target)
    best = np.stack(rows)
    return SlideTokens(
        info=bag.info,
        usage=np.stack(usage),
        effect=effect,
        turned=turned,
        predicted=predicted,
        weights=np.stack(weights),
        rows=best,
        coords=None if bag.coords is None else bag.coords[best.clip(min=0)],
    )


def token_effects(
    removal: TokenRemoval, target: Target
) -> tuple[NDArray[np.float64], NDArray[np.bool_], int]:
    """Return the effect of each token, whether the answer turns without it, and the answer.

    The answer is the number of the contrast that is predicted with all tokens. The effect is how
    far its value falls: above 0 if the token supports the answer.
    """
    shape = check_tokens(removal.model)
    outputs = _outputs(removal.output().logits)
    predicted = _predicted(outputs, target)
    contrast = target.contrasts[predicted]
    before = float(contrast.of(outputs))
    effect, turned = np.zeros(shape), np.zeros(shape, dtype=bool)
    for index in np.ndindex(*shape):
        after = _outputs(removal.without_token(*index).logits)
        effect[index] = before - float(contrast.of(after))
        turned[index] = _predicted(after, target) != predicted
    return effect, turned, predicted


def outputs_without(
    models: Mapping[str, MILModel],
    bag: Bag | Stream,
    removed: NDArray[np.bool_],
    *,
    reference: str,
    device: torch.device | str = "cpu",
) -> dict[str, Output]:
    """Return the outputs of several models, by fold, without the messages of some tokens.

    `removed` (T, H, M) are tokens of the model of the fold `reference`. Of the other models, those
    tokens are removed to which this bag's patches are assigned most alike.
    """
    shape = check_tokens(models[reference])
    if removed.shape != shape:
        raise RunError(f"Tokens are given by block, head and token, {shape}, not {removed.shape}.")
    removals = {fold: remove_tokens(model, bag, device) for fold, model in models.items()}
    outputs = {}
    for fold, removal in removals.items():
        own = removed.reshape(shape[0], -1).copy()
        if fold != reference:
            for block, before in enumerate(removed.reshape(shape[0], -1)):
                sums = Moments()
                pairs = (removals[reference].assignments(block), removal.assignments(block))
                for one, other in zip(*pairs, strict=True):
                    sums.add(one.flatten(1).cpu().numpy(), other.flatten(1).cpu().numpy())
                own[block, match_tokens(sums.correlation()).tokens] = before
        outputs[fold] = removal.without(torch.from_numpy(own.reshape(shape)))
    return outputs


def sampled_assignments(
    model: MILModel, bag: Bag | Stream, rows: NDArray[np.int64], device: torch.device | str = "cpu"
) -> list[NDArray[np.float32]]:
    """Return the assignments of some patches to all tokens of each block: (rows, H M).

    `rows` are in order.
    """
    removal = remove_tokens(model, bag, device)
    found = []
    for block in range(check_tokens(model)[0]):
        start, parts = 0, []
        for chunk in removal.assignments(block):
            first, end = np.searchsorted(rows, [start, start + len(chunk)])
            parts.append(chunk.flatten(1)[rows[first:end] - start].float().cpu().numpy())
            start += len(chunk)
        found.append(np.concatenate(parts))
    return found


class TopRows:
    """The highest values of each column and their rows, over chunks of rows.

    Of equal values, the one of the first row is kept, whatever the chunks are.
    """

    def __init__(self, k: int) -> None:
        self.k, self.n = k, 0
        self.values, self.rows = torch.empty(0), torch.empty(0, dtype=torch.int64)

    def add(self, chunk: Tensor) -> None:
        """Add the rows of a chunk, (n, H, M); `values` and `rows` are (H, M, k)."""
        new = chunk.double().permute(1, 2, 0)
        rows = torch.arange(self.n, self.n + len(chunk)).expand(new.shape)
        if not self.n:
            self.values = new.new_full((*new.shape[:2], self.k), -1.0)
            self.rows = rows.new_full((*new.shape[:2], self.k), -1)
        self.n += len(chunk)
        values, rows = torch.cat([self.values, new], dim=-1), torch.cat([self.rows, rows], dim=-1)
        order = values.argsort(dim=-1, descending=True, stable=True)[..., : self.k]
        self.values, self.rows = values.gather(-1, order), rows.gather(-1, order)


def _outputs(logits: Tensor) -> NDArray[np.float64]:
    return logits[0].double().cpu().numpy()


def _predicted(outputs: NDArray[np.float64], target: Target) -> int:
    return target.contrast_of(target.answer(torch.from_numpy(outputs)).numpy())
