"""Fusion: a model of the patches, and covariates of the slide.

The covariates have an embedding, which is concatenated to that of the patches before the last
linear layer. That layer is a sum over both parts, so that the logits are those of the patches plus
a linear function of the covariates. So any image model can be fused, keeps its faster forms, and
keeps its exact evidence, to which each covariate adds one exact term. One more axis in this file:
K numbers, as which the covariates of a slide are encoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.errors import BagError, RecipeError
from caprmil.models.base import (
    Cells,
    Chunks,
    Counts,
    Evidence,
    Features,
    Grid,
    Mask,
    Memory,
    MILModel,
    Output,
    Patches,
    Samples,
)
from caprmil.models.layers import Dropout, summing_dtype
from caprmil.models.packing import Sizes
from caprmil.models.token_removal import TokenRemoval

Covariates: TypeAlias = Float[Tensor, "bags K"]  # of packed bags, too
WAYS = ("concatenation", "late")
NO_COVARIATES = "This model reads covariates of the slide besides its patches. Pass them: {names}."


class NoImage(MILModel):
    """A constant, whatever the patches are. With it, a fused model reads the covariates only."""

    weighs_patches = True

    def __init__(self, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim, n_outputs)
        self.bias = nn.Parameter(torch.zeros(n_outputs))

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        weights = mask.to(summing_dtype(features))
        return Output(
            logits=self.bias.expand(len(features), -1),
            embedding=features.new_zeros(len(features), 1),
            attention=weights / weights.sum(dim=1, keepdim=True),
        )

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        n = sum(chunk.shape[1] for chunk in chunks())
        return self.forward_bags(self.bias.new_zeros(1, n, 1), self.bias.new_ones(1, n), None)

    def influence(
        self,
        features: Float[Tensor, "1 N E"],
        grid: Cells | None = None,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        outputs = self.n_outputs if directions is None else len(directions)
        return features.new_zeros(features.shape[1], outputs)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        n = sum(chunk.shape[1] for chunk in chunks())
        return Evidence(terms=self.bias.new_zeros(n, len(self.bias)), rest=self.bias)


class FusedModel(MILModel):
    """An image model, and an embedding of the covariates, before one linear layer.

    `columns` are the covariates with their statistics over the training slides: each has at least a
    `name` and a `width`, the numbers that it is encoded as. `how` is "concatenation", or "late":
    each modality then has its own logits and its own loss, and the model has their mean. At first
    the covariates add nothing.
    """

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        image: MILModel | Mapping[str, Any],
        columns: Sequence[Mapping[str, Any]],
        how: str = "concatenation",
        dim: int = 128,
        dropout: int | float = 0.1,
    ) -> None:
        if how not in WAYS:
            raise RecipeError(f"how is {' or '.join(WAYS)}, not {how!r}.")
        if dim < 1:
            raise RecipeError(f"dim must be 1 or more, not {dim}.")
        own = {"columns": list(columns), "how": how, "dim": dim, "dropout": dropout}
        super().__init__(in_dim, n_outputs, image=image, **own)
        self.image = _build(image, in_dim, n_outputs)
        self.names = [str(column["name"]) for column in columns]
        self.widths = [int(column["width"]) for column in columns]
        self.how = how
        self.project = nn.Linear(sum(self.widths), dim, bias=False)
        self.dropout = Dropout(dropout)
        # The bias of a concatenation is that of the image model.
        self.classify = nn.Linear(dim, n_outputs, bias=how == "late")
        nn.init.zeros_(self.classify.weight)
        if how == "late":
            nn.init.zeros_(self.classify.bias)

    def forward(
        self,
        features: Features,
        *,
        mask: Mask | None = None,
        grid: Grid | None = None,
        sizes: Sizes | None = None,
        covariates: Covariates | None = None,
    ) -> Output:
        if covariates is None:
            raise BagError(NO_COVARIATES.format(names=", ".join(self.names)))
        output = self.image(features, mask=mask, grid=grid, sizes=sizes)
        logits = self.covariate_logits(covariates)
        if self.how == "concatenation":
            return shifted(self.image, output, logits)
        aux = {**output.aux, "image": output.logits, "covariates": logits}
        return replace(output, logits=(output.logits + logits) / 2, aux=aux)

    def covariate_logits(self, covariates: Covariates) -> Float[Tensor, "bags C"]:
        """Return the part of the logits that is from the covariates."""
        covariates = covariates.to(self.project.weight.dtype)
        return cast(Tensor, self.classify(self.dropout(self.project(covariates))))

    def loss(self, output: Output, values: Tensor) -> dict[str, Float[Tensor, ""]]:
        if self.how == "concatenation":
            return self.image.loss(output, values)
        aux = dict(output.aux)
        image, logits = aux.pop("image"), aux.pop("covariates")
        terms = self.image.loss(replace(output, logits=image, aux=aux), values)
        return {**terms, "covariates": self.criterion(logits, values)}

    @torch.no_grad()
    def of_slide(
        self, covariates: Float[Tensor, " K"], shown: Sequence[str] | None = None
    ) -> "SlideModel":
        """Return the model of one slide, which reads patches only.

        `covariates` are those of the slide, and `shown` their values for readers.
        """
        if len(covariates) != sum(self.widths):
            raise BagError(f"There are {len(covariates)} numbers, not {sum(self.widths)}.")
        share = 1.0 if self.how == "concatenation" else 0.5
        weight = share * self.classify.weight.double() @ self.project.weight.double()
        ends = [0, *accumulate(self.widths)]
        values = covariates.to(weight)
        terms = [
            {"name": name, "shown": text, "term": (weight[:, a:b] @ values[a:b]).tolist()}
            for name, text, (a, b) in zip(
                self.names, shown or [""] * len(self.names), pairwise(ends), strict=True
            )
        ]
        bias = self.classify.bias
        rest = [0.0] * self.n_outputs if bias is None else (share * bias.double()).tolist()
        model = SlideModel(
            *(self.in_dim, self.n_outputs), image=self.image, terms=terms, share=share, rest=rest
        )
        return model.to(self.project.weight).train(self.training)

    def of_average_slide(self) -> "SlideModel":
        """Return the model of a slide whose covariates are those of the average training slide."""
        return self.of_slide(torch.zeros(sum(self.widths)))

    # Training sees the image model.

    @property
    def order_matters(self) -> bool:  # type: ignore[override]
        return self.image.order_matters

    @property
    def has_patch_logits(self) -> bool:  # type: ignore[override]
        return self.image.has_patch_logits

    @property
    def top_k(self) -> int:
        return self.image.top_k

    @top_k.setter
    def top_k(self, k: int) -> None:
        self.image.top_k = k

    @property
    def input_layer(self) -> nn.Linear | None:
        return self.image.input_layer

    @property
    def probe_units(self) -> Sequence[int]:
        return self.image.probe_units

    def unit_values(self, features: Float[Tensor, "N E"]) -> Float[Tensor, "N D"]:
        return self.image.unit_values(features)

    def gather_units(self, units: Sequence[int], thresholds: Float[Tensor, " P"]) -> None:
        self.image.gather_units(units, thresholds)

    @property
    def title(self) -> str:
        return f"{self.image.title} with covariates"

    @property
    def n_assignments(self) -> int:
        return self.image.n_assignments

    @property
    def token_shape(self) -> tuple[int, int, int] | None:
        return self.image.token_shape

    @property
    def export_problem(self) -> str | None:
        return "reads covariates besides the patches, and an exported file has patches only"

    def save_memory(self, how: Memory) -> None:
        self.image.save_memory(how)

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        self.image.on_epoch_start(epoch, n_bags)

    def no_decay(self) -> set[str]:
        return {f"image.{name}" for name in self.image.no_decay()}


class SlideModel(MILModel):
    """A fused model with the covariates of one slide: the image model, and constants.

    The logits are `share` of those of the image model, plus the `term` of each covariate, plus the
    `rest`. Everything else is the image model's, in all its forms.
    """

    shift: Float[Tensor, " C"]

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        image: MILModel | Mapping[str, Any],
        terms: Sequence[Mapping[str, Any]],
        share: float,
        rest: Sequence[float],
    ) -> None:
        own = {"terms": list(terms), "share": share, "rest": list(rest)}
        super().__init__(in_dim, n_outputs, image=image, **own)
        self.image, self.share = _build(image, in_dim, n_outputs), share
        self.covariate_terms = {
            str(each["name"]): (str(each["shown"]), tuple(map(float, each["term"])))
            for each in terms
        }
        added = [list(rest), *(term for _, term in self.covariate_terms.values())]
        total = torch.tensor(added, dtype=torch.float64).sum(dim=0)
        self.register_buffer("shift", total, persistent=False)

    def forward(
        self,
        features: Features,
        *,
        mask: Mask | None = None,
        grid: Grid | None = None,
        sizes: Sizes | None = None,
    ) -> Output:
        return self.fuse(self.image(features, mask=mask, grid=grid, sizes=sizes))

    def fuse(self, output: Output) -> Output:
        """Return an output of the image model with the covariates."""
        return shifted(self.image, output, self.shift, self.share)

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        return self.fuse(self.image.forward_bags(features, mask, grid))

    def forward_weighted(
        self, features: Float[Tensor, "1 N E"], counts: Counts, grid: Cells | None = None
    ) -> Output:
        return self.fuse(self.image.forward_weighted(features, counts, grid))

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        return self.fuse(self.image.stream_bag(chunks, keep=keep))

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence | None:
        found = self.image.evidence_bag(features, grid)
        return None if found is None else self._with_rest(found)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        return self._with_rest(self.image.stream_evidence_bag(chunks, keep=keep))

    def _with_rest(self, found: Evidence) -> Evidence:
        rest = self.share * found.rest + self.shift.to(found.rest)
        return Evidence(terms=self.share * found.terms, rest=rest)

    def influence(
        self,
        features: Float[Tensor, "1 N E"],
        grid: Cells | None = None,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        options: dict[str, Any] = {"samples": samples, "directions": directions}
        return self.share * self.image.influence(features, grid, **options)

    def stream_influence(
        self,
        chunks: Chunks,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        options: dict[str, Any] = {"samples": samples, "directions": directions}
        return self.share * self.image.stream_influence(chunks, **options)

    def summed_parts(self) -> Any:
        return self.image.summed_parts()

    def token_removal(
        self, chunks: Chunks, *, grid: Cells | None = None, keep: bool = False
    ) -> TokenRemoval:
        removal = self.image.token_removal(chunks, grid=grid, keep=keep)
        removal.finish = self.fuse
        return removal

    def before_and_after_context(
        self, features: Float[Tensor, "1 N E"]
    ) -> tuple[Patches, Patches] | None:
        return self.image.before_and_after_context(features)

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        self.image.on_epoch_start(epoch, n_bags)

    def loss(self, output: Output, values: Tensor) -> dict[str, Float[Tensor, ""]]:
        return self.image.loss(output, values)

    @property
    def order_matters(self) -> bool:  # type: ignore[override]
        return self.image.order_matters

    @property
    def weighs_patches(self) -> bool:  # type: ignore[override]
        return self.image.weighs_patches

    @property
    def streams(self) -> bool:
        return self.image.streams

    @property
    def streams_evidence(self) -> bool:
        return self.image.streams_evidence

    @property
    def token_shape(self) -> tuple[int, int, int] | None:
        return self.image.token_shape

    @property
    def n_assignments(self) -> int:
        return self.image.n_assignments

    @property
    def title(self) -> str:
        return f"{self.image.title} with covariates"


def shifted(
    image: MILModel,
    output: Output,
    shift: Float[Tensor, "*B C"],
    share: float = 1.0,
) -> Output:
    """Return an output whose logits are a share of those of an image model, and a shift."""

    def shifted_by(logits: Tensor) -> Tensor:
        return (logits if share == 1 else share * logits) + shift.to(logits)

    aux = {
        name: shifted_by(part) if name in image.logits_in_aux else part
        for name, part in output.aux.items()
    }
    return replace(output, logits=shifted_by(output.logits), aux=aux)


def average_slide(model: MILModel) -> MILModel:
    """Return a model that reads patches only: a fused one is that of the average slide."""
    return model.of_average_slide() if isinstance(model, FusedModel) else model


def _build(image: MILModel | Mapping[str, Any], in_dim: int, n_outputs: int) -> MILModel:
    from caprmil.models.registry import create  # which imports these classes

    if isinstance(image, MILModel):
        return image
    settings = dict(image)
    return create(str(settings.pop("name", "")), in_dim, n_outputs, **settings)
