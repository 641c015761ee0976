"""Pictures of a case: its maps as figures, over the slide if that is at hand."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caprmil import figures
from caprmil.errors import UnknownNameError
from caprmil.explain.case import Case, Squares, cut
from caprmil.explain.explanation import TOP, Explanation, Numbers, top_patches
from caprmil.figures import Canvas, Gallery, Plane
from caprmil.slides.slide import Slide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 1000  # pixels of a thumbnail under a map
CUT = 256  # pixels of a patch in a gallery


class Pictures:
    """Draws a case. A slide that is given stays open, and is read as figures need it."""

    def __init__(self, case: Case, slide: Slide | None = None, *, top: int = TOP) -> None:
        self.case, self.told, self.top = case, case.explanation, top
        self.squares = case.squares(slide)
        self.slide = slide if self.squares is not None else None
        self.canvas = canvas(case, self.slide, self.squares)

    def all(self, head: int | None = None) -> Mapping[str, "Figure"]:
        """Return every figure there is, by name; a model without tokens has one. See `tokens`."""
        found = {"evidence": self.evidence()}
        if self.told.assignments is not None:
            found |= {"tokens": self.tokens(head), "heads": self.heads()}
        if self.told.before is not None:
            found |= {"context": self.context(head)}
        return found

    def tokens(self, head: int | None = None) -> "Figure":
        """Draw the maps of the tokens of one head, or the mean over heads."""
        weights, which = self._weights(head)
        framed = "framed: the patches below, with their weight" if self.slide else ""
        galleries = [self.gallery(mine, mine) for mine in weights.T] if self.slide else []
        return figures.token_maps(
            self._assigned(),
            self.canvas,
            head=head,
            galleries=galleries,
            title=self._title(which),
            remarks=["percentage: a token's share of all patches", framed],
        )

    def heads(self) -> "Figure":
        """Draw the maps of all heads and tokens."""
        remark = "undecided: 0 if each patch has chosen one token, 1 if none has"
        title = self._title(f"{self._block()}all heads")
        return figures.head_maps(self._assigned(), self.canvas, title=title, remarks=[remark])

    def evidence(self, of: int | None = None) -> "Figure":
        """Draw evidence for a class (default: the predicted one) and attention."""
        told, of = self.told, self.told.predicted if of is None else of
        values = told.towards(of)
        sides: dict[str, Gallery | None] = {"pro": None, "contra": None}
        if self.slide:
            for side, sign in (("pro", 1), ("contra", -1)):
                sides[side] = self.gallery(sign * values, values, sign="+")
        return figures.evidence_maps(
            values,
            told.attention,
            self.canvas,
            answer=told.classes[of],
            **sides,
            title=self._title(f"{told.classes[of]} {told.probabilities[of]:.4f}"),
            remarks=[
                f"evidence: {METHOD_WORDS[told.method]}",
                _against(told.classes, of),
                "framed: the patches below, left black, right blue" if self.slide else "",
            ],
        )

    def context(self, head: int | None = None) -> "Figure":
        """Draw patch vectors before and after context, by the tokens of a head or of all."""
        before, after = self.told.before, self.told.after
        if before is None or after is None:
            raise ValueError(f"{self.told.model} gives no context.")
        weights, which = self._weights(head)
        return figures.context_planes(
            Plane(before.points, before.variance),
            Plane(after.points, after.variance),
            weights.argmax(axis=1),
            self.canvas,
            title=self._title("patch vectors"),
            remarks=[f"colour: the token with most of the patch, {which}"],
        )

    def gallery(self, ranks: Numbers, values: Numbers, *, sign: str = "") -> Gallery:
        """Return the patches of highest rank, each with its value."""
        if self.slide is None or self.squares is None:
            raise ValueError("A gallery needs the slide.")
        rows = top_patches(ranks, self.top)
        px = min(CUT, max(1, round(self.squares.side)))
        return Gallery(
            rows=rows.tolist(),
            patches=[cut(self.slide, self.squares, row, px) for row in rows.tolist()],
            notes=[format(float(values[row]), f"{sign}#.2g" if sign else ".2f") for row in rows],
        )

    def _assigned(self) -> Numbers:
        if self.told.assignments is None:
            raise ValueError(f"{self.told.model} has no tokens.")
        return self.told.assignments[-1]

    def _weights(self, head: int | None) -> tuple[Numbers, str]:
        """Return what a head gives to each token (N, M), or the mean of all, and its name."""
        heads = self._assigned()
        if head is None:
            return heads.mean(axis=0), f"{self._block()}mean over heads"
        return heads[head], f"{self._block()}head {head + 1} of {len(heads)}"

    def _block(self) -> str:
        blocks = 0 if self.told.assignments is None else len(self.told.assignments)
        return f"block {blocks} of {blocks}, " if blocks > 1 else ""

    def _title(self, what: str) -> str:
        return f"{self.case.name}   {self.told.model}, {self.told.fold}   {what}"


METHOD_WORDS = {
    "exact": "exact, the sum over patches is the logit",
    "integrated gradients": "estimated by integrated gradients from the mean patch",
    "perturbation": "by how much the logit falls without the patch",
}


def canvas(case: Case, slide: Slide | None, squares: Squares | None) -> Canvas:
    """Return what maps are painted on: the slide, small, or else the bag's grid."""
    if slide is None or squares is None:
        return Canvas.on_grid(case.explanation.cells)
    # Fine enough for the part of the slide that has patches, but never a picture without end.
    extent = float((np.ptp(squares.corners, axis=0) + squares.side).max())
    scale = max(extent / LONGEST, max(slide.size) / 8000)
    small = slide.thumbnail(scale * slide.mpp)
    mpp = case.mpp(slide)
    return Canvas.on_slide(
        squares.corners,
        squares.side,
        small.image,
        small.scale,
        mpp=None if mpp is None else mpp * small.scale,
    )


def most_telling(assignments: NDArray[np.floating]) -> int:
    """Return the head (of H, N, M) whose tokens tell patches apart most.

    That is the one whose token says most of the patch: the entropy of what tokens have in all,
    less that of each patch (their mutual information).
    """
    usage = assignments.mean(axis=1, keepdims=True)
    gains = _entropy(usage)[:, 0] - _entropy(assignments).mean(axis=1)
    return int(gains.argmax())


def _entropy(shares: NDArray[np.floating]) -> NDArray[np.float64]:
    shares = shares.astype(np.float64)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(-(shares * logs).sum(axis=-1))


def pick_head(told: Explanation, head: int | None) -> int | None:
    """Return the head to draw: that number (from 1), the mean (0), or the most telling (None)."""
    if told.assignments is None:
        return None
    heads = told.assignments.shape[1]
    if head is None:
        return most_telling(told.assignments[-1])
    if not 0 <= head <= heads:
        raise UnknownNameError("head", str(head), [str(n) for n in range(heads + 1)])
    return head - 1 if head else None


def _against(classes: tuple[str, ...], of: int) -> str:
    others = [name for number, name in enumerate(classes) if number != of]
    return f"against {others[0]}" if len(others) == 1 else "against the mean of the other classes"
