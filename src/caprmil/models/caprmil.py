"""CAPRMIL: patches exchange context through a few tokens, then any aggregator follows.

Lolos, Christodoulou, Moustakas, Christodoulidis, Vakalopoulou: "CAPRMIL: Context-Aware Patch
Representations for Multiple Instance Learning". The context (3.1.1 to 3.1.3) is in `context`, the
aggregator and the classifier (3.1.4) are here, with the choice of the faster form for a bag.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from caprmil.models import folding
from caprmil.models.base import (
    CHUNK,
    Assignments,
    Cells,
    Chunks,
    Evidence,
    Features,
    Grid,
    Mask,
    Memory,
    MILModel,
    Output,
    Patches,
)
from caprmil.models.context import ContextStack
from caprmil.models.folding import context_in_parts, context_packed
from caprmil.models.influence import SummedParts
from caprmil.models.layers import summing_dtype
from caprmil.models.mean_mlp import mean_of_parts, means_after_mlp
from caprmil.models.packing import Sizes, mask_from_sizes, pad_assignments, pad_packed
from caprmil.models.pooling import (
    MeanPool,
    Pool,
    pool_chunks,
    pool_evidence,
    pool_packed,
    top_means,
)
from caprmil.models.recompute import forward_recomputed, memory_by_size
from caprmil.models.streaming import ContextStream
from caprmil.models.token_removal import TokenRemoval


class CAPRMIL(MILModel):
    """Context for every patch, then an aggregator and a linear classifier (3.1.4).

    `pool` is the name of a pool ("mean", "attention", "gated") or of a registered model, which
    then follows the context stack with its own classifier and loss; a table of settings with such
    a `name`; or an object, `pool(patches, mask) -> (embedding, attention)` or a model.
    `temperature` is where the temperatures start; a lower one has sharper assignments.
    With `init = "centred"` the first block starts by subtracting the mean of the slide, instead of
    with random weights (docs/learning.md); the model is the same.

    Differs from the authors' code: dropout acts on the product with V, not on the attention
    matrix, and once on each branch, not twice (both as in the paper); the temperature is positive
    by construction; masks are exact. `head_dim` rounds down, as the 12-head ablation needs.
    """

    def __init__(
        self,
        in_dim: int,
        n_outputs: int,
        *,
        dim: int = 128,
        depth: int = 1,
        heads: int = 8,
        tokens: int = 4,
        mlp_ratio: int | float = 4,
        dropout: int | float = 0.1,
        learn_temperature: bool = True,
        temperature: int | float = 0.5,
        init: str = "usual",
        pool: str | dict[str, Any] | nn.Module = "mean",
    ) -> None:
        from caprmil.models.registry import build_pool  # which imports this class

        stack: dict[str, Any] = {
            "dim": dim,
            "depth": depth,
            "heads": heads,
            "tokens": tokens,
            "mlp_ratio": mlp_ratio,
            "dropout": dropout,
            "learn_temperature": learn_temperature,
            "temperature": temperature,
            "init": init,
        }
        super().__init__(in_dim, n_outputs, **stack, pool=pool)
        self.context = ContextStack(in_dim, **stack)
        self.pool = build_pool(pool, dim, n_outputs)
        has_classifier = isinstance(self.pool, MILModel)
        self.classify = nn.Identity() if has_classifier else nn.Linear(dim, n_outputs)
        self.memory: Memory = "auto"

    @property
    def needs_classes(self) -> bool:  # type: ignore[override]
        return isinstance(self.pool, MILModel) and self.pool.needs_classes

    @property
    def logits_in_aux(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.pool.logits_in_aux if isinstance(self.pool, MILModel) else ()

    @property
    def classifier(self) -> str | None:  # type: ignore[override]
        if not isinstance(self.pool, MILModel):
            return "classify"
        return self.pool.classifier and f"pool.{self.pool.classifier}"

    @property
    def order_matters(self) -> bool:  # type: ignore[override]
        return isinstance(self.pool, MILModel) and self.pool.order_matters

    @property
    def weighs_patches(self) -> bool:  # type: ignore[override]
        return isinstance(self.pool, Pool) or (
            isinstance(self.pool, MILModel) and self.pool.weighs_patches
        )

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        """Return the output by the equations of the paper."""
        patches, assignments = self.context(features, mask)
        return self.aggregate(patches, mask, grid, assignments)

    def aggregate(
        self,
        patches: Patches,
        mask: Mask,
        grid: Grid | None,
        assignments: tuple[Assignments, ...],
    ) -> Output:
        """Return the output from patches in context (3.1.4)."""
        if isinstance(self.pool, MILModel):
            weighted = mask.is_floating_point()
            forward = self.pool.forward_bags if weighted else self.pool
            output = forward(patches, mask=mask, grid=grid)
            return replace(output, assignments=assignments + output.assignments)
        embedding, attention = self.pool(patches, mask)
        output = self.output(embedding, attention, assignments)
        if not self.trains_top:
            return output
        return replace(output, aux={"top": top_means(self.classify(patches), mask, self.top_k)})

    def output(
        self,
        embedding: Float[Tensor, "B D"],
        attention: Float[Tensor, "B N"],
        assignments: tuple[Assignments, ...] = (),
    ) -> Output:
        """Return the output from the vector of each bag and the weights of its patches."""
        return Output(
            logits=self.classify(embedding),
            embedding=embedding,
            attention=attention,
            assignments=assignments,
        )

    # Faster forms for a single bag and for packed bags.

    def forward_single(self, features: Features, grid: Grid | None) -> Output:
        evaluated = super().forward_single(features, grid)
        if evaluated is not None:
            return evaluated
        self.check_features(features)
        n = features.shape[1]
        how, pool = self.memory_of(n), cast(Pool, self.pool)
        trains = self.training and torch.is_grad_enabled()
        if trains and how != "whole" and self.recomputes:
            return self.output(
                *forward_recomputed(self.context, pool, features, keep=how == "keep")
            )
        return self.forward_packed(self.validate(features, None)[0], (n,), grid)

    def packs(self, sizes: Sizes) -> bool:
        """Return whether bags are processed together: not if training recomputes activations."""
        return not self.recomputes or self.memory_of(sum(sizes)) == "whole"

    @property
    def recomputes(self) -> bool:
        """Whether training can recompute activations. A model as the pool needs the whole bag."""
        return isinstance(self.pool, Pool) and len(self.context.blocks) > 0

    def forward_packed(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes, grid: Grid | None
    ) -> Output:
        mask = mask_from_sizes(sizes, features.device)
        mean = self.trains_mean(features)
        if mean and len(sizes) == 1 and sizes[0] > folding.PART:
            parts, assignments = context_in_parts(self.context, features)
            weights = torch.full(mask.shape, 1 / sizes[0], dtype=summing_dtype(features))
            embedding = mean_of_parts(self.context.blocks[-1], parts)
            return self.output(embedding, weights, assignments)
        patches, packed = context_packed(self.context, features, sizes, last_mlp=not mean)
        assignments = tuple(pad_assignments(each, sizes) for each in packed)
        if mean:
            embedding = means_after_mlp(self.context.blocks[-1], patches, sizes)
            weights = mask.to(summing_dtype(embedding))
            return self.output(embedding, weights / weights.sum(dim=1, keepdim=True), assignments)
        if len(sizes) == 1:
            return self.aggregate(patches, mask, grid, assignments)
        if isinstance(self.pool, MILModel):
            output = self.pool.forward_packed(patches, sizes, grid)
            return replace(output, assignments=assignments + output.assignments)
        if isinstance(self.pool, Pool) and not self.trains_top:
            return self.output(*pool_packed(self.pool, patches, sizes), assignments)
        return self.aggregate(pad_packed(patches, sizes), mask, None, assignments)

    def trains_mean(self, features: Features) -> bool:
        """Return whether only the mean of the patches is needed, in training on a CPU."""
        return (
            type(self.pool) is MeanPool
            and not self.trains_top
            and len(self.context.blocks) > 0
            and self.training
            and torch.is_grad_enabled()
            and features.device.type == "cpu"
            and features.dtype == summing_dtype(features)
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )

    def save_memory(self, how: Memory) -> None:
        """Choose what training keeps of a bag for the backward pass. Gradients are the same."""
        self.memory = how

    def memory_of(self, n: int) -> Memory:
        """Return what training keeps of a bag of n patches."""
        if self.trains_top:
            return "whole"
        device = next(self.parameters()).device
        return memory_by_size(n, device) if self.memory == "auto" else self.memory

    @property
    def evaluates_in_chunks(self) -> bool:  # type: ignore[override]
        return isinstance(self.pool, Pool)

    @property
    def streams(self) -> bool:
        return isinstance(self.pool, Pool) or (
            isinstance(self.pool, MILModel) and self.pool.streams
        )

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        return self.aggregate_stream(ContextStream(self.context, chunks, keep=keep))

    def aggregate_stream(self, stream: ContextStream) -> Output:
        """Return the output from patches in context, chunk by chunk."""
        if isinstance(self.pool, MILModel):
            # The model may need several passes. Each computes the last MLP again.
            output = self.pool.stream_bag(stream.patches, keep=stream.keep)
            return replace(output, assignments=stream.assignments + output.assignments)
        if not isinstance(self.pool, Pool):
            raise NotImplementedError(f"{type(self.pool).__name__} reads a bag as a whole.")
        if type(self.pool) is MeanPool:
            return self.output(*stream.mean(), stream.assignments)
        return self.output(*pool_chunks(self.pool, stream.patches()), stream.assignments)

    # Names, evidence, loss and training.

    @property
    def input_layer(self) -> nn.Linear:
        return cast(nn.Linear, self.context.project[0])

    @property
    def probe_units(self) -> Sequence[int]:
        """One unit per head: the first of its channels."""
        if not len(self.context.blocks):
            return super().probe_units
        attend = self.context.blocks[0].attend
        return range(0, attend.heads * attend.qkv.in_features, attend.qkv.in_features)

    @torch.no_grad()
    def unit_values(self, features: Float[Tensor, "N E"]) -> Float[Tensor, "N D"]:
        patches = self.context.project(features)
        return self.context.blocks[0].norm_attend(patches) if self.context.blocks else patches

    def gather_units(self, units: Sequence[int], thresholds: Float[Tensor, " P"]) -> None:
        if len(self.context.blocks):
            self.context.blocks[0].attend.init_tokens(units, thresholds)

    @property
    def title(self) -> str:
        pool = self.settings["pool"]
        name = pool.get("name", "custom") if isinstance(pool, dict) else pool
        return f"{super().title} + {name if isinstance(name, str) else type(name).__name__}"

    @property
    def n_assignments(self) -> int:
        behind = self.pool.n_assignments if isinstance(self.pool, MILModel) else 0
        return len(self.context.blocks) + behind

    @property
    def token_shape(self) -> tuple[int, int, int] | None:
        blocks = self.context.blocks
        if not len(blocks):
            return None
        return len(blocks), blocks[0].attend.heads, blocks[0].attend.cluster.out_features

    def token_removal(
        self, chunks: Chunks, *, grid: Cells | None = None, keep: bool = False
    ) -> TokenRemoval:
        return TokenRemoval(self, self._validate_chunks(chunks), grid=grid, keep=keep)

    @torch.no_grad()
    def in_context(self, features: Float[Tensor, "1 N E"]) -> Patches:
        """Return the patches of one bag in context, before the pool."""
        stream = ContextStream(self.context, lambda: torch.split(features, CHUNK, dim=1), keep=True)
        return torch.cat(list(stream.patches()), dim=1)

    def before_and_after_context(
        self, features: Float[Tensor, "1 N E"]
    ) -> tuple[Patches, Patches] | None:
        if not len(self.context.blocks):
            return None
        features, _ = self.validate(features, None)
        return self.context.project(features), self.in_context(features)

    @property
    def streams_evidence(self) -> bool:
        behind = isinstance(self.pool, MILModel) and self.pool.streams_evidence
        return behind or isinstance(self.pool, Pool)

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence | None:
        if self.streams_evidence or not isinstance(self.pool, MILModel):
            return super().evidence_bag(features, grid)
        return self.pool.evidence_bag(self.in_context(features), grid)

    def summed_parts(self) -> SummedParts | None:
        if not isinstance(self.pool, Pool):
            return None
        classify = cast(nn.Linear, self.classify)
        return SummedParts(self.context.project, self.context.blocks, self.pool, classify)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        stream = ContextStream(self.context, chunks, keep=keep)
        if isinstance(self.pool, MILModel):
            return self.pool.stream_evidence_bag(stream.patches, keep=keep)
        classify = cast(nn.Linear, self.classify)
        return pool_evidence(cast(Pool, self.pool), stream.patches(), classify)

    def loss(self, output: Output, values: Tensor) -> dict[str, Float[Tensor, ""]]:
        if isinstance(self.pool, MILModel):
            return self.pool.loss(output, values)
        terms = super().loss(output, values)
        if "top" in output.aux:
            terms["top"] = self.criterion(output.aux["top"], values)
        return terms

    @property
    def has_patch_logits(self) -> bool:  # type: ignore[override]
        return isinstance(self.pool, Pool)

    @property
    def trains_top(self) -> bool:
        """Whether the loss has a term for the top patches, which needs all patches at once."""
        return self.top_k > 0 and self.training and torch.is_grad_enabled()

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        if isinstance(self.pool, MILModel):
            self.pool.on_epoch_start(epoch, n_bags)

    def no_decay(self) -> set[str]:
        """Return the temperatures: decay would pull all of them to softplus(0) = 0.69."""
        names = {name for name, _ in self.named_parameters() if name.endswith("temperature.raw")}
        if isinstance(self.pool, MILModel):
            names |= {f"pool.{name}" for name in self.pool.no_decay()}
        return names
