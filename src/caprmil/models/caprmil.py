"""CAPRMIL: patches gain context through a few tokens, then any aggregator will do.

Lolos, Christodoulou, Moustakas, Christodoulidis, Vakalopoulou: "CAPRMIL: Context-Aware Patch
Representations for Multiple Instance Learning". Section numbers below are the paper's.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

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
from caprmil.models.layers import Dropout, summing_dtype, weighted_sum
from caprmil.models.packing import Sizes, mask_from_sizes, pad_packed, split_bags
from caprmil.models.pooling import MeanPool, Pool, pool_chunks, pool_evidence, pool_packed
from caprmil.models.replay import replay
from caprmil.models.thinking import in_pieces, think, think_of_mean
from caprmil.models.walks import Walk

EPSILON = 1e-5  # added to the mass of a token, so that an empty one is zero and not NaN
WHOLE, WHOLE_GPU = 200_000, 50_000  # patches up to which training keeps all of a bag
KEPT = 500_000  # and up to which it keeps what comes out of the first layer
COLDEST = 1e-3  # a temperature never falls below this

Tokens = Float[Tensor, "B H M K"]
Sums = Float[Tensor, "B H M *width"]  # of patches, D wide, if the attention is folded; else K
Mass = Float[Tensor, "B H M"]
Clusters = tuple[Float[Tensor, "MH D"], Float[Tensor, " MH"]]


class Temperature(nn.Module):
    """One learnable temperature a head: COLDEST + softplus(raw), positive whatever happens.

    It starts at 0.5. Near there it moves 0.39 times as fast as a bare parameter would under Adam.
    """

    def __init__(self, heads: int, *, start: float = 0.5) -> None:
        super().__init__()
        raw = torch.tensor(start - COLDEST, dtype=torch.float64).expm1().log()
        self.raw = nn.Parameter(raw.to(torch.get_default_dtype()).repeat(heads))

    def forward(self) -> Float[Tensor, " H"]:
        return COLDEST + F.softplus(self.raw)


class ContextAttention(nn.Module):
    """Patches talk to each other through M tokens a head, at a cost linear in N (3.1.3).

    Four steps, each a method: `assign`, `gather`, `mix`, `broadcast`. Only `gather` sums over
    patches, so a bag may also come in pieces.

    With few tokens (HM < D, `folded`) the products are in another order: the maps `place`,
    `content` and `out` act on the HM tokens or on each other, never on the N patches. That is the
    same in exact arithmetic, gradients and dropout included, and leaves 3 HM products a patch of
    3 D + 3 M.
    """

    def __init__(
        self, dim: int, *, heads: int, tokens: int, dropout: int | float, learn_temperature: bool
    ) -> None:
        super().__init__()
        if not 1 <= heads <= dim:
            raise ValueError(f"There must be between 1 and {dim=} heads: {heads=}.")
        if tokens < 1:
            raise ValueError(f"A head has one token at least: {tokens=}.")
        head_dim = dim // heads  # rounds down: 12 heads of a width of 128 use 120 channels
        if dim % heads:
            warnings.warn(
                f"{heads} heads do not divide a width of {dim}: {heads * head_dim} are used.",
                stacklevel=2,
            )
        self.heads = heads
        self.folded = heads * tokens < dim
        self.place = nn.Linear(dim, heads * head_dim)  # x in the paper: where a patch belongs
        self.content = nn.Linear(dim, heads * head_dim)  # f in the paper: what it brings there
        self.cluster = nn.Linear(head_dim, tokens)  # W_cluster, shared by the heads
        nn.init.orthogonal_(self.cluster.weight)
        self.temperature = Temperature(heads) if learn_temperature else None
        self.qkv = nn.Linear(head_dim, 3 * head_dim, bias=False)  # shared by the heads
        self.out = nn.Linear(heads * head_dim, dim)
        self.dropout = Dropout(dropout)

    def assign(self, patches: Patches, mask: Mask | None = None) -> Assignments:
        """Soft clustering: each patch spends one unit of weight on the M tokens of a head."""
        if self.folded:
            weights = self.weigh(patches, self.clusters())
            assignments = rearrange(weights, "b n (m h) -> b h n m", h=self.heads)
        else:
            place = rearrange(self.place(patches), "b n (h k) -> b h n k", h=self.heads)
            logits = self.cluster(place)
            if self.temperature is not None:
                logits = logits / self.temperature()[:, None, None]
            assignments = logits.softmax(dim=-1, dtype=summing_dtype(logits))
        if mask is not None:  # padding belongs to no token, so it shifts no mean in `gather`
            assignments = assignments * mask[:, None, :, None]
        return assignments

    def weigh(
        self, patches: Float[Tensor, "*B N D"], clusters: Clusters
    ) -> Float[Tensor, "*B N MH"]:
        """Assign patches by folded maps, the weights of a patch in one row."""
        logits = F.linear(patches, *clusters)
        # Over an axis that is not the last: a softmax over four neighbours is slow.
        heads = logits.view(*logits.shape[:-1], -1, self.heads)
        return heads.softmax(dim=-2, dtype=summing_dtype(logits)).view(logits.shape)

    def clusters(self) -> Clusters:
        """Fold `place`, `cluster` and the temperatures into one map from patches to logits."""
        place = rearrange(self.place.weight, "(h k) d -> h k d", h=self.heads)
        offset = rearrange(self.place.bias, "(h k) -> h k", h=self.heads)
        weight = self.cluster.weight @ place
        bias = F.linear(offset, self.cluster.weight, self.cluster.bias)
        if self.temperature is not None:
            temperature = self.temperature()
            weight, bias = weight / temperature[:, None, None], bias / temperature[:, None]
        return rearrange(weight, "h m d -> (m h) d"), rearrange(bias, "h m -> (m h)")

    def gather(self, patches: Patches, assignments: Assignments) -> tuple[Sums, Mass]:
        """Aggregation: what the patches bring to each token, and with how much weight."""
        if not self.folded:
            content = rearrange(self.content(patches), "b n (h k) -> b h n k", h=self.heads)
            return weighted_sum(assignments, content), assignments.sum(dim=2)
        weights = rearrange(assignments, "b h n m -> b n (m h)")
        sums = rearrange(weighted_sum(weights, patches), "b (m h) d -> b h m d", h=self.heads)
        return sums, rearrange(weights.sum(dim=1), "b (m h) -> b h m", h=self.heads)

    def mix(self, sums: Sums, mass: Mass) -> Tokens:
        """Self-attention among tokens. It is M by M: the size of the slide does not matter."""
        if self.folded:
            with torch.autocast(sums.device.type, enabled=False):  # sums keep their digits
                weight, bias = (part.to(sums.dtype) for part in self.content.parameters())
                weight = rearrange(weight, "(h k) d -> h d k", h=self.heads)
                bias = rearrange(bias, "(h k) -> h 1 k", h=self.heads)
                sums = sums @ weight + mass.unsqueeze(-1) * bias
        tokens = sums / (mass.unsqueeze(-1) + EPSILON)
        tokens = tokens.to(self.qkv.weight.dtype)
        query, key, value = self.qkv(tokens).chunk(3, dim=-1)
        return self.dropout(F.scaled_dot_product_attention(query, key, value))

    def broadcast(self, tokens: Tokens, assignments: Assignments) -> Patches:
        """Context broadcasting: each patch hears its tokens by the weights it gave them."""
        if self.folded:
            messages = self.messages(tokens)
            weights = rearrange(assignments, "b h n m -> b n (m h)")
            return weights.to(messages.dtype) @ messages
        heard = einsum(assignments.to(tokens.dtype), tokens, "b h n m, b h m k -> b h n k")
        return self.out(rearrange(heard, "b h n k -> b n (h k)"))

    def messages(self, tokens: Tokens) -> Float[Tensor, "B MH D"]:
        """Fold `out` into the tokens. Each head says its share of the bias, with weights of one."""
        weight = rearrange(self.out.weight, "d (h k) -> h k d", h=self.heads)
        said = tokens @ weight + self.out.bias / self.heads
        return rearrange(said, "b h m d -> b (m h) d")

    def forward(self, patches: Patches, mask: Mask | Sizes) -> tuple[Patches, Assignments]:
        """Return what each patch heard, and how strongly it belongs to each token."""
        if isinstance(mask, tuple) and len(mask) > 1:
            return self.forward_packed(patches, mask)
        assignments = self.assign(patches, None if isinstance(mask, tuple) else mask)
        tokens = self.mix(*self.gather(patches, assignments))
        return self.broadcast(tokens, assignments), assignments

    def forward_packed(self, patches: Patches, sizes: Sizes) -> tuple[Patches, Assignments]:
        """Let packed bags each meet in tokens of their own."""
        assignments = self.assign(patches)
        weights = split_bags(assignments, sizes, dim=2)
        met = [self.gather(*own) for own in zip(split_bags(patches, sizes), weights, strict=True)]
        tokens = self.mix(*(torch.cat(part) for part in zip(*met, strict=True)))
        heard = [self.broadcast(*own) for own in zip(torch.split(tokens, 1), weights, strict=True)]
        return torch.cat(heard, dim=1), assignments


class ContextBlock(nn.Module):
    """A transformer block whose attention goes through tokens (3.1.2): `hear`, then `think`."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        tokens: int,
        mlp_ratio: int | float,
        dropout: int | float,
        learn_temperature: bool,
    ) -> None:
        super().__init__()
        self.norm_attend = nn.LayerNorm(dim)
        self.attend = ContextAttention(
            dim, heads=heads, tokens=tokens, dropout=dropout, learn_temperature=learn_temperature
        )
        self.norm_think = nn.LayerNorm(dim)
        hidden = int(mlp_ratio * dim)
        if hidden < 1:
            raise ValueError(f"The MLP needs a width: {mlp_ratio=}.")
        self.think = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.dropout = Dropout(dropout)

    def hear(self, patches: Patches, mask: Mask | Sizes) -> tuple[Patches, Assignments]:
        """Add to each patch what it heard."""
        heard, assignments = self.attend(self.norm_attend(patches), mask)
        return patches + self.dropout(heard), assignments


class ContextStack(nn.Module):
    """Projects patches and gives them context: what stands before the aggregator (3.1.1, 3.1.2)."""

    def __init__(
        self,
        in_dim: int,
        *,
        dim: int,
        depth: int,
        heads: int,
        tokens: int,
        mlp_ratio: int | float,
        dropout: int | float,
        learn_temperature: bool,
    ) -> None:
        super().__init__()
        if depth < 0:
            raise ValueError(f"There are 0 context blocks or more: {depth=}.")
        self.project = nn.Sequential(
            nn.Linear(in_dim, dim), nn.LayerNorm(dim), nn.GELU(), Dropout(dropout)
        )
        self.blocks: Sequence[ContextBlock] = nn.ModuleList(  # type: ignore[assignment]
            ContextBlock(
                dim,
                heads=heads,
                tokens=tokens,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                learn_temperature=learn_temperature,
            )
            for _ in range(depth)
        )

    def forward(
        self, features: Features, mask: Mask | Sizes
    ) -> tuple[Patches, tuple[Assignments, ...]]:
        """Return patches in context, and their assignments to the tokens of each block."""
        patches, assignments = self.hear(features, mask)
        return think(self.blocks[-1], patches) if assignments else patches, assignments

    def mean(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes
    ) -> tuple[Float[Tensor, "bags D"], tuple[Assignments, ...]]:
        """Return the mean patch of each packed bag, and the assignments, while a model learns."""
        patches, assignments = self.hear(features, sizes)
        return think_of_mean(self.blocks[-1], patches, sizes), assignments

    def hear(
        self, features: Features, mask: Mask | Sizes
    ) -> tuple[Patches, tuple[Assignments, ...]]:
        """Go up to where patches have heard in the last block, and not thought it over."""
        patches, assignments = self.project(features), list[Assignments]()
        for number, block in enumerate(self.blocks):
            if number:
                patches = think(self.blocks[number - 1], patches)
            patches, assigned = block.hear(patches, mask)
            assignments.append(assigned)
        return patches, tuple(assignments)


class CAPRMIL(MILModel):
    """Context for every patch, then an aggregator and a linear classifier.

    `pool` is the name of a pool ("mean", "attention", "gated") or of a registered model, which
    then stands behind the context stack with its own classifier and loss; a table of settings
    with such a `name`; or an object, `pool(patches, mask) -> (embedding, attention)` or a model.

    Differs from the authors' code: dropout acts on the product with V, not on the attention
    matrix, and once on each branch, not twice (both as the paper says); the temperature is
    positive by construction; masks are exact. `head_dim` rounds down, as the 12-head ablation
    needs.
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
        pool: str | dict[str, Any] | nn.Module = "mean",
    ) -> None:
        from caprmil.models.registry import build_pool  # which knows this class in turn

        stack: dict[str, Any] = {
            "dim": dim,
            "depth": depth,
            "heads": heads,
            "tokens": tokens,
            "mlp_ratio": mlp_ratio,
            "dropout": dropout,
            "learn_temperature": learn_temperature,
        }
        super().__init__(in_dim, n_outputs, **stack, pool=pool)
        self.context = ContextStack(in_dim, **stack)
        self.pool = build_pool(pool, dim, n_outputs)
        behind = isinstance(self.pool, MILModel)  # a whole model classifies for itself
        self.classify = nn.Identity() if behind else nn.Linear(dim, n_outputs)
        self.memory: Memory = "auto"

    @property
    def needs_classes(self) -> bool:  # type: ignore[override]
        return isinstance(self.pool, MILModel) and self.pool.needs_classes

    @property
    def order_matters(self) -> bool:  # type: ignore[override]
        return isinstance(self.pool, MILModel) and self.pool.order_matters

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        patches, assignments = self.context(features, mask)
        if isinstance(self.pool, MILModel):
            output = self.pool(patches, mask=mask, grid=grid)
            return replace(output, assignments=assignments + output.assignments)
        embedding, attention = self.pool(patches, mask)
        logits = self.classify(embedding)
        return Output(
            logits=logits, embedding=embedding, attention=attention, assignments=assignments
        )

    def packs(self, sizes: Sizes) -> bool:
        """Large bags fill a processor alone, and take memory that `forward_in_chunks` saves."""
        return self._memory(sum(sizes)) == "whole"

    def forward_packed(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes, grid: Grid | None
    ) -> Output:
        if self._learns_mean(features):
            return self._learn_mean(features, sizes)
        patches, packed = self.context(features, sizes)
        assignments = tuple(_unpack(own, sizes) for own in packed)
        if isinstance(self.pool, MILModel):
            output = self.pool.forward_packed(patches, sizes, grid)
            return replace(output, assignments=assignments + output.assignments)
        if isinstance(self.pool, Pool):
            embedding, attention = pool_packed(self.pool, patches, sizes)
        else:  # somebody's own, which knows masks alone
            embedding, attention = self.pool(
                pad_packed(patches, sizes), mask_from_sizes(sizes, patches.device)
            )
        return Output(
            logits=self.classify(embedding),
            embedding=embedding,
            attention=attention,
            assignments=assignments,
        )

    def _learns_mean(self, features: Features) -> bool:
        blocks = self.context.blocks
        return type(self.pool) is MeanPool and len(blocks) > 0 and in_pieces(blocks[-1], features)

    def _learn_mean(self, features: Float[Tensor, "1 N E"], sizes: Sizes) -> Output:
        """Learn from packed bags whose mean patch is all that counts."""
        embedding, packed = self.context.mean(features, sizes)
        mask = mask_from_sizes(sizes, features.device).to(summing_dtype(embedding))
        return Output(
            logits=self.classify(embedding),
            embedding=embedding,
            attention=mask / mask.sum(dim=1, keepdim=True),
            assignments=tuple(_unpack(own, sizes) for own in packed),
        )

    def save_memory(self, how: Memory) -> None:
        """Say what of a bag stays in memory in training. The gradients are the same."""
        self.memory = how

    def _memory(self, n: int) -> Memory:
        if self.memory != "auto":
            return self.memory
        on_cpu = next(self.parameters()).device.type == "cpu"
        return (
            "whole" if n <= (WHOLE if on_cpu else WHOLE_GPU) else "keep" if n <= KEPT else "stream"
        )

    def forward_in_chunks(self, features: Features) -> Output | None:
        how = self._memory(features.shape[1])
        if how == "whole" and self._learns_mean(features):
            self.check_features(features)
            features = features.to(self.context.blocks[-1].norm_think.weight.dtype)
            return self._learn_mean(features, (features.shape[1],))
        apart = isinstance(self.pool, Pool) and len(self.context.blocks) > 0
        if how == "whole" or not apart or not (self.training and torch.is_grad_enabled()):
            return super().forward_in_chunks(features)
        self.check_features(features)
        embedding, attention = replay(
            self.context, cast(Pool, self.pool), features, keep=how == "keep"
        )
        return Output(logits=self.classify(embedding), embedding=embedding, attention=attention)

    @property
    def evaluates_in_chunks(self) -> bool:  # type: ignore[override]
        return isinstance(self.pool, Pool)

    @property
    def streams(self) -> bool:
        return isinstance(self.pool, Pool) or (
            isinstance(self.pool, MILModel) and self.pool.streams
        )

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        walk = Walk(self.context, chunks, keep=keep)
        if isinstance(self.pool, MILModel):
            # The model behind may want several passes; the context is worked out anew for each.
            output = self.pool.stream_bag(walk.patches, keep=keep)
            return replace(output, assignments=walk.assignments + output.assignments)
        if not isinstance(self.pool, Pool):
            raise NotImplementedError(f"{type(self.pool).__name__} reads a bag as a whole.")
        if type(self.pool) is MeanPool:
            embedding, attention = walk.mean()
        else:
            embedding, attention = pool_chunks(self.pool, walk.patches())
        return Output(
            logits=self.classify(embedding),
            embedding=embedding,
            attention=attention,
            assignments=walk.assignments,
        )

    @torch.no_grad()
    def in_context(self, features: Float[Tensor, "1 N E"]) -> Patches:
        """Return the patches of one bag as the pool sees them."""
        walk = Walk(self.context, lambda: torch.split(features, CHUNK, dim=1), keep=True)
        return torch.cat(list(walk.patches()), dim=1)

    @property
    def streams_evidence(self) -> bool:
        behind = isinstance(self.pool, MILModel) and self.pool.streams_evidence
        return behind or isinstance(self.pool, Pool)  # another may be anything

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence | None:
        if self.streams_evidence or not isinstance(self.pool, MILModel):
            return super().evidence_bag(features, grid)
        return self.pool.evidence_bag(self.in_context(features), grid)

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        walk = Walk(self.context, chunks, keep=keep)
        if isinstance(self.pool, MILModel):
            return self.pool.stream_evidence_bag(walk.patches, keep=keep)
        return pool_evidence(cast(Pool, self.pool), walk.patches(), cast(nn.Linear, self.classify))

    def loss(self, output: Output, values: Tensor) -> dict[str, Float[Tensor, ""]]:
        if isinstance(self.pool, MILModel):
            return self.pool.loss(output, values)
        return super().loss(output, values)

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        if isinstance(self.pool, MILModel):
            self.pool.on_epoch_start(epoch, n_bags)

    def no_decay(self) -> set[str]:
        """Spare the temperatures: decay would pull them all towards softplus(0) = 0.69."""
        spared = {name for name, _ in self.named_parameters() if name.endswith("temperature.raw")}
        if isinstance(self.pool, MILModel):
            spared |= {f"pool.{name}" for name in self.pool.no_decay()}
        return spared


def _unpack(packed: Float[Tensor, "1 H N M"], sizes: Sizes) -> Float[Tensor, "B H P M"]:
    """Return the assignments of packed bags side by side."""
    if len(sizes) == 1:
        return packed
    return rearrange(
        pad_packed(rearrange(packed, "1 h n m -> 1 n h m"), sizes), "b n h m -> b h n m"
    )
