"""SGPMIL: the attention score is a sparse Gaussian process, so that each weight is uncertain.

Lolos, Christodoulidis, Moustakas, Dolz, Vakalopoulou: "SGPMIL: Sparse Gaussian Process Multiple
Instance Learning", arXiv 2507.08711. Sparse variational processes: Titsias, AISTATS 2009; Hensman,
Matthews, Ghahramani, AISTATS 2015.

More axes in this file: R draws, M inducing points, K the input width of the process.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.errors import RunError, UnknownNameError
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
from caprmil.models.products import Linear

JITTER = 1e-4  # on the diagonal of the inducing points' covariance
RETRIES = 2  # each with ten times the jitter
MIN_VARIANCE = 1e-6
MIN_DIAGONAL = 1e-12  # of the factor of S, before its logarithm

Points = Float[Tensor, "N K"]


class SparseGP(nn.Module):
    """A Gaussian process with M inducing points, a linear mean, and k = RBF + constant.

    In float64, since covariances of nearby points are close to singular.
    """

    def __init__(self, dim: int, *, inducing: int) -> None:
        super().__init__()
        self.inducing = nn.Parameter(torch.rand(inducing, dim))  # Z
        # The inducing values are N(m, S) with S = L L^T, whitened: their prior is N(0, I).
        self.mean = nn.Parameter(torch.randn(inducing) * 1e-3)  # m
        self.factor = nn.Parameter(torch.eye(inducing))  # L, only its lower triangle is used
        self.slope = nn.Parameter(torch.randn(dim))
        self.offset = nn.Parameter(torch.randn(()))
        self.raw = nn.Parameter(torch.zeros(3))  # length, scale and constant, before softplus

    def forward(self, points: Points) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Return mean and variance of the process at each point, in float64."""
        points, inducing = points.double(), self.inducing.double()
        factor, mean = self.factor.double().tril(), self.mean.double()
        root = cholesky(self.kernel(inducing, inducing))
        covariance = self.kernel(inducing, points)
        projected = torch.linalg.solve_triangular(root, covariance, upper=False)
        prior_mean = points @ self.slope.double() + self.offset.double()
        _, scale, constant = self.hyperparameters()
        explained = projected.square().sum(dim=0)
        remaining = (factor.mT @ projected).square().sum(dim=0)
        variance = scale + constant + JITTER - explained + remaining
        return prior_mean + mean @ projected, variance.clamp(min=MIN_VARIANCE)

    def hyperparameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return length, scale and constant of the kernel, which are positive by construction."""
        length, scale, constant = F.softplus(self.raw.double())
        return length, scale, constant

    def kernel(self, one: Points, other: Float[Tensor, "L K"]) -> Float[Tensor, "N L"]:
        """Return the covariance of each point of one set with each of the other."""
        length, scale, constant = self.hyperparameters()
        squares = one.square().sum(dim=1)[:, None] + other.square().sum(dim=1)
        distances = (squares - 2 * one @ other.mT).clamp(min=0.0)
        return scale * (-distances / (2 * length.square())).exp() + constant

    def kl(self) -> Float[Tensor, ""]:
        """Return the KL divergence of N(m, S) from N(0, I)."""
        factor = self.factor.tril()
        log_determinant = 2 * factor.diagonal().abs().clamp(min=MIN_DIAGONAL).log().sum()
        trace = factor.square().sum()  # of S
        return 0.5 * (trace + self.mean.square().sum() - len(self.mean) - log_determinant)


class SGPMIL(MILModel):
    """Attention drawn from a Gaussian process; a bag is the weighted *sum* of its patches.

    `noise` is "independent", one number per patch and draw, or "shared", one per draw. `normalise`
    divides the sum by the weights, so that the embedding does not grow with the bag. With
    `draws = 0` an evaluation uses the mean scores; training draws at least once. The loss uses
    `aux["mean_logits"]`, the mean logits over the draws, which are exact sums over patches. The
    `logits` are those of the mean class probabilities, so that the model needs classes.

    Differs from the authors' code: its noise is shared because of a broadcast, and the published
    numbers come from that; in the paper's text it is independent, our default. Draws are seeded in
    evaluation. The KL divergence is divided by the number of training bags, also in validation.
    """

    needs_classes: ClassVar[bool] = True
    logits_in_aux = ("mean_logits",)
    weighs_patches = True
    export_problem = (
        "draws at random for each patch, and factors a covariance in a varying number of attempts"
    )

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        dims: Sequence[int] = (768, 384, 256),
        gp_dim: int = 64,
        inducing: int = 80,
        draws: int = 30,
        noise: str = "independent",
        normalise: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            in_dim,
            n_outputs,
            dims=list(dims),
            gp_dim=gp_dim,
            inducing=inducing,
            draws=draws,
            noise=noise,
            normalise=normalise,
            seed=seed,
        )
        if not dims or draws < 0 or inducing < 1:
            raise ValueError(
                f"dims has a width, inducing is at least 1, draws at least 0: "
                f"{dims=}, {inducing=}, {draws=}."
            )
        if noise not in ("independent", "shared"):
            raise UnknownNameError("noise", noise, ("independent", "shared"))
        self.draws, self.noise, self.normalise, self.seed = draws, noise, normalise, seed
        self.n_bags = 1  # set at the start of an epoch
        layers = [(Linear(a, b), nn.ReLU()) for a, b in pairwise((in_dim, *dims))]
        self.project = nn.Sequential(*(part for pair in layers for part in pair))
        self.reduce = nn.Sequential(Linear(dims[-1], gp_dim), nn.Sigmoid())
        self.process = SparseGP(gp_dim, inducing=inducing)
        self.classify = nn.Linear(dims[-1], n_outputs)

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        self.n_bags = n_bags

    def shared_parts(self, features: Float[Tensor, "1 N E"]) -> tuple[Tensor, ...]:
        patches = self.project(features[0])
        return patches, *self.process(self.reduce(patches))

    def forward_bag(
        self,
        features: Features,
        grid: Cells | None,
        counts: Counts | None = None,
        shared: tuple[Tensor, ...] | None = None,
    ) -> Output:
        patches, mean, variance = self.shared_parts(features) if shared is None else shared
        log_weights = self.log_weights(patches, mean, variance, self.draw(features[0]))
        if counts is not None:
            log_weights = log_weights + counts.log()
        attention = self.attention(log_weights)
        embeddings = weighted_sum(self.weights(log_weights).mT, patches)
        with torch.autocast(patches.device.type, enabled=False):  # float16 may overflow
            weight, bias = (part.to(embeddings.dtype) for part in self.classify.parameters())
            logits = F.linear(embeddings, weight, bias)
        uncertainty = None
        if len(logits) > 1:
            uncertainty = Uncertainty(
                attention=attention.std(dim=0)[None],
                probabilities=logits.softmax(dim=-1).std(dim=0)[None],
            )
        return Output(
            logits=logits.log_softmax(dim=-1).logsumexp(dim=0)[None] - math.log(len(logits)),
            embedding=embeddings.mean(dim=0)[None],
            attention=attention.mean(dim=0)[None],
            uncertainty=uncertainty,
            aux={"mean_logits": logits.mean(dim=0)[None]},
        )

    def draw(self, features: Float[Tensor, "N E"]) -> Float[Tensor, "R ..."] | None:
        """Return the noise of each draw; in evaluation it is assigned by features."""
        if not self.draws and not self.training:
            return None
        generator = None if self.training else seeded(self.seed, features.device)
        width = 1 if self.noise == "shared" else len(features)
        # In float32 for every precision of the model: another one would draw other numbers.
        noise = torch.randn(max(1, self.draws), width, generator=generator, device=features.device)
        if self.training or width == 1:
            return noise
        return noise[:, content_order(features).argsort()]

    def log_weights(
        self,
        patches: Float[Tensor, "N D"],
        mean: Float[Tensor, " N"],
        variance: Float[Tensor, " N"],
        noise: Float[Tensor, "R ..."] | None,
    ) -> Float[Tensor, "R N"]:
        """Return the logarithm of the weight of each patch, per draw."""
        scores = mean[None] if noise is None else mean + variance.sqrt() * noise
        return F.logsigmoid(scores.to(summing_dtype(patches)))

    def attention(self, log_weights: Float[Tensor, "R N"]) -> Float[Tensor, "R N"]:
        """Return weights that sum to one: in each draw, or only in the mean over the draws."""
        if self.normalise:
            return log_weights.softmax(dim=-1)
        return log_weights.flatten().softmax(dim=0).view_as(log_weights) * len(log_weights)

    def weights(self, log_weights: Float[Tensor, "R N"]) -> Float[Tensor, "R N"]:
        """Return the weights of the sum over patches, per draw."""
        return self.attention(log_weights) if self.normalise else log_weights.exp()

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence:
        patches, mean, variance = self.shared_parts(features)
        noise = self.draw(features[0])
        weights = self.weights(self.log_weights(patches, mean, variance, noise))
        middle = weights.mean(dim=0, keepdim=True)
        return evidence_of_sum(middle, patches, self.classify.weight, self.classify.bias)

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        return {
            "bag": self.criterion(output.aux["mean_logits"], labels),
            "kl": self.process.kl() / self.n_bags,
        }


def cholesky(covariance: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """Return the lower Cholesky factor of a covariance, with more jitter if it is needed."""
    ridge = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    for attempt in range(1 + RETRIES):
        root, failed = torch.linalg.cholesky_ex(covariance + JITTER * 10**attempt * ridge)
        if not failed:
            return root
    raise RunError(
        "The covariance of the inducing points of SGPMIL has no Cholesky factor. Training has most "
        "likely diverged. Lower train.lr."
    )
