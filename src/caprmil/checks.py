"""Checks: the promises of a model, measured on the user's own weights and bags."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from caprmil import bags
from caprmil.models import MILModel

TOLERANCE = 1e-4
"""Of a probability. Sums in another order differ in the last digits, a broken promise by more."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The largest deviation of a probability that was seen."""

    promise: str
    deviation: float | None  # None where the model does not offer it

    @property
    def holds(self) -> bool:
        return self.deviation is None or self.deviation <= TOLERANCE


def check(model: MILModel, paths: Sequence[Path]) -> list[Finding]:
    """Measure every promise on these bags."""
    model = model.cpu().eval()
    seen: dict[str, list[float]] = {promise: [] for promise in PROMISES}
    for path in paths:
        bag = torch.from_numpy(bags.read(path).features)[None]
        before = _ask(model, bag)
        for promise, ask in PROMISES.items():
            try:
                deviation = float((ask(model, bag) - before).abs().max())
            except NotImplementedError:
                continue
            seen[promise].append(inf if isnan(deviation) else deviation)
    return [
        Finding(promise=promise, deviation=max(deviations, default=None))
        for promise, deviations in seen.items()
    ]


@torch.no_grad()
def _ask(model: MILModel, features: Tensor, mask: Tensor | None = None) -> Tensor:
    return model(features, mask=mask).logits.softmax(dim=-1)


def _padding(model: MILModel, bag: Tensor) -> Tensor:
    n, more = bag.shape[1], bag.shape[1] // 2 + 1
    junk = torch.full((1, more, bag.shape[2]), 7.0, dtype=bag.dtype)
    return _ask(model, torch.cat([bag, junk], dim=1), torch.arange(n + more)[None] < n)


def _order(model: MILModel, bag: Tensor) -> Tensor:
    if model.order_matters:
        raise NotImplementedError
    generator = torch.Generator().manual_seed(0)
    return _ask(model, bag[:, torch.randperm(bag.shape[1], generator=generator)])


def _precision(model: MILModel, bag: Tensor) -> Tensor:
    return _ask(deepcopy(model).double(), bag)


def _chunks(model: MILModel, bag: Tensor) -> Tensor:
    size = bag.shape[1] // 7 + 1
    return model.stream(lambda: torch.split(bag, size, dim=1)).softmax(dim=-1)


def _reload(model: MILModel, bag: Tensor) -> Tensor:
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _ask(MILModel.from_pretrained(folder), bag)


def _again(model: MILModel, bag: Tensor) -> Tensor:
    return _ask(model, bag)


PROMISES: dict[str, Callable[[MILModel, Tensor], Tensor]] = {
    "asking twice": _again,
    "padding": _padding,
    "order of patches": _order,
    "double precision": _precision,
    "bag in pieces": _chunks,
    "saving and loading": _reload,
}
