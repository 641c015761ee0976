"""The contract of MIL models: bags of patch features in, one `Output` out.

Axes in all model files: B bags, N patches, E encoder features, D width, H heads, K head width,
M tokens, C outputs. The aliases below are checked at run time, under pytest only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from caprmil.errors import BagError, RecipeError
from caprmil.models.layers import weighted_cross_entropy
from caprmil.models.packing import Sizes, mask_from_sizes, pad_packed, split_bags

if TYPE_CHECKING:
    from caprmil.models.influence import SummedParts
    from caprmil.models.token_removal import TokenRemoval

Features: TypeAlias = Float[Tensor, "B N E"]
Patches: TypeAlias = Float[Tensor, "B N D"]
Mask: TypeAlias = Bool[Tensor, "B N"] | Float[Tensor, "B N"]
"""True for a patch, false for padding. As numbers, how often each counts: `forward_weighted`."""
Counts: TypeAlias = Float[Tensor, " N"]
Samples: TypeAlias = Int[Tensor, "R S"]  # rows of a bag: R samples of S patches
Grid: TypeAlias = Int[Tensor, "B N 2"]  # column and row of each patch
Cells: TypeAlias = Int[Tensor, "N 2"]  # the grid of one bag
Weights: TypeAlias = Float[Tensor, "B N"]
Embedding: TypeAlias = Float[Tensor, "B D"]
Logits: TypeAlias = Float[Tensor, "B C"]
Labels: TypeAlias = Int[Tensor, " B"]
Assignments: TypeAlias = Float[Tensor, "B H N M"]

Criterion: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""The loss of a batch of bags, from its logits and the values to predict."""

Chunks: TypeAlias = Callable[[], Iterable[Features]]
"""The chunks of one bag, in order. Each call starts again from the first patch."""

Memory: TypeAlias = Literal["auto", "whole", "keep", "stream"]
"""What training keeps of a bag for the backward pass: chosen by its size; all activations; only the
output of the first linear layer; nothing."""

CHUNK = 1024  # patches per chunk: their activations fit into the cache

EMPTY_BAG = "A bag has no patches. Leave slides without tissue out."


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """Standard deviations over the draws of a random model, per patch and per bag."""

    attention: Weights
    probabilities: Float[Tensor, "B C"]


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of every model. Fields that a model does not have are None or empty."""

    logits: Logits
    embedding: Float[Tensor, "B ..."]
    attention: Weights  # sums to one over the patches of a bag
    class_attention: Float[Tensor, "B C N"] | None = None  # if each class has its own attention
    scores: Float[Tensor, "B N C"] | None = None  # class scores of single patches
    uncertainty: Uncertainty | None = None  # if the model draws at random
    # One per context block. Models behind each other may have different heads and tokens. Training
    # that recomputes activations does not have them.
    assignments: tuple[Float[Tensor, "B _ N _"], ...] = ()
    aux: dict[str, Tensor] = field(default_factory=dict)  # only for the loss of the model itself


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The contribution of each patch of one bag to each logit; terms and rest sum to the logits.

    The logits are those of `Output`, or the mean logits over the draws of a random model.
    """

    terms: Float[Tensor, "N C"]
    rest: Float[Tensor, " C"]  # the bias and, if weights are random, their noise

    @property
    def logits(self) -> Float[Tensor, " C"]:
        return self.terms.sum(dim=0) + self.rest


class MILModel(nn.Module):
    """Base class of all models. `forward` never sees the values to predict: only `loss` does.

    A subclass passes its settings to `super().__init__`, so that it can be saved and rebuilt.
    """

    needs_classes: ClassVar[bool] = False  # true if the method is defined for classes only
    order_matters: ClassVar[bool] = False  # true if patches are read as a sequence
    weighs_patches: ClassVar[bool] = False  # true if `forward_weighted` is available
    has_patch_logits: ClassVar[bool] = False  # true if training can have a loss on top patches
    logits_in_aux: ClassVar[tuple[str, ...]] = ()  # parts of `aux` that are logits of bags
    classifier: str | None = None  # the linear layer that alone makes the logits of the embedding
    evaluates_in_chunks: bool = False  # true if that is faster than the whole bag at once
    top_k: int = 0  # patches in the loss on top patches; set by training
    criterion: Criterion

    @property
    def input_layer(self) -> nn.Linear | None:
        """The linear layer that reads the features, if training can start it from probes."""
        return None

    @property
    def probe_units(self) -> Sequence[int]:
        """The units of the first layer that can start from a probe."""
        layer = self.input_layer
        return range(layer.out_features) if layer is not None else ()

    def unit_values(self, features: Float[Tensor, "N E"]) -> Float[Tensor, "N D"]:
        """Return what `gather_units` compares with its thresholds, per patch and unit."""
        return cast(nn.Linear, self.input_layer)(features)

    def gather_units(self, units: Sequence[int], thresholds: Float[Tensor, " P"]) -> None:
        """Start with parts that gather patches in which a unit is above its threshold, if any."""

    @property
    def title(self) -> str:
        """The name of the model in titles of figures and reports."""
        return type(self).__name__

    @property
    def n_assignments(self) -> int:
        """The number of assignments in an output: one per context block."""
        return 0

    @property
    def export_problem(self) -> str | None:
        """Why the model cannot be exported for bags of any size, after "it "; None if it can."""
        return None

    def __init__(self, in_dim: int, n_outputs: int, **settings: Any) -> None:
        super().__init__()
        if in_dim < 1 or n_outputs < 1:
            raise ValueError(f"A model needs features and an output: {in_dim=}, {n_outputs=}.")
        if type(self).needs_classes is True and n_outputs < 2:
            raise RecipeError(
                f"{type(self).__name__} needs at least two classes, not {n_outputs} output. "
                "Use caprmil, mean, abmil or transmil."
            )
        self.in_dim, self.n_outputs, self.settings = in_dim, n_outputs, settings
        self.criterion = weighted_cross_entropy
        # What it was trained on: target, encoder, scale, cohort. Plain JSON, saved with the model.
        self.metadata: dict[str, Any] = {}

    def forward(
        self,
        features: Features,
        *,
        mask: Mask | None = None,
        grid: Grid | None = None,
        sizes: Sizes | None = None,
    ) -> Output:
        """Return the output for a batch of bags. Without a mask there is no padding.

        With `sizes` the bags are packed: concatenated into a batch of one, without padding.
        """
        if sizes is not None:
            return self._forward_sizes(features, sizes, grid)
        if mask is None and len(features) == 1 and not torch.compiler.is_compiling():
            output = self.forward_single(features, grid)
            if output is not None:
                return output
        return self.forward_bags(*self.validate(features, mask), grid)

    def forward_single(self, features: Features, grid: Grid | None) -> Output | None:
        """Return the output for one bag if there is a faster form than `forward_bags`, else None.

        Evaluation without gradients is in chunks, if the model can.
        """
        if self.training or torch.is_grad_enabled() or not self.evaluates_in_chunks:
            return None
        return self.stream(lambda: [features], keep=True)

    def save_memory(self, how: Memory) -> None:
        """Choose what training keeps of a bag for the backward pass. Most models ignore it."""

    def forward_weighted(
        self, features: Float[Tensor, "1 N E"], counts: Counts, grid: Cells | None = None
    ) -> Output:
        """Return the output for one bag in which each patch counts as often as `counts` says.

        Counts are positive numbers and enter every sum over patches: with all of them 1 it is the
        output of `forward`, and a patch that counts twice is like two equal patches. The derivative
        with respect to them is the influence of each patch.
        """
        if not self.weighs_patches:
            raise NotImplementedError(f"{type(self).__name__} cannot weigh patches.")
        features, _ = self.validate(features, None)
        weights = counts.to(features.dtype)[None]
        return self.forward_bags(features, weights, None if grid is None else grid[None])

    def forward_bags(self, features: Features, mask: Mask, grid: Grid | None) -> Output:
        """Return the output for padded bags. A model defines this method or `forward_bag`."""
        if mask.is_floating_point():
            return self.forward_bag(features, None if grid is None else grid[0], mask[0])
        outputs = []
        for number, real in enumerate(mask):
            bag, cells = features[number : number + 1], None if grid is None else grid[number, real]
            padded = not bool(real.all())
            outputs.append(self.forward_bag(bag[:, real] if padded else bag, cells))
        return merge_outputs(outputs, mask)

    def packs(self, sizes: Sizes) -> bool:
        """Return whether bags of these sizes are processed together instead of one by one."""
        return True

    def forward_packed(
        self, features: Float[Tensor, "1 N E"], sizes: Sizes, grid: Int[Tensor, "1 N 2"] | None
    ) -> Output:
        """Return the output for packed bags. Models override it to save the padding.

        Bags of a model with `forward_bag` follow each other, as draws at random need, and share
        what it does with each patch alone.
        """
        mask = mask_from_sizes(sizes, features.device)
        if type(self).forward_bags is not MILModel.forward_bags:
            cells = None if grid is None else pad_packed(grid, sizes)
            return self.forward_bags(pad_packed(features, sizes), mask, cells)
        bags = split_bags(features, sizes)
        grids = [None] * len(bags) if grid is None else split_bags(grid[0], sizes, dim=0)
        parts = [split_bags(part, sizes, dim=0) for part in self.shared_parts(features)]
        shared: list[dict[str, Any]] = [{"shared": own} for own in zip(*parts, strict=True)] or [
            {}
        ] * len(bags)
        outputs = [
            self.forward_bag(bag, cells, **own)
            for bag, cells, own in zip(bags, grids, shared, strict=True)
        ]
        return merge_outputs(outputs, mask)

    def shared_parts(self, features: Float[Tensor, "1 N E"]) -> tuple[Tensor, ...]:
        """Return what `forward_bag` takes as `shared`: tensors with a row per patch.

        They depend on the patch alone, and draw nothing at random. Empty if there are none.
        """
        return ()

    def _forward_sizes(self, features: Features, sizes: Sizes, grid: Grid | None) -> Output:
        if len(features) != 1 or features.shape[1] != sum(sizes):
            raise ValueError(f"{sizes=} do not sum to {tuple(features.shape)=}.")
        if min(sizes) < 1:
            raise BagError(EMPTY_BAG)
        if self.packs(sizes):
            return self.forward_packed(self.validate(features, None)[0], sizes, grid)
        cells = [None] * len(sizes) if grid is None else split_bags(grid, sizes)
        bags = zip(split_bags(features, sizes), cells, strict=True)
        outputs = [self(bag, grid=own) for bag, own in bags]
        return merge_outputs(outputs, mask_from_sizes(sizes, features.device))

    def forward_bag(
        self, features: Features, grid: Cells | None, counts: Counts | None = None
    ) -> Output:
        """Return the output for one bag without padding, as a batch of one.

        For models that read patches as a sequence or draw at random: padding then cannot shift a
        neighbour or use up a random number. Tensors in `aux` are concatenated along their rows.
        `counts` are those of `forward_weighted`.
        """
        raise NotImplementedError

    @torch.no_grad()
    def stream(self, chunks: Chunks, *, keep: bool = False) -> Output:
        """Return the exact output for one bag in chunks, in memory that does not grow with it.

        With `keep`, activations of each patch are kept between the passes over the bag: this saves
        work, and the output has assignments.
        """
        return self.stream_bag(self._validate_chunks(chunks), keep=keep)

    def _validate_chunks(self, chunks: Chunks) -> Chunks:
        """Check the chunks, split them to `CHUNK` patches and cast them."""
        if self.training:
            raise ValueError("Streaming is for evaluation: call model.eval() first.")
        dtype = next(self.parameters()).dtype

        def validated() -> Iterator[Features]:
            empty = True
            for features in chunks():
                self.check_features(features)
                for chunk in torch.split(features, CHUNK, dim=1):
                    empty = False
                    yield chunk.to(dtype)
            if empty:
                raise BagError(EMPTY_BAG)

        return validated

    @property
    def streams(self) -> bool:
        """Whether `stream` is available."""
        return type(self).stream_bag is not MILModel.stream_bag

    def stream_bag(self, chunks: Chunks, *, keep: bool) -> Output:
        """Return the result of `stream`. A model that needs the whole bag does not define it."""
        raise NotImplementedError(f"{type(self).__name__} reads a bag as a whole.")

    @torch.no_grad()
    def evidence(
        self, features: Float[Tensor, "1 N E"], grid: Cells | None = None
    ) -> Evidence | None:
        """Return the exact contribution of each patch of one bag to each logit.

        None if the logits of this model are not sums over patches.
        """
        if self.training:
            raise ValueError("Evidence is for evaluation: call model.eval() first.")
        return self.evidence_bag(self.validate(features, None)[0], grid)

    def evidence_bag(self, features: Features, grid: Cells | None) -> Evidence | None:
        """Return the result of `evidence`."""
        if not self.streams_evidence:
            return None
        return self.stream_evidence_bag(lambda: torch.split(features, CHUNK, dim=1), keep=True)

    @torch.no_grad()
    def stream_evidence(self, chunks: Chunks, *, keep: bool = False) -> Evidence:
        """Return the evidence of one bag in chunks; `keep` as in `stream`."""
        return self.stream_evidence_bag(self._validate_chunks(chunks), keep=keep)

    @property
    def streams_evidence(self) -> bool:
        """Whether `stream_evidence` is available."""
        return type(self).stream_evidence_bag is not MILModel.stream_evidence_bag

    def stream_evidence_bag(self, chunks: Chunks, *, keep: bool) -> Evidence:
        """Return the result of `stream_evidence`."""
        raise NotImplementedError(f"{type(self).__name__} has no evidence in chunks.")

    def influence(
        self,
        features: Float[Tensor, "1 N E"],
        grid: Cells | None = None,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        """Return the derivative of each logit by how often each patch of one bag counts.

        To first order this is the change of the logits if the patch is removed. With `samples`,
        rows of the bag, it is the mean derivative of adding a patch to a sample that it is not in.
        With `directions`, it is that of linear functions of the logits, which saves work if there
        are fewer of them.
        """
        from caprmil.models.influence import by_counts, by_sums

        if self.training:
            raise ValueError("Influence is for evaluation: call model.eval() first.")
        features, _ = self.validate(features, None)
        parts = self.summed_parts()
        if parts is None:
            return by_counts(self, features, grid, samples, directions)
        return by_sums(parts, lambda: torch.split(features, CHUNK, dim=1), samples, directions)

    def stream_influence(
        self,
        chunks: Chunks,
        *,
        samples: Samples | None = None,
        directions: Float[Tensor, "K C"] | None = None,
    ) -> Float[Tensor, "N K"]:
        """Return the influence of one bag in chunks, in memory that does not grow with it."""
        from caprmil.models.influence import by_sums

        parts = self.summed_parts()
        if parts is None:
            raise NotImplementedError(f"{type(self).__name__} has no influence in chunks.")
        return by_sums(parts, self._validate_chunks(chunks), samples, directions)

    def summed_parts(self) -> "SummedParts | None":
        """Return the parts of a model whose logits depend on sums over patches only, else None."""
        return None

    @property
    def token_shape(self) -> tuple[int, int, int] | None:
        """The number of context blocks, heads and tokens per head. None without tokens."""
        return None

    def token_removal(
        self, chunks: Chunks, *, grid: Cells | None = None, keep: bool = False
    ) -> "TokenRemoval":
        """Return one bag in chunks, to be evaluated without some of its tokens.

        `keep` as in `stream`. For models with a `token_shape`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tokens.")

    def before_and_after_context(
        self, features: Float[Tensor, "1 N E"]
    ) -> tuple[Patches, Patches] | None:
        """Return the patches of one bag before and after they exchange context.

        None for a model without context blocks.
        """
        return None

    def loss(self, output: Output, values: Tensor) -> dict[str, Float[Tensor, ""]]:
        """Return the named terms of the loss. Training minimises their sum and logs each."""
        return {"bag": self.criterion(output.logits, values)}

    def set_criterion(self, criterion: Criterion) -> None:
        """Set the loss of the bags, in this model and in the models inside it.

        The parameters of a loss that is a module are trained with those of the model.
        """
        for module in [each for each in self.modules() if isinstance(each, MILModel)]:
            if hasattr(module, "criterion"):
                del module.criterion  # a module can only be replaced by a module
            module.criterion = criterion

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        """Receive the epoch that starts and its number of bags. Most models ignore it."""

    def no_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay."""
        return set()

    def validate(self, features: Features, mask: Mask | None) -> tuple[Features, Mask]:
        """Check a batch, cast it to the precision of the model and set its padding to zero."""
        self.check_features(features)
        features = features.to(next(self.parameters()).dtype)
        if mask is None:
            mask = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
            return features, mask
        if not torch.compiler.is_compiling() and not mask.any(dim=1).all():
            raise BagError(EMPTY_BAG)
        return features.masked_fill(~mask.unsqueeze(-1), 0.0), mask

    def check_features(self, features: Features) -> None:
        """Raise if there are no patches, or if they have another width."""
        if features.shape[-1] != self.in_dim:
            raise BagError(
                f"These patches have {features.shape[-1]} features each; the model was made for "
                f"{self.in_dim}. Use the features of the encoder that it was trained on."
            )
        if features.shape[1] == 0:
            raise BagError(EMPTY_BAG)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder, as on the Hugging Face hub."""
        from caprmil.models.pretrained import save

        save(self, folder)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        subfolder: str = "",
        **changes: Any,
    ) -> "MILModel":
        """Load a model from a folder or, by OWNER/NAME, from the hub. `changes` replace settings.

        `revision` is a branch, tag or commit; `token` is by default that of `hf auth login`;
        `subfolder` is where the model is, e.g. "folds/fold-0/model" of a run.
        """
        from caprmil.models.pretrained import load

        where: dict[str, Any] = {"revision": revision, "token": token, "subfolder": subfolder}
        model = load(folder, **where, **changes)
        if not isinstance(model, cls):
            raise TypeError(f"{folder} holds a {type(model).__name__}, not a {cls.__name__}.")
        return model

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = True,
        token: str | bool | None = None,
        branch: str | None = None,
        commit_message: str = "Push model by caprmil",
        card: str | None = None,
    ) -> str:
        """Upload the model and its card to the hub, and return the URL of the commit.

        A new repository is private by default. `card` is the text of README.md; by default it is
        written from `metadata`.
        """
        from caprmil.models.pretrained import push

        options: dict[str, Any] = {"private": private, "token": token, "branch": branch}
        return push(self, repo_id, **options, commit_message=commit_message, card=card)


def evidence_of_sum(
    weights: Float[Tensor, "#C N"],
    patches: Float[Tensor, "N D"],
    weight: Float[Tensor, "C D"],
    bias: Float[Tensor, " C"],
) -> Evidence:
    """Return the evidence if a linear layer reads the weighted sum of the patches."""
    terms = weights.mT * F.linear(patches, weight)
    return Evidence(terms=terms, rest=bias.to(terms.dtype))


def merge_outputs(outputs: Sequence[Output], mask: Mask) -> Output:
    """Return the outputs of single bags as one batch, padded with zeros where the mask is false."""
    if len(outputs) == 1 and outputs[0].attention.shape == mask.shape:
        return outputs[0]

    def rows(pick: Callable[[Output], Any]) -> Any:
        return None if pick(outputs[0]) is None else torch.cat([pick(each) for each in outputs])

    def patches(pick: Callable[[Output], Any]) -> Any:
        """Return a tensor with one row per patch, padded."""
        if pick(outputs[0]) is None:
            return None
        real = torch.cat([pick(each)[0] for each in outputs])
        return real.new_zeros((*mask.shape, *real.shape[1:])).masked_scatter(
            mask.reshape(*mask.shape, *[1] * (real.ndim - 1)), real
        )

    def class_attention(each: Output) -> Tensor | None:
        return None if each.class_attention is None else each.class_attention.mT

    def assignments(number: int) -> Tensor:
        found: Tensor = patches(lambda each: each.assignments[number].transpose(1, 2))
        return found.transpose(1, 2)

    by_class = patches(class_attention)
    uncertainty = None
    if outputs[0].uncertainty is not None:
        uncertainty = Uncertainty(
            attention=patches(lambda each: each.uncertainty and each.uncertainty.attention),
            probabilities=rows(lambda each: each.uncertainty and each.uncertainty.probabilities),
        )
    return Output(
        logits=rows(lambda each: each.logits),
        embedding=rows(lambda each: each.embedding),
        attention=patches(lambda each: each.attention),
        class_attention=None if by_class is None else by_class.mT,
        scores=patches(lambda each: each.scores),
        uncertainty=uncertainty,
        assignments=tuple(map(assignments, range(len(outputs[0].assignments)))),
        aux={name: torch.cat([each.aux[name] for each in outputs]) for name in outputs[0].aux},
    )
