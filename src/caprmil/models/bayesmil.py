"""BayesMIL: attention scores and layer weights are random variables.

Cui, Liu, Liu, Liu, Wang, Kuo, Xue, Chan: "Bayes-MIL: A New Probabilistic Perspective on
Attention-based Multiple Instance Learning for Whole Slide Images", ICLR 2023. The layer is that of
Molchanov, Ashukha, Vetrov: "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017.

One more axis in this file: R draws.
"""

import math
from dataclasses import replace
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from caprmil.errors import BagError, RecipeError, UnknownNameError
from caprmil.models.base import (
    Cells,
    Counts,
    Evidence,
    Features,
    Labels,
    MILModel,
    Output,
    Uncertainty,
    evidence_of_sum,
)
from caprmil.models.layers import (
    content_order,
    seeded,
    summing_dtype,
    weighted_sum,
)
from caprmil.models.products import Linear, linear

ROWS = 4096  # draws times patches per chunk, so that memory does not grow with the draws
MAX_LOG_VARIANCE = 10.0  # in absolute value
SIGMA = 0.5  # of the Gaussian filter over neighbouring cells

WEIGHTS_KL, ATTENTION_KL = 1e-8, 1e-12  # weights of the two terms in the loss
PRIORS: dict[str, tuple[tuple[float, float], ...]] = {
    "none": (),
    "detection": ((-5.0, -1.0), (0.0, 3.0)),  # without tumour: low; with tumour: wide
    "subtyping": ((3.0, 5.0),),
}
"""Prior mean and log-variance of the attention, per label, or one pair for all labels."""

Drawn: TypeAlias = Float[Tensor, "R N"]


class Noise:
    """Antithetic standard normal noise for R draws: every second draw is minus the one before.

    Each draw is standard normal. In the mean over draws, odd functions of the noise cancel, and
    only half of the numbers are generated.
    """

    def __init__(self, draws: int, like: Tensor, generator: torch.Generator | None) -> None:
        self.draws, self.like, self.generator = draws, like, generator

    def __call__(self, *shape: int) -> Float[Tensor, "R ..."]:
        # In float32 for every precision of the model: another one would draw other numbers.
        half = torch.randn(
            (self.draws + 1) // 2, 1, *shape, generator=self.generator, device=self.like.device
        ).to(self.like.dtype)
        signs = half.new_tensor([1.0, -1.0][: self.draws]).reshape(-1, *[1] * len(shape))
        return (half * signs).flatten(0, 1)[: self.draws]


class VariationalLinear(nn.Module):
    """A linear layer with Gaussian weights; their variance is alpha times their squared mean."""

    def __init__(self, in_dim: int, out_dim: int, *, log_alpha: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_dim, in_dim) * 0.01)
        self.log_alpha = nn.Parameter(torch.full((out_dim, in_dim), log_alpha))
        self.bias = nn.Parameter(torch.zeros(out_dim))

    def forward(
        self, inputs: Float[Tensor, "#R N A"], noise: Noise | None
    ) -> Float[Tensor, "R N O"]:
        """Return a draw of each output (local reparameterisation), or without noise the mean."""
        mean = linear(inputs, self.weight, self.bias)
        if noise is None:
            return mean
        return torch.addcmul(mean, self.std(inputs).to(mean.dtype), noise(*mean.shape[1:]))

    def std(self, inputs: Float[Tensor, "*batch A"]) -> Float[Tensor, "*batch O"]:
        """Return the standard deviations of the outputs, in float32 or better."""
        dtype = summing_dtype(inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            variances = self.log_alpha.to(dtype).exp() * self.weight.to(dtype).square() + 1e-8
            # The lower bound is for inputs that are all zero, where a root has no gradient.
            squares = inputs.to(dtype).square()
            return linear(squares, variances, None).clamp(min=1e-16).sqrt()

    def kl(self) -> Float[Tensor, ""]:
        """Return the KL divergence from a log-uniform prior: sum over outputs, mean over inputs."""
        gaussian = 0.6134 * (-(0.2026 + 0.7126 * self.log_alpha).square()).exp()
        return (0.5 * F.softplus(-self.log_alpha) - gaussian).mean(dim=1).sum()


class BayesMIL(MILModel):
    """Gated attention with a mean and a variance per patch; `spatial` smooths the means.

    In evaluation the probabilities are the mean over `draws`, and `uncertainty` has their standard
    deviation. With `draws = 0` the means are used and nothing is drawn. Training draws once. The
    spatial form needs the grid of the patches; patches in one cell have the mean of their scores.
    `prior` is the prior of the attention: none, detection (label 0 is without tumour) or subtyping.

    Differs from the authors' code: several seeded draws instead of one; cells follow from the grid
    of the patches; the KL divergence of the attention is the Gaussian one, without padding, and the
    label chooses its prior in the loss. The KL divergence of the weights is that of the authors: it
    has a Gaussian where Molchanov et al. have a sigmoid. Weighted by 1e-8 and 1e-12, both have
    hardly any effect.
    """

    needs_classes: ClassVar[bool] = True
    logits_in_aux = ("mean_logits",)
    weighs_patches = True

    @property
    def export_problem(self) -> str | None:
        if self.spatial:
            return "finds the neighbours of patches in a list whose length depends on the bag"
        if self.draws:
            return (
                "draws at random for each patch, and another program would draw differently. Pass "
                "--set draws=0 to export the means, which are near but not the same"
            )
        return None

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        dim: int = 512,
        hidden: int = 384,
        spatial: bool = False,
        dropout: float = 0.25,
        draws: int = 16,
        prior: str = "none",
        seed: int = 0,
    ) -> None:
        super().__init__(
            in_dim,
            n_outputs,
            dim=dim,
            hidden=hidden,
            spatial=spatial,
            dropout=dropout,
            draws=draws,
            prior=prior,
            seed=seed,
        )
        if draws < 0:
            raise ValueError(f"draws is at least 0: {draws=}.")
        if prior not in PRIORS:
            raise UnknownNameError("prior", prior, PRIORS)
        if prior == "detection" and n_outputs != 2:
            raise RecipeError(
                f'prior = "detection" is for two classes, not {n_outputs}. Set "subtyping".'
            )
        self.spatial, self.draws, self.seed = spatial, draws, seed
        pairs = PRIORS[prior]
        self.prior = pairs * n_outputs if len(pairs) == 1 else pairs
        self.project = Linear(in_dim, dim)
        nn.init.xavier_normal_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        log_alpha = -4.0 if spatial else -1.0
        self.hidden = VariationalLinear(dim, hidden, log_alpha=log_alpha)
        self.gate = VariationalLinear(dim, hidden, log_alpha=log_alpha)
        self.out = VariationalLinear(hidden, 2, log_alpha=log_alpha)
        self.classify = VariationalLinear(dim, n_outputs, log_alpha=-3.0)
        self.dropout = nn.Dropout(dropout)

    def shared_parts(self, features: Float[Tensor, "1 N E"]) -> tuple[Tensor, ...]:
        return (F.relu(self.project(features[0])),)

    def forward_bag(
        self,
        features: Features,
        grid: Cells | None,
        counts: Counts | None = None,
        shared: tuple[Tensor, ...] | None = None,
    ) -> Output:
        if not self.spatial:
            grid = None
        elif grid is None:
            raise BagError(
                "BayesMIL with spatial = true needs the coordinates of the patches, and this bag "
                "has none. Use features with coordinates, or set spatial = false."
            )
        (projected,) = self.shared_parts(features) if shared is None else shared
        patches = self.dropout(projected)
        if self.training:
            return self.forward_patches(patches, grid, Noise(1, patches, None))
        if not self.draws:
            return self.forward_patches(patches, grid, None, counts)
        # Noise is assigned in the order of the features, not in that of the file.
        order = noise_order(features[0], grid)
        noise = Noise(self.draws, patches, seeded(self.seed, patches.device))
        cells, own = (None if part is None else part[order] for part in (grid, counts))
        output = self.forward_patches(patches[order], cells, noise, own)
        rank = order.argsort()
        uncertainty = output.uncertainty
        if uncertainty is not None:
            uncertainty = replace(uncertainty, attention=uncertainty.attention[:, rank])
        return replace(output, attention=output.attention[:, rank], uncertainty=uncertainty)

    def forward_patches(
        self,
        patches: Float[Tensor, "N D"],
        grid: Cells | None,
        noise: Noise | None,
        counts: Counts | None = None,
    ) -> Output:
        """Return the mean output over the draws of the noise."""
        mean, log_variance = self.score(patches, noise)
        scores = mean if grid is None else smooth(mean, grid, counts)
        if noise is not None:
            scores = scores + (log_variance / 2).exp() * noise(len(patches))
        # Sigmoids divided by their sum. In logarithms, this never divides zero by zero.
        log_weights = F.logsigmoid(scores)
        if counts is not None:
            log_weights = log_weights + counts.log()
        weights = log_weights.softmax(dim=-1)
        embeddings = weighted_sum(weights.mT, patches).to(patches.dtype)
        logits = self.classify(embeddings.unsqueeze(1), noise).squeeze(1)
        mean_logits = logits.mean(dim=0)[None]
        uncertainty = None
        if len(logits) > 1:
            # The mean of antithetic draws is known, so that no degree of freedom is lost.
            uncertainty = Uncertainty(
                attention=weights.std(dim=0, correction=0)[None],
                probabilities=logits.softmax(dim=-1).std(dim=0, correction=0)[None],
            )
            logits = logits.log_softmax(dim=-1).logsumexp(dim=0)[None] - math.log(len(logits))
        kl = {"attention_kl": self.attention_kl(mean, log_variance)} if self.prior else {}
        return Output(
            logits=logits,
            embedding=embeddings.mean(dim=0)[None],
            attention=weights.mean(dim=0)[None],
            uncertainty=uncertainty,
            aux={"mean_logits": mean_logits, **kl},
        )

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence:
        output = self.forward_bag(features, grid)
        patches = F.relu(self.project(features[0]))
        evidence = evidence_of_sum(
            output.attention, patches, self.classify.weight, self.classify.bias
        )
        # The noise of the classifier's weights belongs to no patch.
        noise = output.aux["mean_logits"] - self.classify(output.embedding[None], None)[0]
        return replace(evidence, rest=evidence.rest + noise[0])

    def score(self, patches: Float[Tensor, "N D"], noise: Noise | None) -> tuple[Drawn, Drawn]:
        """Return mean and log-variance of the attention score of each patch, per draw."""
        rows = max(1, ROWS // (noise.draws if noise else 1))
        # `compile` and export process the whole bag: a loop would fix the size of the bag.
        chunks = (patches,) if torch.compiler.is_compiling() else torch.split(patches, rows)
        scores = []
        for chunk in chunks:
            hidden = self.dropout(self.hidden(chunk[None], noise).tanh())
            gate = self.dropout(self.gate(chunk[None], noise).sigmoid())
            scores.append(self.out(hidden * gate, noise))
        mean, log_variance = rearrange(torch.cat(scores, dim=1), "r n two -> two r n")
        mean, log_variance = (part.to(summing_dtype(part)) for part in (mean, log_variance))
        return mean, log_variance.clamp(-MAX_LOG_VARIANCE, MAX_LOG_VARIANCE)

    def attention_kl(self, mean: Drawn, log_variance: Drawn) -> Float[Tensor, "1 C"]:
        """Return the KL divergence of the attention from the prior of each label."""
        prior = mean.new_tensor(self.prior)
        prior_mean, prior_log_variance = (
            repeat(part, "c -> c 1 1") for part in prior.unbind(dim=1)
        )
        ratio = (log_variance.exp() + (mean - prior_mean).square()) / prior_log_variance.exp()
        return (0.5 * (prior_log_variance - log_variance + ratio - 1)).mean(dim=(1, 2))[None]

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        layers = (self.hidden, self.gate, self.out, self.classify)
        terms = super().loss(output, labels)
        terms["weights_kl"] = WEIGHTS_KL * torch.stack([layer.kl() for layer in layers]).sum()
        if self.prior:
            own = output.aux["attention_kl"].gather(1, labels[:, None])
            terms["attention_kl"] = ATTENTION_KL * own.mean()
        return terms


def noise_order(features: Float[Tensor, "N E"], grid: Cells | None) -> Int[Tensor, " N"]:
    """Return an order of the patches by their features and, if these are equal, by their cell."""
    if grid is None:
        return content_order(features)
    by_cell = cell_keys(grid)[0].argsort(stable=True)
    return by_cell[content_order(features[by_cell])]


def cell_keys(grid: Cells) -> tuple[Int[Tensor, " N"], int]:
    """Return one number per cell, and the difference between rows.

    Each row has one extra number, so that the end of a row and the start of the next one are not
    neighbours.
    """
    columns, rows = (grid - grid.amin(dim=0)).long().unbind(dim=1)
    stride = int(columns.amax()) + 2
    return rows * stride + columns, stride


def smooth(values: Drawn, grid: Cells, counts: Counts | None = None) -> Drawn:
    """Return values after a Gaussian filter of 3 x 3 cells; empty cells count as 0.

    Neighbours are found in the sorted list of cells, without an image of the slide.
    """
    keys, stride = cell_keys(grid)
    cells, cell_of, sizes = torch.unique(keys, return_inverse=True, return_counts=True)
    if counts is not None:
        values, sizes = values * counts, counts.new_zeros(len(cells)).index_add(0, cell_of, counts)
    cell_means = values.new_zeros(len(values), len(cells)).index_add(1, cell_of, values) / sizes
    steps = range(-1, 2)
    gaussian = {(x, y): math.exp(-(x * x + y * y) / (2 * SIGMA**2)) for x in steps for y in steps}
    smoothed = torch.zeros_like(cell_means)
    for (x, y), weight in gaussian.items():
        wanted = cells + y * stride + x
        index = torch.searchsorted(cells, wanted).clamp(max=len(cells) - 1)
        present = cells[index] == wanted
        smoothed = smoothed + weight / sum(gaussian.values()) * present * cell_means[:, index]
    return smoothed[:, cell_of]
