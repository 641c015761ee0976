"""Explanation: evidence, attention and tokens of every patch, in the order of the bag."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caprmil.errors import RunError, UnknownNameError, count
from caprmil.explain.attribution import Method, attribute, draw_samples, log_scale
from caprmil.explain.covariate_terms import CovariateTerm, covariate_terms
from caprmil.explain.map_kinds import (
    ATTENTION,
    CLASS_ATTENTION,
    COMPUTED,
    EVIDENCE,
    GRADIENTS,
    KINDS,
    SAMPLED,
    SCORES,
    available,
    of_contrasts,
)
from caprmil.explain.principal_plane import PrincipalPlane, principal_plane
from caprmil.features.bags import Bag, BagInfo, Stream
from caprmil.io.progress import Step
from caprmil.models import MILModel
from caprmil.models.base import Chunks, Samples
from caprmil.runs.inference import chunks_of, largest_feature, may_keep, no_number
from caprmil.targets import Target

if TYPE_CHECKING:
    import pandas as pd

Numbers = NDArray[np.float32]
TOP = 8  # patches in a gallery, as in the paper


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """A map: one number per patch, with a key for programs and a title for readers."""

    key: str
    title: str
    kind: Literal["diverging", "share", "amount"]
    """diverging: around zero; share: from 0 to 1; amount: 0 or more."""
    values: Numbers  # (N,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Explanation:
    """The explanation of a model's output for one bag. Row n of every array is patch n."""

    slide: str
    model: str
    fold: str
    target: Target
    info: BagInfo
    coords: NDArray[Any] | None  # (N, 2), as in the bag
    cells: NDArray[np.int64]  # (N, 2), column and row in the bag's grid; without one, in a square
    answer: NDArray[np.float64]  # (A,), of this model: e.g. the probability of each class
    logits: Numbers  # (C,), the sum of evidence and rest
    evidence: Numbers  # (N, C)
    rest: Numbers  # (C,), the part of the logits that belongs to no patch
    covariates: tuple[CovariateTerm, ...] = ()  # parts of the rest, if the model reads covariates
    method: Method
    attention: Numbers  # (N,), sums to one
    class_attention: Numbers | None  # (C, N)
    scores: Numbers | None  # (N, C), class probabilities of single patches
    spread: Numbers | None  # (N,), of attention over the draws of a random model
    assignments: Numbers | None  # (T, H, N, M), to the tokens of each block and head
    before: PrincipalPlane | None  # patches before and after context, for a model with context
    after: PrincipalPlane | None
    slide_of: NDArray[np.int64] | None = None  # (N,), of a patient: see `info.slides`
    maps: Mapping[str, Numbers] = field(default_factory=dict)
    """Computed maps by name, a column per contrast: see `map_kinds.COMPUTED`."""
    first: str = EVIDENCE.name  # the map to show first

    def __len__(self) -> int:
        return len(self.evidence)

    def __repr__(self) -> str:
        of = f"{self.slide!r}: " if self.slide else ""
        by = ", ".join(filter(None, (self.model, self.fold)))
        shown = self.target.show(self.answer)
        return f"Explanation({of}{shown} by {by}, {count(len(self), 'patch')})"

    def _repr_html_(self) -> str:
        """Show the explanation in a notebook: the answer, and the first map beside attention."""
        from caprmil.explain.explanation_figures import show_explanation

        return show_explanation(self)

    def to_frame(self) -> "pd.DataFrame":
        """Return a row per patch, with the columns of patches.csv: docs/explain.md."""
        import pandas as pd  # here: it takes longer to load than a table to print

        from caprmil.explain.patch_tables import patch_columns

        return pd.DataFrame(patch_columns(self))

    @property
    def names(self) -> tuple[str, ...]:
        """What evidence is shown for: the name of each contrast, e.g. of each class."""
        return self.target.names

    @property
    def predicted(self) -> int:
        """The number of the contrast to show first: e.g. that of the predicted class."""
        return self.target.contrast_of(self.answer)

    @property
    def bias(self) -> NDArray[np.float64]:
        """The part of the logits that belongs to no patch and no covariate (C,)."""
        return self.rest.astype(np.float64) - sum(each.term for each in self.covariates)

    @property
    def gap(self) -> float:
        """The largest difference between the logits and the sum of evidence and rest."""
        total = self.evidence.astype(np.float64).sum(axis=0) + self.rest
        return float(np.abs(total - self.logits).max())

    @property
    def exact(self) -> bool:
        return self.method == "exact"

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite. Weights of a damaged model may overflow only here."""
        planes = [each.points for each in (self.before, self.after) if each is not None]
        optional = (self.class_attention, self.scores, self.spread, self.assignments)
        always = (self.answer, self.logits, self.evidence, self.rest, self.attention)
        numbers: tuple[NDArray[Any] | None, ...] = (
            *always,
            *planes,
            *self.maps.values(),
            *optional,
        )
        return all(bool(np.isfinite(each).all()) for each in numbers if each is not None)

    def evidence_for(self, of: int) -> Numbers:
        """Return what each patch adds to a contrast: e.g. to a class against the others."""
        return np.asarray(self.target.contrasts[of].of(torch.from_numpy(self.evidence)).numpy())

    def values(self, name: str, of: int) -> Numbers:
        """Return a map of a contrast by its name: one number per patch, higher for it."""
        if name == ATTENTION.name:
            return self.attention
        found: Numbers | None = None
        if name == CLASS_ATTENTION.name and self.class_attention is not None:
            found = self.class_attention[of]
        elif name == SCORES.name and self.scores is not None:
            found = self.scores[:, of]
        elif name == EVIDENCE.name:
            found = self.evidence_for(of)
        elif name in self.maps:
            found = self.maps[name][:, of]
        if found is None:
            raise UnknownNameError("map", name, self.map_names)
        return found

    @property
    def map_names(self) -> tuple[str, ...]:
        """The names of all maps of relevance, the first one first."""
        names = [*self.maps, EVIDENCE.name, ATTENTION.name]
        if self.class_attention is not None:
            names.append(CLASS_ATTENTION.name)
        if self.scores is not None:
            names.append(SCORES.name)
        return tuple(sorted(names, key=lambda name: name != self.first))

    @property
    def first_signed(self) -> str:
        """The name of the first map that is for and against: the first one, or else evidence."""
        return self.first if KINDS[self.first].signed else EVIDENCE.name

    @property
    def first_layer(self) -> str:
        """The key of the layer to show first: the first map, for the predicted contrast."""
        if self.first == ATTENTION.name:
            return ATTENTION.key
        prefixes = {CLASS_ATTENTION.name: "attention", SCORES.name: "score"}
        return f"{prefixes.get(self.first, KINDS[self.first].key)}-{self.predicted}"

    @property
    def usage(self) -> Numbers:
        """The share of all patches that is assigned to each token (T, H, M)."""
        return self._assigned.mean(axis=2)

    @cached_property
    def uncertainty(self) -> Numbers:
        """The normalised entropy of each assignment (T, H, N): 0 for one token, 1 for all alike."""
        shares, tokens = self._assigned, self._assigned.shape[-1]
        if tokens == 1:
            return np.zeros(shares.shape[:-1], dtype=np.float32)
        logs = np.log(np.clip(shares, np.finfo(np.float32).tiny, 1))
        return -(shares * logs).sum(axis=-1) / np.float32(np.log(tokens))

    def token(self, token: int, *, head: int | None = None, block: int = -1) -> Numbers:
        """Return the assignment of each patch to a token, in one head or as the mean over heads."""
        heads = self._assigned[block, :, :, token]
        return heads.mean(axis=0) if head is None else heads[head]

    @property
    def _assigned(self) -> Numbers:
        if self.assignments is None:
            raise ValueError(f"{self.model} has no tokens.")
        return self.assignments

    def layers(self) -> Iterator[Layer]:
        """Yield every map. Influence comes first; `first_layer` is the one to show first."""
        for kind in (KINDS[name] for name in self.maps):
            for number, contrast in enumerate(self.target.contrasts):
                yield Layer(
                    key=f"{kind.key}-{number}",
                    title=kind.title_of(contrast),
                    kind="diverging",
                    values=self.values(kind.name, number),
                )
        for number, name in enumerate(self.names):
            values = self.evidence_for(number)
            yield Layer(
                key=f"evidence-{number}",
                title=f"Evidence for {name}",
                kind="diverging",
                values=values,
            )
        for number, name in enumerate(self.names):
            values, title = (
                self.evidence_for(number),
                f"Evidence for {name}, above the slide's mean",
            )
            yield Layer(
                key=f"above-{number}",
                title=title,
                kind="diverging",
                values=values - values.mean(),
            )
        yield Layer(key="attention", title="Attention", kind="amount", values=self.attention)
        for number, name in enumerate(self.names):
            if self.class_attention is not None:
                values, title = self.class_attention[number], f"Attention for {name}"
                yield Layer(key=f"attention-{number}", title=title, kind="amount", values=values)
        for number, name in enumerate(self.names):
            if self.scores is not None:
                values, title = self.scores[:, number], f"Patch score for {name}"
                yield Layer(key=f"score-{number}", title=title, kind="share", values=values)
        if self.spread is not None:
            yield Layer(
                key="spread", title="Spread of attention", kind="amount", values=self.spread
            )
        if self.assignments is not None:
            yield from self._token_layers(self.assignments)

    def _token_layers(self, assignments: Numbers) -> Iterator[Layer]:
        blocks, heads, _, tokens = assignments.shape
        for block in range(blocks):
            prefix, of = (f"block-{block}-", f" of block {block + 1}") if blocks > 1 else ("", "")
            for token in range(tokens):
                yield Layer(
                    key=f"{prefix}token-{token}",
                    title=f"Token {token + 1}{of}, all heads",
                    kind="share",
                    values=self.token(token, block=block),
                )
            yield Layer(
                key=f"{prefix}entropy",
                title=f"Assignment entropy{of}",
                kind="share",
                values=self.uncertainty[block].mean(axis=0),
            )
            for head in range(heads):
                for token in range(tokens):
                    yield Layer(
                        key=f"{prefix}head-{head}-token-{token}",
                        title=f"Head {head + 1}{of}, token {token + 1}",
                        kind="share",
                        values=self.token(token, head=head, block=block),
                    )


def top_patches(values: NDArray[np.floating], k: int = TOP) -> NDArray[np.int64]:
    """Return the rows of the k highest values, the highest first. Ties keep the order of rows."""
    return np.argsort(-values, kind="stable")[:k].astype(np.int64)


def explain(
    model: MILModel,
    bag: Bag | Stream,
    *,
    target: Target,
    slide: str = "",
    fold: str = "",
    method: Method | None = None,
    first: str | None = None,
    maps: Sequence[str] = (),
    device: torch.device | str = "cpu",
    progress: Step | None = None,
) -> Explanation:
    """Explain the output of a model for a bag. For `method` see `attribute`.

    `first` is the map to show first, by default sampled influence or, for a model without it,
    integrated gradients; `maps` are further ones, see `map_kinds.COMPUTED`. A bag that is read in
    chunks has exact evidence only, no principal planes, and no integrated gradients. Assignments
    are kept up to the number of patches for which a prediction keeps them.
    """
    model, cells = model.eval().to(device), bag.grid()
    first = first or available(model)[0]
    wanted = [name for name in dict.fromkeys((first, *maps)) if name in COMPUTED]
    computed: dict[str, Tensor] = {}
    before, after = None, None
    used: Method = "exact"
    if isinstance(bag, Stream):
        if method not in (None, "exact") or not can_stream(model):
            raise RunError(
                "A bag that is read in chunks has exact evidence only. Read it into memory."
            )
        chunks, keep = chunks_of(bag, torch.device(device)), may_keep(bag.info)
        evidence, output = model.stream_evidence(chunks, keep=keep), model.stream(chunks, keep=keep)
        for name in wanted:
            if name == GRADIENTS.name or model.summed_parts() is None:
                first = EVIDENCE.name if first == name else first
                continue
            samples = draw_samples(bag.info.n_patches) if name == SAMPLED.name else None
            compute = partial(_stream_influence, model, chunks, samples)
            computed[name] = of_contrasts(target, model.n_outputs, compute)
    else:
        features = torch.from_numpy(bag.features)[None].to(device)
        grid = None if cells is None else torch.from_numpy(cells).to(device)
        evidence, used = attribute(model, features, grid, method=method, progress=progress)
        for name in wanted:
            compute = partial(COMPUTED[name], model, features, grid)
            computed[name] = of_contrasts(target, model.n_outputs, compute)
        with torch.no_grad():
            output = model(features, grid=None if grid is None else grid[None])
            before, after = _context(model, features)
    explained = output.aux.get("mean_logits", output.logits) if used == "exact" else output.logits
    assigned = [_numbers(block[0]) for block in output.assignments]
    spread = None if output.uncertainty is None else output.uncertainty.attention[0]
    found = Explanation(
        slide=slide,
        model=model.title,
        fold=fold,
        target=target,
        info=bag.info,
        coords=bag.coords,
        cells=square_cells(bag.info.n_patches) if cells is None else cells,
        answer=target.answer(output.logits[0].double()).cpu().numpy(),
        logits=_numbers(explained[0]),
        evidence=_numbers(evidence.terms),
        rest=_numbers(evidence.rest),
        covariates=covariate_terms(model, output),
        method=used,
        attention=_numbers(output.attention[0]),
        class_attention=_optional(output.class_attention),
        scores=_optional(output.scores),
        spread=None if spread is None else _numbers(spread),
        assignments=np.stack(assigned) if assigned else None,
        before=before,
        after=after,
        slide_of=bag.slide_of,
        maps={name: _numbers(terms) for name, terms in computed.items()},
        first=first,
    )
    if not found.is_finite:
        raise no_number("explanation", slide or "The bag", largest_feature(bag))
    return found


def _stream_influence(
    model: MILModel, chunks: Chunks, samples: Samples | None, directions: Tensor
) -> Tensor:
    found = model.stream_influence(chunks, samples=samples, directions=directions)
    return found if samples is None else log_scale(found)


def can_stream(model: MILModel) -> bool:
    """Return whether a model can be explained on a bag that is read in chunks."""
    return model.streams and model.streams_evidence


def _context(
    model: MILModel, features: Tensor
) -> tuple[PrincipalPlane | None, PrincipalPlane | None]:
    patches = model.before_and_after_context(features)
    if patches is None:
        return None, None
    before, after = patches
    return principal_plane(before[0]), principal_plane(after[0])


def square_cells(n: int) -> NDArray[np.int64]:
    """Return cells row by row in a square, for patches without coordinates."""
    rows, columns = np.divmod(np.arange(n), ceil(sqrt(n)))
    return np.stack([columns, rows], axis=1)


def _numbers(values: Tensor) -> Numbers:
    return values.detach().float().cpu().numpy()


def _optional(values: Tensor | None) -> Numbers | None:
    return None if values is None else _numbers(values[0])
