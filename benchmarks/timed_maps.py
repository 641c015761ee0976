"""Every map of one bag, and its CPU time as a multiple of a prediction."""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import torch
from numpy.typing import NDArray

from caprmil.explain.attribution import attribute, gradient_times_input, leave_one_out
from caprmil.explain.map_kinds import COMPUTED, available
from caprmil.models import MILModel
from caprmil.models.base import Cells
from caprmil.targets import Contrast

Map = NDArray[Any]


def timed_maps(
    model: MILModel, features: torch.Tensor, grid: Cells | None, contrast: Contrast
) -> tuple[dict[str, Map], dict[str, float]]:
    """Return the maps of one bag for a contrast, by name, and their costs."""
    model.eval()
    direction = contrast.of(torch.eye(model.n_outputs))[None]

    def predict() -> torch.Tensor:
        with torch.no_grad():
            return model(features, grid=None if grid is None else grid[None]).attention[0]

    computations: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(_first, COMPUTED[name], model, features, grid, direction)
        for name in available(model)
    }
    if model.evidence(features, grid) is not None:
        computations["evidence"] = lambda: contrast.of(attribute(model, features, grid)[0].terms)
    computations["perturbation"] = lambda: contrast.of(leave_one_out(model, features, grid).terms)
    computations["gradients"] = lambda: gradient_times_input(
        model, features, grid, contrast=contrast
    )
    computations["attention"] = predict
    predict()
    prediction = median(_seconds(predict)[1] for _ in range(5))
    found, costs = {}, {}
    for name, compute_map in computations.items():
        values, seconds = _seconds(compute_map)
        found[name], costs[name] = values.detach().numpy(), seconds / prediction
    return found, costs


def _first(compute: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    return compute(*inputs)[:, 0]


def _seconds(compute_map: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    start = process_time()
    return compute_map(), process_time() - start
