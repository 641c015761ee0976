"""What a MIL model is here: bags of patch features in, one `Output` out.

Axes, in every model file: B bags, N patches, E encoder features, D width, H heads, K head width,
M tokens, C classes. The aliases below are checked at run time, under pytest only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from caprmil.errors import BagError
from caprmil.models.packing import Sizes, apart, mask_of, unpack

Features: TypeAlias = Float[Tensor, "B N E"]
Patches: TypeAlias = Float[Tensor, "B N D"]
Mask: TypeAlias = Bool[Tensor, "B N"]  # true where a patch is real, false where it is padding
Grid: TypeAlias = Int[Tensor, "B N 2"]  # column and row of each patch
Cells: TypeAlias = Int[Tensor, "N 2"]  # the grid of one bag
Weights: TypeAlias = Float[Tensor, "B N"]
Embedding: TypeAlias = Float[Tensor, "B D"]
Logits: TypeAlias = Float[Tensor, "B C"]
Labels: TypeAlias = Int[Tensor, " B"]
Assignments: TypeAlias = Float[Tensor, "B H N M"]

Chunks: TypeAlias = Callable[[], Iterable[Features]]
"""A bag in pieces, in order: each call starts from the first patch again."""

Memory: TypeAlias = Literal["auto", "whole", "keep", "stream"]
"""How much of a bag is in memory while a model learns from it: by its size; everything; only what
the patches are behind the first layer; a piece at a time."""

PIECE = 1024  # patches looked at at once where a bag is in memory: what they need fits a cache

EMPTY = "A bag has no patches. Leave slides without tissue out."


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the draws of a random model lie apart: standard deviations, of patches and bags."""

    attention: Weights
    probabilities: Float[Tensor, "B C"]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What every model returns, always whole: no flags, no tuples of changing length."""

    logits: Logits
    embedding: Float[Tensor, "B ..."]
    attention: Weights  # sums to one over the real patches of a bag
    class_attention: Float[Tensor, "B C N"] | None = None  # where each class has its own
    scores: Float[Tensor, "B N C"] | None = None  # what a patch alone says, where a model asks it
    spread: Spread | None = None  # where a model is random
    assignments: tuple[Assignments, ...] = ()  # one per context block
    aux: dict[str, Tensor] = field(default_factory=dict)  # for this model's own loss, nobody else


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What each patch of one bag adds to each logit. The terms and the rest sum to the logits.

    The logits are those of `Output`; of a model that draws at random, their mean over the draws.
    """

    terms: Float[Tensor, "N C"]
    rest: Float[Tensor, " C"]  # what no patch adds: the bias and, of random weights, their noise

    @property
    def logits(self) -> Float[Tensor, " C"]:
        return self.terms.sum(dim=0) + self.rest


class MILModel(nn.Module):
    """Base of every model. `forward` never sees a label: labels come in through `loss` alone.

    A model hands its settings to `super().__init__`, so that it can be saved and built again.
    """

    order_matters: ClassVar[bool] = False  # true where patches are read as a sequence
    evaluates_in_chunks: bool = False  # true where that is quicker than to look at a bag as a whole
    class_weights: Float[Tensor, " C"] | None

    def __init__(self, in_dim: int, n_outputs: int, **settings: Any) -> None:
        super().__init__()
        if in_dim < 1 or n_outputs < 2:
            raise ValueError(
                f"A model needs features and two classes at least: {in_dim=}, {n_outputs=}."
            )
        self.in_dim, self.n_outputs, self.settings = in_dim, n_outputs, settings
        self.register_buffer("class_weights", None, persistent=False)

    def forward(
        self,
        features: Features,
        *,
        mask: Mask | None = None,
        grid: Grid | None = None,
        sizes: Sizes | None = None,
    ) -> Output:
        """Classify a batch of bags. Without a mask, every patch is real.

        With `sizes`, the bags are packed: one behind the other in a batch of one, no padding.
        """
        if sizes is not None:
            return self._forward_sizes(features, sizes, grid)
        alone = mask is None and len(features) == 1
        if alone and not features.requires_grad and not torch.compiler.is_compiling():
            output = self.forward_pieces(features)
            if output is not None:
                return output
        return self.forward_bags(*self.validate(features, mask), grid)

    def forward_pieces(self, features: Features) -> Output | None:
        """Take one bag piece by piece where that is quicker or takes less memory; else None."""
        if self.training or torch.is_grad_enabled() or not self.evaluates_in_chunks:
            return None
        return self.stream(lambda: [features], keep=True)

    def save_memory(self, how: Memory) -> None:
        """Say how training may save memory. Most models have no use for it."""

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        """Do the work. A new model writes this method, or else `forward_bag`."""
        outputs = []
        for number, real in enumerate(mask):
            bag, cells = features[number : number + 1], None if grid is None else grid[number, real]
            whole = bool(real.all())
            outputs.append(self.forward_bag(bag if whole else bag[:, real], cells))
        return join(outputs, mask)

    def packs(self, sizes: Sizes) -> bool:
        """Tell whether bags of these sizes are best worked on together, or else one by one."""
        return True

    def forward_packed(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes, grid: Int[Tensor, "1 N 2"] | None
    ) -> Output:
        """Do the work for packed bags. Models that work patch by patch write it to save padding."""
        cells = None if grid is None else unpack(grid, sizes)
        return self.forward_bags(unpack(features, sizes), mask_of(sizes, features.device), cells)

    def _forward_sizes(self, features: Features, sizes: Sizes, grid: Grid | None) -> Output:
        if len(features) != 1 or features.shape[1] != sum(sizes):
            raise ValueError(f"{sizes=} do not sum to {tuple(features.shape)=}.")
        if min(sizes) < 1:
            raise BagError(EMPTY)
        if self.packs(sizes):
            return self.forward_packed(self.validate(features, None)[0], sizes, grid)
        cells = [None] * len(sizes) if grid is None else apart(grid, sizes)
        bags = zip(apart(features, sizes), cells, strict=True)
        return join([self(bag, grid=own) for bag, own in bags], mask_of(sizes, features.device))

    def forward_bag(self, features: Features, grid: Cells | None) -> Output:
        """Do the work for one bag without padding, a batch of one.

        For models that read patches as a sequence or draw at random: there, padding can neither
        shift a neighbour nor take a draw. Tensors in `aux` have one row a bag.
        """
        raise NotImplementedError

    @torch.no_grad()
    def stream(self, chunks: Chunks, *, keep: bool = False) -> Output:
        """Classify one bag piece by piece, in memory that does not grow with it. Exact.

        `keep` allows memory for what is known of each patch between passes over the bag: it
        spares work, and brings the assignments as well.
        """
        return self.stream_bag(self._pieces(chunks), keep=keep)

    def _pieces(self, chunks: Chunks) -> Chunks:
        """Check a bag that comes in pieces, cut them to the size of a cache, and cast them."""
        if self.training:
            raise ValueError("Streaming is for evaluation: call model.eval() first.")
        dtype = next(self.parameters()).dtype

        def pieces() -> Iterator[Features]:
            empty = True
            for features in chunks():
                self.check_features(features)
                for some in torch.split(features, PIECE, dim=1):
                    empty = False
                    yield some.to(dtype)
            if empty:
                raise BagError(EMPTY)

        return pieces

    @property
    def streams(self) -> bool:
        """Whether `stream` is offered: whether a bag need not be seen as a whole."""
        return type(self).stream_bag is not MILModel.stream_bag

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        """Do the work of `stream`. Models that must see a bag as a whole leave it out."""
        raise NotImplementedError(f"{type(self).__name__} reads a bag as a whole.")

    @torch.no_grad()
    def evidence(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None = None
    ) -> Evidence | None:
        """Return what each patch of one bag adds to each logit, exactly.

        None is the answer of a model whose logits are no sums over patches.
        """
        if self.training:
            raise ValueError("Evidence is for evaluation: call model.eval() first.")
        return self.evidence_bag(self.validate(features, None)[0], grid)

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence | None:
        """Do the work of `evidence`. Models whose logits are no sums over patches leave it out."""
        if not self.streams_evidence:
            return None
        return self.stream_evidence_bag(lambda: torch.split(features, PIECE, dim=1), keep=True)

    @torch.no_grad()
    def stream_evidence(self, chunks: Chunks, *, keep: bool = False) -> Evidence:
        """Return the evidence of one bag that comes piece by piece; `keep` as in `stream`."""
        return self.stream_evidence_bag(self._pieces(chunks), keep=keep)

    @property
    def streams_evidence(self) -> bool:
        """Whether `stream_evidence` is offered."""
        return type(self).stream_evidence_bag is not MILModel.stream_evidence_bag

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        """Do the work of `stream_evidence`."""
        raise NotImplementedError(f"{type(self).__name__} gives no evidence piece by piece.")

    def loss(self, output: Output, labels: Labels) -> dict[str, Float[Tensor, ""]]:
        """Return named terms: their sum is trained on, and each is logged under its name."""
        return {"bag": self.bag_loss(output.logits, labels)}

    def bag_loss(self, logits: Logits, labels: Labels) -> Float[Tensor, ""]:
        """Return the mean cross-entropy, each bag weighed by its class.

        Not torch's own weighted mean: that divides by the weights, so that in a batch of one bag
        they cancel.
        """
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        if self.class_weights is not None:
            losses = losses * self.class_weights[labels]
        return losses.mean()

    def weigh_classes(self, weights: Float[Tensor, " C"] | None) -> None:
        """Let each class count by its weight in the bag loss, here and in models inside."""
        for module in self.modules():
            if isinstance(module, MILModel):
                module.class_weights = weights

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        """Hear which epoch of training begins, and how many bags it has. Most have no use for it.

        A training loop calls it before each epoch.
        """

    def no_decay(self) -> set[str]:
        """Return the names of the parameters that weight decay leaves alone."""
        return set()

    def validate(self, features: Features, mask: Mask | None) -> tuple[Features, Mask]:
        """Check a batch, cast it to the model's precision, and silence what the padding holds."""
        self.check_features(features)
        features = features.to(next(self.parameters()).dtype)
        if mask is None:
            mask = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
            return features, mask
        if not torch.compiler.is_compiling() and not mask.any(dim=1).all():
            raise BagError(EMPTY)
        return features.masked_fill(~mask.unsqueeze(-1), 0.0), mask

    def check_features(self, features: Features) -> None:
        """Raise at patches of another width, and at none."""
        if features.shape[-1] != self.in_dim:
            raise BagError(
                f"These patches have {features.shape[-1]} features each; the model was made for "
                f"{self.in_dim}. Use the features of the encoder that it was trained on."
            )
        if features.shape[1] == 0:
            raise BagError(EMPTY)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder, as on the Hugging Face hub."""
        from caprmil.models.pretrained import save

        save(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], **changes: Any) -> "MILModel":
        """Load a model from a folder or, by name, from the hub. `changes` replace settings."""
        from caprmil.models.pretrained import load

        model = load(folder, **changes)
        if not isinstance(model, cls):
            raise TypeError(f"{folder} holds a {type(model).__name__}, not a {cls.__name__}.")
        return model


def share_out(
    shares: Float[Tensor, "#C N"],
    patches: Float[Tensor, "N D"],
    weight: Float[Tensor, "C D"],
    bias: Float[Tensor, " C"],
) -> Evidence:
    """Return the evidence of patches that are summed by their shares, then classified."""
    terms = shares.mT * F.linear(patches, weight)
    return Evidence(terms=terms, rest=bias.to(terms.dtype))


def join(outputs: Sequence[Output], mask: Mask) -> Output:
    """Put bags side by side again, with zeros where the mask has padding."""
    if len(outputs) == 1 and outputs[0].attention.shape == mask.shape:
        return outputs[0]

    def rows(pick: Callable[[Output], Any]) -> Any:
        return None if pick(outputs[0]) is None else torch.cat([pick(each) for each in outputs])

    def patches(pick: Callable[[Output], Any]) -> Any:
        """Lay out what has one row a patch."""
        if pick(outputs[0]) is None:
            return None
        real = torch.cat([pick(each)[0] for each in outputs])
        return real.new_zeros((*mask.shape, *real.shape[1:])).masked_scatter(
            mask.reshape(*mask.shape, *[1] * (real.ndim - 1)), real
        )

    def by_patch(each: Output) -> Tensor | None:
        return None if each.class_attention is None else each.class_attention.mT

    by_class = patches(by_patch)
    spread = None
    if outputs[0].spread is not None:
        spread = Spread(
            attention=patches(lambda each: each.spread and each.spread.attention),
            probabilities=rows(lambda each: each.spread and each.spread.probabilities),
        )
    return Output(
        logits=rows(lambda each: each.logits),
        embedding=rows(lambda each: each.embedding),
        attention=patches(lambda each: each.attention),
        class_attention=None if by_class is None else by_class.mT,
        scores=patches(lambda each: each.scores),
        spread=spread,
        aux={name: torch.cat([each.aux[name] for each in outputs]) for name in outputs[0].aux},
    )
