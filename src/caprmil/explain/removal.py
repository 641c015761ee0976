"""Removal: how the answer for a slide changes without the patches that a map marks most."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caprmil.explain.explanation import Explanation
from caprmil.features.bags import Bag, Stream
from caprmil.models import MILModel
from caprmil.models.base import Chunks
from caprmil.runs.inference import chunks_of, may_keep

SHARE = 0.1  # of the patches that are removed


@dataclass(frozen=True, kw_only=True)
class RemovalEffect:
    """The answer of a model for a slide: whole, without the top patches of a map, and at random."""

    map: str
    followed: str  # the contrast, e.g. the class
    number: str  # what the answer is, e.g. a probability
    share: float  # of the patches that are removed
    before: float
    after: float
    random: float  # if as many patches are removed at random

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> str:
        """Return a sentence for readers."""
        what = answer_words(self.number, self.followed)
        before, after, random = (
            show_answer(self.number, value) for value in (self.before, self.after, self.random)
        )
        share = f"{100 * self.share:g}\u00a0%"
        change = "lowers" if self.after < self.before else "raises"
        effect = f"{change} the {what} from {before} to {after}"
        if before == after:
            effect = f"leaves the {what} at {before}"
        return (
            f"Removing the {share} of patches that it marks most {effect}; removing {share} at "
            f"random: {random}."
        )


ONE_NUMBER = {"value": "predicted value", "risk": "risk"}
"""What a number is called of which an answer has one, for its only contrast."""


def answer_words(number: str, followed: str) -> str:
    """Return what the answer of a contrast is, in words: e.g. the probability of a class."""
    return ONE_NUMBER.get(number, f"{number} of {followed}")


def show_answer(number: str, value: float) -> str:
    """Return a number of an answer as text. A value is in the units of the labels, of any size."""
    return format(value, ".3g" if number == "value" else ".2f")


def removal_effect(
    model: MILModel,
    bag: Bag | Stream,
    explanation: Explanation,
    *,
    share: float = SHARE,
    device: torch.device | str = "cpu",
) -> RemovalEffect | None:
    """Return what the first map of an explanation is worth on its slide. None for a single patch.

    Costs two predictions: without its top patches, and without as many at random.
    """
    n, of, target = len(explanation), explanation.predicted, explanation.target
    if n < 2:
        return None
    count = min(max(round(share * n), 1), n - 1)
    values = explanation.values(explanation.first, of)
    ties = np.random.default_rng(0).permutation(n)
    most, drawn = np.lexsort((ties, -values))[:count], ties[:count]

    def answer_without(rows: NDArray[np.int64]) -> float:
        kept = np.ones(n, dtype=np.bool_)
        kept[rows] = False
        outputs = outputs_of(model, bag, kept, torch.device(device))
        return float(target.followed(target.answer(outputs.cpu().double()))[of])

    return RemovalEffect(
        map=explanation.first,
        followed=explanation.names[of],
        number=target.number_name,
        share=share,
        before=float(target.followed(explanation.answer)[of]),
        after=answer_without(most),
        random=answer_without(drawn),
    )


@torch.no_grad()
def outputs_of(
    model: MILModel, bag: Bag | Stream, kept: NDArray[np.bool_], device: torch.device
) -> Tensor:
    """Return the outputs (C,) of a model for the patches that are kept, also if read in chunks."""
    if isinstance(bag, Stream):
        chunks = _kept_chunks(chunks_of(bag, device), kept)
        return model.stream(chunks, keep=may_keep(bag.info)).logits[0]
    rest = bag.select(kept)
    cells = rest.grid()
    grid = None if cells is None else torch.from_numpy(cells)[None].to(device)
    return model(torch.from_numpy(rest.features)[None].to(device), grid=grid).logits[0]


def _kept_chunks(chunks: Chunks, kept: NDArray[np.bool_]) -> Chunks:
    def read() -> Iterator[Tensor]:
        first = 0
        for features in chunks():
            rows = torch.from_numpy(kept[first : first + features.shape[1]]).to(features.device)
            first += features.shape[1]
            if rows.any():
                yield features[:, rows]

    return read
