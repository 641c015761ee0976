"""Checks: the promises of a model, measured on a user's own weights and bags."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isnan

import torch
import torch.nn.functional as F
from torch import Tensor

from caprmil.features import bag_files
from caprmil.features.bag_files import BagFiles
from caprmil.io.leftovers import temporary_folder
from caprmil.models import MILModel, average_slide
from caprmil.runs.inference import TrainedModel

TOLERANCE = 1e-4
"""Largest deviation of an answer. Sums in another order differ by less, errors by more."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The largest deviation of an answer that was found."""

    promise: str
    deviation: float | None  # None where the model does not offer it

    @property
    def holds(self) -> bool:
        return self.deviation is None or self.deviation <= TOLERANCE


def check(trained: TrainedModel, paths: Sequence[BagFiles]) -> list[Finding]:
    """Measure every promise on these bags. Covariates are those of the average slide."""
    trained.model.cpu().eval()
    seen: dict[str, list[float]] = {promise: [] for promise in PROMISES}
    for path in paths:
        bag = bag_files.read(path)
        features, cells = torch.from_numpy(bag.features)[None], bag.grid()
        grid = None if cells is None else torch.from_numpy(cells)[None]
        before = _predict(trained, features, grid)
        for promise, predict in PROMISES.items():
            try:
                apart = predict(trained, features, grid) - before
                deviation = float((apart.abs() / torch.from_numpy(trained.target.scales)).max())
            except NotImplementedError:
                continue
            seen[promise].append(inf if isnan(deviation) else deviation)
    return [
        Finding(promise=promise, deviation=max(deviations, default=None))
        for promise, deviations in seen.items()
    ]


@torch.no_grad()
def _predict(
    trained: TrainedModel, features: Tensor, grid: Tensor | None, mask: Tensor | None = None
) -> Tensor:
    model = average_slide(trained.model)
    return trained.target.answer(model(features, mask=mask, grid=grid).logits)


def _padding(trained: TrainedModel, features: Tensor, grid: Tensor | None) -> Tensor:
    n, more = features.shape[1], features.shape[1] // 2 + 1
    padded = F.pad(features, (0, 0, 0, more), value=7.0)
    cells = None if grid is None else F.pad(grid, (0, 0, 0, more))  # all in the first cell
    return _predict(trained, padded, cells, torch.arange(n + more)[None] < n)


def _order(trained: TrainedModel, features: Tensor, grid: Tensor | None) -> Tensor:
    if trained.model.order_matters:
        raise NotImplementedError
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(features.shape[1], generator=generator)
    return _predict(trained, features[:, order], None if grid is None else grid[:, order])


def _precision(trained: TrainedModel, features: Tensor, grid: Tensor | None) -> Tensor:
    return _predict(trained._replace(model=deepcopy(trained.model).double()), features, grid)


def _chunks(trained: TrainedModel, features: Tensor, _: Tensor | None) -> Tensor:
    size = features.shape[1] // 7 + 1
    chunks = average_slide(trained.model).stream(lambda: torch.split(features, size, dim=1))
    return trained.target.answer(chunks.logits)


def _reload(trained: TrainedModel, features: Tensor, grid: Tensor | None) -> Tensor:
    with temporary_folder() as folder:
        trained.model.save_pretrained(folder)
        loaded = trained._replace(model=MILModel.from_pretrained(folder))
        return _predict(loaded, features, grid)


PROMISES: dict[str, Callable[[TrainedModel, Tensor, Tensor | None], Tensor]] = {
    "predicting twice": _predict,
    "padding": _padding,
    "order of patches": _order,
    "double precision": _precision,
    "bag in chunks": _chunks,
    "saving and loading": _reload,
}
