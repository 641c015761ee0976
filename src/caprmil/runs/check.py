"""Checks: the promises of a model, measured on the user's own weights and bags."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

from caprmil.features import bags
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
        bag = bags.read(path)
        features, cells = torch.from_numpy(bag.features)[None], bag.grid()
        grid = None if cells is None else torch.from_numpy(cells)[None]
        before = _ask(model, features, grid)
        for promise, ask in PROMISES.items():
            try:
                deviation = float((ask(model, features, grid) - before).abs().max())
            except NotImplementedError:
                continue
            seen[promise].append(inf if isnan(deviation) else deviation)
    return [
        Finding(promise=promise, deviation=max(deviations, default=None))
        for promise, deviations in seen.items()
    ]


@torch.no_grad()
def _ask(
    model: MILModel, features: Tensor, grid: Tensor | None, mask: Tensor | None = None
) -> Tensor:
    return model(features, mask=mask, grid=grid).logits.softmax(dim=-1)


def _padding(model: MILModel, features: Tensor, grid: Tensor | None) -> Tensor:
    n, more = features.shape[1], features.shape[1] // 2 + 1
    padded = F.pad(features, (0, 0, 0, more), value=7.0)
    cells = None if grid is None else F.pad(grid, (0, 0, 0, more))  # all in the first cell
    return _ask(model, padded, cells, torch.arange(n + more)[None] < n)


def _order(model: MILModel, features: Tensor, grid: Tensor | None) -> Tensor:
    if model.order_matters:
        raise NotImplementedError
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(features.shape[1], generator=generator)
    return _ask(model, features[:, order], None if grid is None else grid[:, order])


def _precision(model: MILModel, features: Tensor, grid: Tensor | None) -> Tensor:
    return _ask(deepcopy(model).double(), features, grid)


def _chunks(model: MILModel, features: Tensor, _: Tensor | None) -> Tensor:
    size = features.shape[1] // 7 + 1
    return model.stream(lambda: torch.split(features, size, dim=1)).logits.softmax(dim=-1)


def _reload(model: MILModel, features: Tensor, grid: Tensor | None) -> Tensor:
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _ask(MILModel.from_pretrained(folder), features, grid)


PROMISES: dict[str, Callable[[MILModel, Tensor, Tensor | None], Tensor]] = {
    "asking twice": _ask,
    "padding": _padding,
    "order of patches": _order,
    "double precision": _precision,
    "bag in pieces": _chunks,
    "saving and loading": _reload,
}
