"""Attribution: what each patch adds to each output, or how much each output depends on it.

Evidence: the terms of an output that is a sum over patches. Influence: its derivative by how often
a patch counts. Integrated gradients: Sundararajan, Taly, Yan: "Axiomatic Attribution for Deep
Networks", ICML 2017.
"""

from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from caprmil.errors import RunError
from caprmil.io.progress import Step
from caprmil.models import Evidence, MILModel
from caprmil.models.base import Cells
from caprmil.targets import Contrast

Method: TypeAlias = Literal["exact", "integrated gradients", "perturbation"]
METHODS: tuple[Method, ...] = ("exact", "integrated gradients", "perturbation")

STEPS, MAX_STEPS = 4, 32  # of the integral in integrated gradients
TOLERANCE = 0.01  # the error of that integral, as a share of the change along the path

SHARE = 0.05  # of the patches in a sample
LEAST, MOST = 16, 1024  # patches in a sample
DRAWS, FEW_DRAWS = 24, 4  # samples; few are enough if they are large
LARGE = 256  # patches in a large sample

Features: TypeAlias = Float[Tensor, "1 N E"]
Directions: TypeAlias = Float[Tensor, "K C"]  # linear functions of the outputs
Terms: TypeAlias = Float[Tensor, "N K"]


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


def sampled_influence(
    model: MILModel,
    features: Features,
    grid: Cells | None = None,
    directions: Directions | None = None,
) -> Terms:
    """Return how much each logit rises if a patch is added to a small sample of its slide.

    It is the derivative by how often the patch counts, as a mean over random samples. In the whole
    slide, other patches of the same kind hide the effect of a single one; in a small sample they
    are rare. It is a semivalue of small coalitions (Kwon, Zou: "Beta Shapley", AISTATS 2022), to
    first order, on the scale of `log_scale`.
    """
    samples = draw_samples(features.shape[1])
    found = model.eval().influence(features, grid, samples=samples, directions=directions)
    return log_scale(found)


def log_scale(terms: Terms) -> Terms:
    """Return values on a signed logarithmic scale, in units of their median. The order is the same.

    Single derivatives are huge, e.g. by the first patch of a token that has none in a sample. On a
    linear scale they would hide all others.
    """
    sizes = terms.abs()
    unit = sizes.median(dim=0).values
    unit = torch.where(unit > 0, unit, sizes.mean(dim=0)).clamp(min=torch.finfo(terms.dtype).tiny)
    return terms.sign() * (sizes / unit).log1p()


def draw_samples(n: int, *, seed: int = 0) -> Int[Tensor, "R S"]:
    """Return random rows of a bag: samples of a twentieth of it, disjoint as far as possible."""
    size = min(max(round(SHARE * n), LEAST), MOST, max(n // 2, 1))
    draws = FEW_DRAWS if size >= LARGE else DRAWS
    rng = np.random.default_rng([seed, n])
    rows = list[NDArray[np.int64]]()
    while len(rows) < draws:
        order = rng.permutation(n)
        rows += [order[start : start + size] for start in range(0, n - size + 1, size)]
    return torch.from_numpy(np.stack(rows[:draws]))


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
    directions: Directions | None = None,
    *,
    steps: int | None = None,
    progress: Step | None = None,
) -> Evidence:
    """Return integrated gradients, summed over features. The baseline is the bag's mean patch.

    The integral has as few Gauss-Legendre steps as keep its error below 1 %, at most 32, or the
    given number. The rest is the logits of a bag in which every patch is the mean; terms and rest
    miss the logits by the error of the integral. With `directions`, all are linear functions of the
    logits, which saves work if there are fewer of them.
    """
    features = features.to(next(model.parameters()).dtype)
    baseline = features.mean(dim=1, keepdim=True).expand_as(features)
    with torch.no_grad():
        start, end = _logits(model, baseline, grid), _logits(model, features, grid)
    if directions is None:
        directions = torch.eye(len(end), device=features.device)
    directions = directions.to(end)
    change = directions @ (end - start)
    number = steps or STEPS
    while True:
        terms = _integrate(model, features, baseline, grid, directions, number, progress)
        error = (terms.sum(dim=0) - change).abs().max()
        if steps or number >= MAX_STEPS or error <= TOLERANCE * change.abs().max():
            break
        number *= 2
    return Evidence(terms=terms, rest=directions @ start)


def _integrate(
    model: MILModel,
    features: Features,
    baseline: Features,
    grid: Cells | None,
    directions: Float[Tensor, "K C"],
    steps: int,
    progress: Step | None,
) -> Float[Tensor, "N K"]:
    """Return the integral of the gradient of each direction along the path from the baseline."""
    path = features - baseline
    places, weights = np.polynomial.legendre.leggauss(steps)
    terms = torch.zeros(features.shape[1], len(directions), device=features.device)
    for step, (place, weight) in enumerate(zip((places + 1) / 2, weights / 2, strict=True)):
        point = (baseline + float(place) * path).requires_grad_()
        values = directions @ _logits(model, point, grid)
        for number, value in enumerate(values):
            more = number < len(values) - 1
            (gradient,) = torch.autograd.grad(value, point, retain_graph=more)
            terms[:, number] += float(weight) * (gradient * path).sum(dim=-1)[0]
        if progress:
            progress(step + 1, steps)
    return terms


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
