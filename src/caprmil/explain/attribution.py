"""Attribution: what each patch adds to each logit. Exact where a logit is a sum, else an estimate.

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

Method: TypeAlias = Literal["exact", "integrated gradients", "perturbation"]
METHODS: tuple[Method, ...] = ("exact", "integrated gradients", "perturbation")

STEPS = 24  # on the way of integrated gradients

Bag: TypeAlias = Float[Tensor, "1 N E"]


def attribute(
    model: MILModel,
    features: Bag,
    grid: Cells | None = None,
    *,
    method: Method | None = None,
    progress: Step | None = None,
) -> tuple[Evidence, Method]:
    """Return what each patch adds to each logit of one bag, and how that was found.

    By default it is exact if the model is a sum over patches, and integrated gradients if not.
    Patches taken out one by one say little where many tell the same (docs/evidence.md), and do not
    sum to the logits.
    """
    model.eval()
    exact = model.evidence(features, grid) if method in (None, "exact") else None
    if exact is not None:
        return exact, "exact"
    if method == "exact":
        raise RunError(
            f"A logit of {type(model).__name__} is no sum over patches, so nothing exact can be "
            f"said of them. There are: {', '.join(METHODS[1:])}."
        )
    if method == "perturbation":
        return take_out(model, features, grid, progress=progress), "perturbation"
    return integrate(model, features, grid, progress=progress), "integrated gradients"


@torch.no_grad()
def take_out(
    model: MILModel, features: Bag, grid: Cells | None = None, *, progress: Step | None = None
) -> Evidence:
    """Return by how much each logit falls when a patch is taken out, one at a time.

    The rest is the answer less all of these: patches that stand for each other add up to nothing.
    """
    whole, n = _logits(model, features, grid), features.shape[1]
    if n == 1:  # nothing would be left
        return Evidence(terms=torch.zeros_like(whole)[None], rest=whole)
    every, terms = torch.arange(n, device=features.device), []
    for patch in range(n):
        others = every[every != patch]
        cells = None if grid is None else grid[others]
        terms.append(whole - _logits(model, features[:, others], cells))
        if progress:
            progress(patch + 1, n)
    found = torch.stack(terms)
    return Evidence(terms=found, rest=whole - found.sum(dim=0))


def integrate(
    model: MILModel,
    features: Bag,
    grid: Cells | None = None,
    *,
    steps: int = STEPS,
    progress: Step | None = None,
) -> Evidence:
    """Return integrated gradients, summed over features, on the way from the bag's mean patch.

    The rest is the answer to a bag in which every patch is the mean. What is missing to the whole
    answer is the error of the integral: it falls with more steps.
    """
    features = features.to(next(model.parameters()).dtype)
    start = features.mean(dim=1, keepdim=True).expand_as(features)
    way = features - start
    terms = torch.zeros(features.shape[1], model.n_outputs, device=features.device)
    for step in range(steps):
        here = (start + (step + 0.5) / steps * way).requires_grad_()
        logits = _logits(model, here, grid)
        for number, logit in enumerate(logits):
            last = number == len(logits) - 1
            (slope,) = torch.autograd.grad(logit, here, retain_graph=not last)
            terms[:, number] += (slope * way).sum(dim=-1)[0] / steps
        if progress:
            progress(step + 1, steps)
    with torch.no_grad():
        return Evidence(terms=terms, rest=_logits(model, start, grid))


def gradient(
    model: MILModel, features: Bag, grid: Cells | None = None, *, of: int
) -> Float[Tensor, " N"]:
    """Return the gradient of a class's lead over the others, times the patch, summed over both."""
    here = features.to(next(model.parameters()).dtype).detach().requires_grad_()
    lead = lead_of(_logits(model.eval(), here, grid), of)
    (slope,) = torch.autograd.grad(lead, here)
    return (slope * here.detach()).sum(dim=-1)[0]


def lead_of(values: Float[Tensor, "*rows C"], of: int) -> Float[Tensor, "*rows"]:
    """Return how far a class lies before the mean of the others."""
    n = values.shape[-1]
    return (values[..., of] * n - values.sum(dim=-1)) / (n - 1)


def _logits(model: MILModel, features: Bag, grid: Cells | None) -> Float[Tensor, " C"]:
    output = model(features, grid=None if grid is None else grid[None])
    return output.logits[0].float()
