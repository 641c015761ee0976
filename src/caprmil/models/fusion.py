"""Fusion: a model of the patches, and covariates of the slide.

The covariates have an embedding. It is concatenated to that of the patches before the last linear
layer; or it has logits of its own; or it scales and shifts the embedding of the patches (FiLM,
Perez et al. 2018). This is FiLM on the patches in context: weights that sum to one and do not see
the covariates pool scaled and shifted patches to the scaled and shifted embedding, exactly. Only
the scores of attention do not see the covariates.

With the covariates of one slide, each of these is the image model with other numbers at its end, so
that it keeps its faster forms and its exact evidence. One more axis in this file: K numbers, as
which the covariates of a slide are encoded, from J columns.
"""

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

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
    MILModel,
    Output,
    Samples,
)
from caprmil.models.layers import Dropout
from caprmil.models.packing import Sizes
from caprmil.models.token_removal import TokenRemoval
from caprmil.models.wrapped import WrappedModel, build_image

Covariates: TypeAlias = Float[Tensor, "bags K"]  # of packed bags, too
WAYS = ("concatenation", "late", "film")
Inner = TypeVar("Inner", bound=nn.Module)
NO_COVARIATES = "This model reads covariates of the slide besides its patches. Pass them: {names}."


class FixedCovariates(NamedTuple):
    """The covariates of one slide in a fused model, as what they add to the logits."""

    share: float  # of the logits of the patches
    shift: Float[Tensor, " C"]  # added to them
    shown: tuple[str, ...]  # the values of the columns, for readers
    terms: Float[Tensor, "J C"]  # what each column adds, whatever the patches are
    scales: Float[Tensor, "J C D"] | None = None  # FiLM: what each adds, by the embedding


class FusedModel(WrappedModel):
    """An image model, and an embedding of the covariates.

    `columns` are the covariates with their statistics over the training slides: each has at least a
    `name` and a `width`, the numbers that it is encoded as. `how` is "concatenation"; "late": each
    modality has its own logits and its own loss, and the model has their mean; or "film": the
    covariates scale and shift the embedding of the patches. At first the covariates add nothing.

    `of_slide` is the model with the covariates of one slide: it reads patches only, in all forms of
    the image model.
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
            raise RecipeError(f"how is {', '.join(WAYS[:-1])} or {WAYS[-1]}, not {how!r}.")
        if dim < 1:
            raise RecipeError(f"dim must be 1 or more, not {dim}.")
        own = {"columns": list(columns), "how": how, "dim": dim, "dropout": dropout}
        super().__init__(in_dim, n_outputs, image=image, **own)
        self.image = build_image(image, in_dim, n_outputs)
        self.names = [str(column["name"]) for column in columns]
        self.widths = [int(column["width"]) for column in columns]
        self.how = how
        self.fixed: FixedCovariates | None = None
        self.project = nn.Linear(sum(self.widths), dim, bias=False)
        self.dropout = Dropout(dropout)
        if how == "film":
            self.classify = nn.Linear(dim, 2 * last_layer(self.image).in_features, bias=False)
        else:  # the bias of a concatenation is that of the image model
            self.classify = nn.Linear(dim, n_outputs, bias=how == "late")
        for parameter in self.classify.parameters():
            nn.init.zeros_(parameter)

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
            self.check_fixed()
        output = self.image(features, mask=mask, grid=grid, sizes=sizes)
        return self.fuse(output, covariates)

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        return self.fuse(self.image.forward_bags(features, mask, grid))

    def fuse(self, output: Output, covariates: Covariates | None = None) -> Output:
        """Return an output of the image model with covariates, by default those of the slide."""
        if covariates is None:
            fixed = self.check_fixed()
            return self._shifted(output, fixed.shift, fixed.share)
        read = self.read(covariates)
        if self.how == "concatenation":
            return self._shifted(output, read)
        if self.how == "late":
            aux = {**output.aux, "image": output.logits, "covariates": read}
            return replace(output, logits=(output.logits + read) / 2, aux=aux)
        scale, shift = read.chunk(2, dim=-1)
        embedding = (1 + scale) * output.embedding + shift
        return replace(output, logits=last_layer(self.image)(embedding))

    def read(self, covariates: Covariates) -> Float[Tensor, "bags _"]:
        """Return the logits of the covariates, or the scale and shift of an embedding."""
        covariates = covariates.to(self.project.weight.dtype)
        return cast(Tensor, self.classify(self.dropout(self.project(covariates))))

    def _shifted(self, output: Output, shift: Float[Tensor, "*B C"], share: float = 1.0) -> Output:
        """Return an output with a share of its logits, and a shift."""

        def shifted(logits: Tensor) -> Tensor:
            return (logits if share == 1 else share * logits) + shift.to(logits)

        aux = {
            name: shifted(part) if name in self.image.logits_in_aux else part
            for name, part in output.aux.items()
        }
        return replace(output, logits=shifted(output.logits), aux=aux)

    def loss(self, output: Output, values: Tensor) -> dict[str, Float[Tensor, ""]]:
        if "covariates" not in output.aux:
            return self.image.loss(output, values)
        aux = dict(output.aux)
        image, logits = aux.pop("image"), aux.pop("covariates")
        terms = self.image.loss(replace(output, logits=image, aux=aux), values)
        return {**terms, "covariates": self.criterion(logits, values)}

    # The model of one slide

    @torch.no_grad()
    def of_slide(
        self, covariates: Float[Tensor, " K"], shown: Sequence[str] | None = None
    ) -> "FusedModel":
        """Return the model of one slide, which reads patches only, with the same weights.

        `covariates` are those of the slide, and `shown` their values for readers.
        """
        if len(covariates) != sum(self.widths):
            raise BagError(f"There are {len(covariates)} numbers, not {sum(self.widths)}.")
        share = 0.5 if self.how == "late" else 1.0
        own = self.classify.weight.double() @ self.project.weight.double()
        own = own * covariates.to(own)
        terms = torch.stack([part.sum(dim=1) for part in torch.split(own, self.widths, dim=1)])
        image, scales, shift = self.image, None, share * terms.sum(dim=0)
        if self.classify.bias is not None:
            shift = shift + share * self.classify.bias
        if self.how == "film":
            layer = last_layer(image)
            scale, shifts = terms.chunk(2, dim=1)
            terms, scales = shifts @ layer.weight.double().mT, scale[:, None] * layer.weight
            shift = terms.new_zeros(self.n_outputs)
            # A linear layer behind a scale and a shift is another linear layer.
            changed = deepcopy(layer)
            changed.weight.add_(scales.sum(dim=0))
            changed.bias.add_(terms.sum(dim=0))
            image = _with_layer(image, str(image.classifier), changed)
        model = copy(self)
        model._modules = {**self._modules, "image": image}
        texts = tuple(shown or [""] * len(self.names))
        model.fixed = FixedCovariates(share, shift, texts, share * terms, scales)
        return model

    def of_average_slide(self) -> "FusedModel":
        """Return the model of a slide whose covariates are those of the average training slide."""
        return self.of_slide(torch.zeros(sum(self.widths)))

    def check_fixed(self) -> FixedCovariates:
        """Return the covariates of the slide, or raise if it is a model of any slide."""
        if self.fixed is None:
            raise BagError(NO_COVARIATES.format(names=", ".join(self.names)))
        return self.fixed

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        return self.fuse(self.image.stream_bag(chunks, keep=keep))

    def forward_weighted(
        self, features: Float[Tensor, "1 N E"], counts: Counts, grid: Cells | None = None
    ) -> Output:
        return self.fuse(self.image.forward_weighted(features, counts, grid))

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence | None:
        found = self.image.evidence_bag(features, grid)
        return None if found is None else self._with_rest(found)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        return self._with_rest(self.image.stream_evidence_bag(chunks, keep=keep))

    def _with_rest(self, found: Evidence) -> Evidence:
        share, shift, *_ = self.check_fixed()
        return Evidence(terms=share * found.terms, rest=share * found.rest + shift.to(found.rest))

    def influence(
        self,
        features: Float[Tensor, "1 N E"],
        grid: Cells | None = None,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        options: dict[str, Any] = {"samples": samples, "directions": directions}
        return self.check_fixed().share * self.image.influence(features, grid, **options)

    def stream_influence(
        self,
        chunks: Chunks,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        options: dict[str, Any] = {"samples": samples, "directions": directions}
        return self.check_fixed().share * self.image.stream_influence(chunks, **options)

    def token_removal(
        self, chunks: Chunks, *, grid: Cells | None = None, keep: bool = False
    ) -> TokenRemoval:
        removal = self.image.token_removal(chunks, grid=grid, keep=keep)
        removal.finish = self.fuse
        return removal

    @property
    def weighs_patches(self) -> bool:  # type: ignore[override]
        return self.fixed is not None and self.image.weighs_patches

    @property
    def streams(self) -> bool:
        return self.fixed is not None and self.image.streams

    @property
    def streams_evidence(self) -> bool:
        return self.fixed is not None and self.image.streams_evidence

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        if self.fixed is not None:
            raise ValueError("This is the model of one slide. Save the one that it was made of.")
        super().save_pretrained(folder)

    # Training sees the image model.

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


def average_slide(model: MILModel) -> MILModel:
    """Return a model that reads patches only: a fused one is that of the average slide."""
    return model.of_average_slide() if isinstance(model, FusedModel) else model


def last_layer(image: MILModel) -> nn.Linear:
    """Return the linear layer that makes the logits of the embedding, or raise without one."""
    if image.classifier is None:
        from caprmil.models.registry import MODELS  # which imports these classes

        others = ", ".join(name for name, kind in MODELS.items() if kind.classifier is not None)
        raise RecipeError(
            'how = "film" scales and shifts the embedding before one linear layer, and '
            f"{image.title} does not end with one. Choose how = concatenation or late, or a model "
            f"that does: {others}."
        )
    return cast(nn.Linear, image.get_submodule(image.classifier))


def _with_layer(module: Inner, path: str, layer: nn.Module) -> Inner:
    """Return a module with another layer, at this path. All other weights are shared."""
    name, _, rest = path.partition(".")
    inner = cast(nn.Module, module._modules[name])
    changed = copy(module)
    changed._modules = {**module._modules, name: _with_layer(inner, rest, layer) if rest else layer}
    return changed
