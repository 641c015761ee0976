"""BayesMIL: the attention of a patch is a random variable, and so are the weights of the layers.

Cui, Liu, Liu, Liu, Wang, Kuo, Xue, Chan: "Bayes-MIL: A New Probabilistic Perspective on
Attention-based Multiple Instance Learning for Whole Slide Images", ICLR 2023. The layer is that of
Molchanov, Ashukha, Vetrov: "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017.

One more axis here: R draws.
"""

import math
from dataclasses import replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from caprmil.errors import BagError, RecipeError, UnknownNameError
from caprmil.models.base import (
    Cells,
    Evidence,
    Features,
    Labels,
    MILModel,
    Output,
    Spread,
    share_out,
)
from caprmil.models.layers import content_order, seeded, summing_dtype, weighted_sum

ROWS = 4096  # draws times patches that are worked on at once: memory does not grow with draws
WIDEST = 10.0  # log-variances stay within plus and minus this
SIGMA = 0.5  # of the Gaussian that smooths over neighbouring cells

WEIGHTS_KL, ATTENTION_KL = 1e-8, 1e-12  # weights of the two terms in the loss
PRIORS: dict[str, tuple[tuple[float, float], ...]] = {
    "none": (),
    "detection": ((-5.0, -1.0), (0.0, 3.0)),  # without tumour: low and sure; with: anything
    "subtyping": ((3.0, 5.0),),
}
"""Mean and log-variance that attention should have, label by label, or one pair for all labels."""

Drawn: TypeAlias = Float[Tensor, "R N"]


class Noise:
    """Standard normal numbers for R draws. Draws come in pairs, one the mirror of the other.

    Each draw is distributed as ever, while in their mean all that is odd in the noise cancels, and
    half of the numbers need not be made.
    """

    def __init__(self, draws: int, like: Tensor, generator: torch.Generator | None) -> None:
        self.draws, self.like, self.generator = draws, like, generator

    def __call__(self, *shape: int) -> Float[Tensor, "R ..."]:
        # In float32 whatever the model's precision: another would draw other numbers.
        half = torch.randn(
            (self.draws + 1) // 2, 1, *shape, generator=self.generator, device=self.like.device
        ).to(self.like.dtype)
        signs = half.new_tensor([1.0, -1.0][: self.draws]).reshape(-1, *[1] * len(shape))
        return (half * signs).flatten(0, 1)[: self.draws]


class VariationalLinear(nn.Module):
    """A linear map whose weights are Gaussian; their variance is alpha times their square."""

    def __init__(self, in_dim: int, out_dim: int, *, log_alpha: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_dim, in_dim) * 0.01)
        self.log_alpha = nn.Parameter(torch.full((out_dim, in_dim), log_alpha))
        self.bias = nn.Parameter(torch.zeros(out_dim))

    def forward(
        self, inputs: Float[Tensor, "#R N A"], noise: Noise | None
    ) -> Float[Tensor, "R N O"]:
        """Draw the outputs, each entry by itself (local reparameterisation); or return the mean."""
        mean = F.linear(inputs, self.weight, self.bias)
        if noise is None:
            return mean
        return torch.addcmul(mean, self.std(inputs).to(mean.dtype), noise(*mean.shape[1:]))

    def std(self, inputs: Float[Tensor, "*batch A"]) -> Float[Tensor, "*batch O"]:
        """Return the deviations of the outputs, in float32 or better: squares may be tiny."""
        dtype = summing_dtype(inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            variances = self.log_alpha.to(dtype).exp() * self.weight.to(dtype).square() + 1e-8
            # The floor is for inputs that are all zero, where a root has no gradient.
            return F.linear(inputs.to(dtype).square(), variances).clamp(min=1e-16).sqrt()

    def kl(self) -> Float[Tensor, ""]:
        """Return the divergence from a log-uniform prior, summed over outputs, mean of inputs."""
        bump = 0.6134 * (-(0.2026 + 0.7126 * self.log_alpha).square()).exp()
        return (0.5 * F.softplus(-self.log_alpha) - bump).mean(dim=1).sum()


class BayesMIL(MILModel):
    """Gated attention with a mean and a variance for each patch; `spatial` smooths the means.

    In evaluation the probabilities are the mean over `draws`, and `spread` is their deviation;
    with `draws = 0` nothing is drawn and the means stand for themselves. Training draws once.
    The spatial form needs the grid of the patches; patches that share a cell share the mean of
    their scores. `prior` is what attention should look like: none, detection (label 0 is
    without tumour) or subtyping.

    Differs from the authors' code: several seeded draws instead of one; cells follow from the
    patches' own step; the attention's divergence is the Gaussian one, over real patches, and the
    label chooses its prior in the loss. The divergence of the weights is the authors': it has a
    bump where Molchanov et al. have a sigmoid. At weights of 1e-8 and 1e-12 neither is felt.
    """

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
            raise ValueError(f"There are 0 draws or more: {draws=}.")
        if prior not in PRIORS:
            raise UnknownNameError("prior", prior, PRIORS)
        if prior == "detection" and n_outputs != 2:
            raise RecipeError(
                f'prior = "detection" is for two classes, not {n_outputs}. Set "subtyping".'
            )
        self.spatial, self.draws, self.seed = spatial, draws, seed
        pairs = PRIORS[prior]
        self.prior = pairs * n_outputs if len(pairs) == 1 else pairs
        self.project = nn.Linear(in_dim, dim)
        nn.init.xavier_normal_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        log_alpha = -4.0 if spatial else -1.0
        self.content = VariationalLinear(dim, hidden, log_alpha=log_alpha)
        self.gate = VariationalLinear(dim, hidden, log_alpha=log_alpha)
        self.rate = VariationalLinear(hidden, 2, log_alpha=log_alpha)
        self.classify = VariationalLinear(dim, n_outputs, log_alpha=-3.0)
        self.dropout = nn.Dropout(dropout)

    def forward_bag(self, features: Features, grid: Cells | None) -> Output:
        if not self.spatial:
            grid = None
        elif grid is None:
            raise BagError(
                "BayesMIL with spatial = true looks at neighbours, but where the patches of this "
                "bag lie is not known. Use features with coordinates, or set spatial = false."
            )
        patches = self.dropout(F.relu(self.project(features[0])))
        if self.training:
            return self.read(patches, grid, Noise(1, patches, None))
        if not self.draws:
            return self.read(patches, grid, None)
        # Noise belongs to a patch by what it holds: the bag is read in that order.
        order = reading_order(features[0], grid)
        noise = Noise(self.draws, patches, seeded(self.seed, patches.device))
        output = self.read(patches[order], None if grid is None else grid[order], noise)
        rank = order.argsort()
        spread = output.spread
        if spread is not None:
            spread = replace(spread, attention=spread.attention[:, rank])
        return replace(output, attention=output.attention[:, rank], spread=spread)

    def read(
        self, patches: Float[Tensor, "N D"], grid: Cells | None, noise: Noise | None
    ) -> Output:
        """Classify a bag as often as there is noise for, and take the mean."""
        mean, log_variance = self.score(patches, noise)
        scores = mean if grid is None else smooth(mean, grid)
        if noise is not None:
            scores = scores + (log_variance / 2).exp() * noise(len(patches))
        # Sigmoids divided by their sum, in a way that never divides zero by zero.
        weights = F.logsigmoid(scores).softmax(dim=-1)
        embeddings = weighted_sum(weights.mT, patches).to(patches.dtype)
        logits = self.classify(embeddings.unsqueeze(1), noise).squeeze(1)
        mean_logits = logits.mean(dim=0)[None]
        spread = None
        if len(logits) > 1:
            # Draws and their mirrors have a known middle, so nothing is taken off their number.
            spread = Spread(
                attention=weights.std(dim=0, correction=0)[None],
                probabilities=logits.softmax(dim=-1).std(dim=0, correction=0)[None],
            )
            logits = logits.log_softmax(dim=-1).logsumexp(dim=0)[None] - math.log(len(logits))
        kl = {"attention_kl": self.attention_kl(mean, log_variance)} if self.prior else {}
        return Output(
            logits=logits,
            embedding=embeddings.mean(dim=0)[None],
            attention=weights.mean(dim=0)[None],
            spread=spread,
            aux={"mean_logits": mean_logits, **kl},
        )

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence:
        output = self.forward_bag(features, grid)
        patches = F.relu(self.project(features[0]))
        evidence = share_out(output.attention, patches, self.classify.weight, self.classify.bias)
        # The noise of the classifier's weights is none of any patch's.
        noise = output.aux["mean_logits"] - self.classify(output.embedding[None], None)[0]
        return replace(evidence, rest=evidence.rest + noise[0])

    def score(self, patches: Float[Tensor, "N D"], noise: Noise | None) -> tuple[Drawn, Drawn]:
        """Return mean and log-variance of the attention of each patch, draw by draw."""
        rows = max(1, ROWS // (noise.draws if noise else 1))
        # A program for bags of any size has no loop: `compile` and export take the bag as a whole.
        pieces = (patches,) if torch.compiler.is_compiling() else torch.split(patches, rows)
        scores = []
        for some in pieces:
            content = self.dropout(self.content(some[None], noise).tanh())
            gate = self.dropout(self.gate(some[None], noise).sigmoid())
            scores.append(self.rate(content * gate, noise))
        mean, log_variance = rearrange(torch.cat(scores, dim=1), "r n two -> two r n")
        mean, log_variance = (part.to(summing_dtype(part)) for part in (mean, log_variance))
        return mean, log_variance.clamp(-WIDEST, WIDEST)

    def attention_kl(self, mean: Drawn, log_variance: Drawn) -> Float[Tensor, "1 C"]:
        """Return how far attention lies from its prior, for each label the bag might have."""
        prior = mean.new_tensor(self.prior)
        centre, width = (repeat(part, "c -> c 1 1") for part in prior.unbind(dim=1))
        apart = (log_variance.exp() + (mean - centre).square()) / width.exp()
        return (0.5 * (width - log_variance + apart - 1)).mean(dim=(1, 2))[None]

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        layers = (self.content, self.gate, self.rate, self.classify)
        terms = super().loss(output, labels)
        terms["weights_kl"] = WEIGHTS_KL * torch.stack([layer.kl() for layer in layers]).sum()
        if self.prior:
            own = output.aux["attention_kl"].gather(1, labels[:, None])
            terms["attention_kl"] = ATTENTION_KL * own.mean()
        return terms


def reading_order(features: Float[Tensor, "N E"], grid: Cells | None) -> Int[Tensor, " N"]:
    """Return an order by what patches hold and, where they hold the same, by where they lie."""
    if grid is None:
        return content_order(features)
    by_cell = cell_keys(grid)[0].argsort(stable=True)
    return by_cell[content_order(features[by_cell])]


def cell_keys(grid: Cells) -> tuple[Int[Tensor, " N"], int]:
    """Return one number for each cell, and how much it grows from a row to the next.

    Beside each row there is room for one cell, so that no two neighbours share a number.
    """
    columns, rows = (grid - grid.amin(dim=0)).long().unbind(dim=1)
    stride = int(columns.amax()) + 2
    return rows * stride + columns, stride


def smooth(values: Drawn, grid: Cells) -> Drawn:
    """Return a Gaussian mean over the nine cells around each patch; a cell without one counts 0.

    Neighbours are looked up in the sorted list of cells: no picture of the slide is made.
    """
    keys, stride = cell_keys(grid)
    cells, cell_of, patches_in = torch.unique(keys, return_inverse=True, return_counts=True)
    held = values.new_zeros(len(values), len(cells)).index_add(1, cell_of, values) / patches_in
    steps = range(-1, 2)
    gaussian = {(x, y): math.exp(-(x * x + y * y) / (2 * SIGMA**2)) for x in steps for y in steps}
    smoothed = torch.zeros_like(held)
    for (x, y), weight in gaussian.items():
        wanted = cells + y * stride + x
        place = torch.searchsorted(cells, wanted).clamp(max=len(cells) - 1)
        there = cells[place] == wanted
        smoothed = smoothed + weight / sum(gaussian.values()) * there * held[:, place]
    return smoothed[:, cell_of]
