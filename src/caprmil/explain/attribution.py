"""Attribution: how much each patch adds to each logit, exact where a logit is a sum over patches.

Integrated gradients: Sundararajan, Taly, Yan: "Axiomatic Attribution for Deep Networks", ICML 2017.
"""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from caprmil.errors import RunError
from caprmil.io.progress import Step
from caprmil.models import Evidence, MILModel
from caprmil.models.base import Cells
from caprmil.targets import Contrast

Method: TypeAlias = Literal["exact", "integrated gradients", "perturbation"]
METHODS: tuple[Method, ...] = ("exact", "integrated gradients", "perturbation")

STEPS = 24  # of the integral in integrated gradients

Features: TypeAlias = Float[Tensor, "1 N E"]


def attribute(
    model: MILModel,
    features: Features,
    grid: Cells | None = None,
    *,
    method: Method | None = None,
    progress: Step | None = None,
) -> tuple[Evidence, Method]:
    """Return what each patch of a bag adds to each logit, and the method that was used.

    By default it is exact if the model is a sum over patches, and integrated gradients if not.
    Perturbation leaves out one patch at a time. It shows little where patches are redundant
    (docs/evidence.md), and its terms do not sum to the logits.
    """
    model.eval()
    exact = model.evidence(features, grid) if method in (None, "exact") else None
    if exact is not None:
        return exact, "exact"
    if method == "exact":
        raise RunError(
            f"A logit of {type(model).__name__} is not a sum over patches, so it has no exact "
            f"evidence. Choose one of: {', '.join(METHODS[1:])}."
        )
    if method == "perturbation":
        return leave_one_out(model, features, grid, progress=progress), "perturbation"
    return integrated_gradients(model, features, grid, progress=progress), "integrated gradients"


@torch.no_grad()
def leave_one_out(
    model: MILModel, features: Features, grid: Cells | None = None, *, progress: Step | None = None
) -> Evidence:
    """Return the decrease of each logit when a patch is left out, one patch at a time.

    The rest is the logits minus the sum of these terms. Redundant patches have terms near zero.
    """
    logits, n = _logits(model, features, grid), features.shape[1]
    if n == 1:  # an empty bag has no logits
        return Evidence(terms=torch.zeros_like(logits)[None], rest=logits)
    rows, terms = torch.arange(n, device=features.device), []
    for patch in range(n):
        others = rows[rows != patch]
        cells = None if grid is None else grid[others]
        terms.append(logits - _logits(model, features[:, others], cells))
        if progress:
            progress(patch + 1, n)
    stacked = torch.stack(terms)
    return Evidence(terms=stacked, rest=logits - stacked.sum(dim=0))


def integrated_gradients(
    model: MILModel,
    features: Features,
    grid: Cells | None = None,
    *,
    steps: int = STEPS,
    progress: Step | None = None,
) -> Evidence:
    """Return integrated gradients, summed over features. The baseline is the bag's mean patch.

    The rest is the logits of a bag in which every patch is the mean. Terms and rest miss the logits
    by the error of the integral, which falls with more steps.
    """
    features = features.to(next(model.parameters()).dtype)
    baseline = features.mean(dim=1, keepdim=True).expand_as(features)
    path = features - baseline
    terms = torch.zeros(features.shape[1], model.n_outputs, device=features.device)
    for step in range(steps):
        point = (baseline + (step + 0.5) / steps * path).requires_grad_()
        logits = _logits(model, point, grid)
        for number, logit in enumerate(logits):
            last = number == len(logits) - 1
            (gradient,) = torch.autograd.grad(logit, point, retain_graph=not last)
            terms[:, number] += (gradient * path).sum(dim=-1)[0] / steps
        if progress:
            progress(step + 1, steps)
    with torch.no_grad():
        return Evidence(terms=terms, rest=_logits(model, baseline, grid))


def gradient_times_input(
    model: MILModel, features: Features, grid: Cells | None = None, *, contrast: Contrast
) -> Float[Tensor, " N"]:
    """Return the gradient of a contrast, times the features, summed over each patch."""
    point = features.to(next(model.parameters()).dtype).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(contrast.of(_logits(model.eval(), point, grid)), point)
    return (gradient * point.detach()).sum(dim=-1)[0]


def _logits(model: MILModel, features: Features, grid: Cells | None) -> Float[Tensor, " C"]:
    output = model(features, grid=None if grid is None else grid[None])
    return output.logits[0].float()
