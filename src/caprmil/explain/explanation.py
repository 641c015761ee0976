"""Explanation: all that a model can say of why, patch by patch, in the order of the bag."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, sqrt
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from caprmil.errors import RunError
from caprmil.explain.attribution import Method, attribute, lead_of
from caprmil.features.bags import Bag, BagInfo, Stream
from caprmil.io.progress import Step
from caprmil.models import CAPRMIL, MILModel
from caprmil.runs.inference import chunks_of, may_keep

Numbers = NDArray[np.float32]
TOP = 8  # patches of a gallery, as in the paper


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """One number for each patch, with a name to be chosen by and a title to be read."""

    key: str
    title: str
    kind: Literal["diverging", "share", "amount"]
    """diverging: around zero; share: from 0 to 1; amount: from 0 up."""
    values: Numbers  # (N,)


@dataclass(frozen=True, eq=False, kw_only=True)
class View:
    """Patch vectors in the plane of their two widest directions, and the variance of each."""

    points: Numbers  # (N, 2)
    variance: tuple[float, float]  # shares of the whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Explanation:
    """Why a model answered as it did. Row n of everything is patch n of the bag."""

    slide: str
    model: str
    fold: str
    classes: tuple[str, ...]
    info: BagInfo
    coords: NDArray[Any] | None  # (N, 2), as in the bag
    cells: NDArray[np.int64]  # (N, 2), column and row: the bag's grid or, without one, a square
    probabilities: NDArray[np.float64]  # (C,), of this model
    logits: Numbers  # (C,), which the evidence explains
    evidence: Numbers  # (N, C)
    rest: Numbers  # (C,), what no patch adds
    method: Method
    attention: Numbers  # (N,), sums to one
    class_attention: Numbers | None  # (C, N)
    scores: Numbers | None  # (N, C), what a patch alone says
    spread: Numbers | None  # (N,), of attention, where a model draws at random
    assignments: Numbers | None  # (T, H, N, M), to the tokens of each block and head
    before: View | None  # before context and after it, where a model gives some
    after: View | None

    def __len__(self) -> int:
        return len(self.evidence)

    @property
    def predicted(self) -> int:
        return int(self.probabilities.argmax())

    @property
    def gap(self) -> float:
        """By how much the evidence and the rest miss the logits."""
        total = self.evidence.astype(np.float64).sum(axis=0) + self.rest
        return float(np.abs(total - self.logits).max())

    @property
    def exact(self) -> bool:
        return self.method == "exact"

    def towards(self, of: int) -> Numbers:
        """Return what each patch adds to the lead of a class over the mean of the others."""
        return lead_of(torch.from_numpy(self.evidence), of).numpy()

    @property
    def usage(self) -> Numbers:
        """Return the share of all patches that each token of each block and head has (T, H, M)."""
        return self._assigned.mean(axis=2)

    @cached_property
    def uncertainty(self) -> Numbers:
        """Return how undecided each patch is, by block and head (T, H, N): 0 one token, 1 all."""
        shares, tokens = self._assigned, self._assigned.shape[-1]
        if tokens == 1:
            return np.zeros(shares.shape[:-1], dtype=np.float32)
        logs = np.log(np.clip(shares, np.finfo(np.float32).tiny, 1))
        return -(shares * logs).sum(axis=-1) / np.float32(np.log(tokens))

    def token(self, token: int, *, head: int | None = None, block: int = -1) -> Numbers:
        """Return each patch's weight on a token: of one head, or the mean over heads."""
        heads = self._assigned[block, :, :, token]
        return heads.mean(axis=0) if head is None else heads[head]

    @property
    def _assigned(self) -> Numbers:
        if self.assignments is None:
            raise ValueError(f"{self.model} has no tokens.")
        return self.assignments

    def layers(self) -> Iterator[Layer]:
        """Return every map there is, the most telling first."""
        for number, name in enumerate(self.classes):
            values = self.towards(number)
            yield Layer(
                key=f"evidence-{number}",
                title=f"Evidence for {name}",
                kind="diverging",
                values=values,
            )
        for number, name in enumerate(self.classes):
            values, title = self.towards(number), f"Evidence for {name}, above the slide's mean"
            yield Layer(
                key=f"above-{number}",
                title=title,
                kind="diverging",
                values=values - values.mean(),
            )
        yield Layer(key="attention", title="Attention", kind="amount", values=self.attention)
        for number, name in enumerate(self.classes):
            if self.class_attention is not None:
                values, title = self.class_attention[number], f"Attention for {name}"
                yield Layer(key=f"attention-{number}", title=title, kind="amount", values=values)
        for number, name in enumerate(self.classes):
            if self.scores is not None:
                values, title = self.scores[:, number], f"What a patch alone says: {name}"
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
                title=f"Undecided between tokens{of}",
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
    """Return the rows of the k highest values, the highest first; of equals, the first."""
    return np.argsort(-values, kind="stable")[:k].astype(np.int64)


def explain(
    model: MILModel,
    bag: Bag | Stream,
    *,
    classes: tuple[str, ...],
    slide: str = "",
    fold: str = "",
    method: Method | None = None,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
) -> Explanation:
    """Explain the answer of a model to a bag. `method`: how evidence is found, see `attribute`.

    A bag that is read piece by piece has exact evidence alone, and no picture of its context;
    its tokens are told up to as many patches as a prediction keeps.
    """
    model, cells = model.eval().to(device), bag.grid()
    before, after = None, None
    used: Method = "exact"
    if isinstance(bag, Stream):
        if method not in (None, "exact") or not can_stream(model):
            raise RunError(
                "A bag that is read in pieces has exact evidence, or none. Read it whole."
            )
        pieces, keep = chunks_of(bag, torch.device(device)), may_keep(bag.info)
        evidence, output = model.stream_evidence(pieces, keep=keep), model.stream(pieces, keep=keep)
    else:
        features = torch.from_numpy(bag.features)[None].to(device)
        grid = None if cells is None else torch.from_numpy(cells).to(device)
        evidence, used = attribute(model, features, grid, method=method, progress=progress)
        with torch.no_grad():
            output = model(features, grid=None if grid is None else grid[None])
            before, after = _context(model, features)
    explained = output.aux.get("mean_logits", output.logits) if used == "exact" else output.logits
    assigned = [_numbers(block[0]) for block in output.assignments]
    spread = None if output.spread is None else output.spread.attention[0]
    return Explanation(
        slide=slide,
        model=describe(model),
        fold=fold,
        classes=classes,
        info=bag.info,
        coords=bag.coords,
        cells=_square(bag.info.n_patches) if cells is None else cells,
        probabilities=output.logits[0].double().softmax(dim=-1).cpu().numpy(),
        logits=_numbers(explained[0]),
        evidence=_numbers(evidence.terms),
        rest=_numbers(evidence.rest),
        method=used,
        attention=_numbers(output.attention[0]),
        class_attention=_maybe(output.class_attention),
        scores=_maybe(output.scores),
        spread=None if spread is None else _numbers(spread),
        assignments=np.stack(assigned) if assigned else None,
        before=before,
        after=after,
    )


def can_stream(model: MILModel) -> bool:
    """Tell whether a model can be explained by a bag that is read in pieces."""
    return model.streams and model.streams_evidence


def describe(model: MILModel) -> str:
    """Return what a model is called in a title, e.g. CAPRMIL + mean."""
    if not isinstance(model, CAPRMIL):
        return type(model).__name__
    pool = model.settings["pool"]
    name = pool.get("name", "its own") if isinstance(pool, dict) else pool
    return f"CAPRMIL + {name if isinstance(name, str) else type(name).__name__}"


def _context(model: MILModel, features: Tensor) -> tuple[View | None, View | None]:
    if not isinstance(model, CAPRMIL) or not len(model.context.blocks):
        return None, None
    features, _ = model.validate(features, None)
    return view(model.context.project(features)[0]), view(model.in_context(features)[0])


def view(patches: Float[Tensor, "N D"]) -> View:
    """Project patches on their two principal components, each with its widest side positive."""
    centred = (patches - patches.mean(dim=0)).double()
    values, vectors = torch.linalg.eigh(centred.mT @ centred)
    values, vectors = values.clamp(min=0).flip(0)[:2], vectors.flip(1)[:, :2]
    points = centred @ vectors
    signs = points.gather(0, points.abs().argmax(dim=0, keepdim=True)).sign()
    shares = values / centred.square().sum().clamp(min=1e-30)
    first, second = (float(share) for share in (*shares, *shares.new_zeros(2))[:2])
    return View(points=_numbers(points * signs), variance=(first, second))


def _square(n: int) -> NDArray[np.int64]:
    """Return cells row by row in a square, for patches of which nobody knows where they lie."""
    rows, columns = np.divmod(np.arange(n), ceil(sqrt(n)))
    return np.stack([columns, rows], axis=1)


def _numbers(values: Tensor) -> Numbers:
    return values.detach().float().cpu().numpy()


def _maybe(values: Tensor | None) -> Numbers | None:
    return None if values is None else _numbers(values[0])
