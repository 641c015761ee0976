"""The patches of several sources in one bag: a projection and a vector for each source.

Before any model stands one layer. A patch of source s with features x becomes W_s x + v_s: all
sources then have one width, and the model behind it is unchanged. One more axis in this file:
S sources.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
    Patches,
    Samples,
)
from caprmil.models.influence import SummedParts
from caprmil.models.packing import Sizes
from caprmil.models.token_removal import TokenRemoval
from caprmil.models.wrapped import WrappedModel, build_image


class SourceModel(WrappedModel):
    """A model of patches from several sources, of which each has its own features.

    `widths` are those of the sources. Features are padded with zeros to the widest of them, and
    followed by a column for each source, which is 1 for its patches. `dim` is the width that the
    model behind the projections gets.
    """

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        image: MILModel | Mapping[str, Any],
        widths: Sequence[int],
        dim: int = 256,
    ) -> None:
        if not widths or min(widths) < 1 or in_dim != max(widths) + len(widths):
            raise ValueError(f"{in_dim=} does not fit to sources of the {widths=}.")
        if dim < 1:
            raise ValueError(f"dim must be 1 or more, not {dim}.")
        super().__init__(in_dim, n_outputs, image=image, widths=list(widths), dim=dim)
        self.widths, self.dim = list(widths), dim
        self.projections = nn.ModuleList(nn.Linear(width, dim, bias=False) for width in widths)
        self.vectors = nn.Parameter(0.02 * torch.randn(len(widths), dim))
        self.image = build_image(image, dim, n_outputs)

    def project(self, features: Features) -> Patches:
        """Return patches of one width, whatever their source is."""
        member = features[..., max(self.widths) :]
        compiling = torch.compiler.is_compiling()
        projected = features.new_zeros(*features.shape[:-1], self.dim)
        for source, (layer, width) in enumerate(zip(self.projections, self.widths, strict=True)):
            share = member[..., source, None]
            if compiling:
                projected = projected + share * (
                    layer(features[..., :width]) + self.vectors[source]
                )
                continue
            rows = share[..., 0] != 0  # the others add nothing
            own = share[rows] * (layer(features[rows][:, :width]) + self.vectors[source])
            projected = projected.index_put((rows,), own.to(projected), accumulate=True)
        return projected

    def _project_chunks(self, chunks: Chunks) -> Chunks:
        return lambda: map(self.project, chunks())

    def forward(
        self,
        features: Features,
        *,
        mask: Mask | None = None,
        grid: Grid | None = None,
        sizes: Sizes | None = None,
    ) -> Output:
        self.check_features(features)
        patches = self.project(features.to(self.vectors.dtype))
        return self.image(patches, mask=mask, grid=grid, sizes=sizes)

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        return self.image.forward_bags(self.project(features), mask, grid)

    def forward_weighted(
        self, features: Float[Tensor, "1 N E"], counts: Counts, grid: Cells | None = None
    ) -> Output:
        features, _ = self.validate(features, None)
        return self.image.forward_weighted(self.project(features), counts, grid)

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        return self.image.stream_bag(self._project_chunks(chunks), keep=keep)

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence | None:
        return self.image.evidence_bag(self.project(features), grid)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        return self.image.stream_evidence_bag(self._project_chunks(chunks), keep=keep)

    @torch.no_grad()
    def influence(
        self,
        features: Float[Tensor, "1 N E"],
        grid: Cells | None = None,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        patches = self.project(self.validate(features, None)[0])
        return self.image.influence(patches, grid, samples=samples, directions=directions)

    def summed_parts(self) -> SummedParts | None:
        parts = self.image.summed_parts()
        if parts is None:
            return None
        behind = parts.project
        return parts._replace(project=lambda features: behind(self.project(features)))

    def token_removal(
        self, chunks: Chunks, *, grid: Cells | None = None, keep: bool = False
    ) -> TokenRemoval:
        own = self._project_chunks(self._validate_chunks(chunks))
        return self.image.token_removal(own, grid=grid, keep=keep)

    def before_and_after_context(
        self, features: Float[Tensor, "1 N E"]
    ) -> tuple[Patches, Patches] | None:
        return self.image.before_and_after_context(self.project(features.to(self.vectors.dtype)))

    @property
    def export_problem(self) -> str | None:
        return (
            "reads patches of several sources, each with its own projection. Sources that are "
            "concatenated can be exported"
        )

    @property
    def classifier(self) -> str | None:  # type: ignore[override]
        inner = self.image.classifier
        return None if inner is None else f"image.{inner}"

    @property
    def logits_in_aux(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.image.logits_in_aux
