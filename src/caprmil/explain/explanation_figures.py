"""Figures of an explained slide: its maps, over the slide if its file was found."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caprmil import figures
from caprmil.errors import UnknownNameError, plural
from caprmil.explain.explained_slide import ExplainedSlide
from caprmil.explain.explanation import TOP, Explanation, Numbers, top_patches
from caprmil.explain.map_kinds import EVIDENCE, KINDS
from caprmil.explain.patch_boxes import PatchBoxes, read_patch
from caprmil.explain.slide_shares import slide_shares
from caprmil.figures import Canvas, Gallery, Plane
from caprmil.io.notebook import html_figure, show_html
from caprmil.slides.slide import Slide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THUMBNAIL = 1000  # pixels on the longer side of the slide under a map
PATCH = 256  # pixels on a side of a patch in a gallery


class ExplanationFigures:
    """The figures of an explained slide. They read the open slide; the caller closes it."""

    def __init__(
        self, explained: ExplainedSlide, slide: Slide | None = None, *, top: int = TOP
    ) -> None:
        self.name, self.explanation, self.top = explained.name, explained.explanation, top
        self.faithfulness = explained.faithfulness_text()
        self.boxes = explained.patch_boxes(slide)
        self.slide = slide if self.boxes is not None else None
        self.canvas = slide_canvas(explained, self.slide, self.boxes)

    def all(self, head: int | None = None) -> Mapping[str, "Figure"]:
        """Return all figures by name. A model without tokens has one. For `head` see `tokens`."""
        found = {"relevance": self.relevance()}
        if self.explanation.assignments is not None:
            found |= {"tokens": self.tokens(head), "heads": self.heads()}
        if self.explanation.before is not None:
            found |= {"context": self.context(head)}
        return found

    def tokens(self, head: int | None = None) -> "Figure":
        """Draw the maps of the tokens of one head, or the mean over heads."""
        weights, which = self._weights(head)
        framed = "framed: the patches below, with their weight" if self.slide else ""
        galleries = [self.gallery(token, token) for token in weights.T] if self.slide else []
        return figures.token_maps(
            self._assigned(),
            self.canvas,
            head=head,
            galleries=galleries,
            title=self._title(which),
            remarks=["percentage: a token's share of all patches", framed, self._slides()],
        )

    def heads(self) -> "Figure":
        """Draw the maps of all heads and tokens."""
        remark = "entropy: 0 if each patch is assigned to one token, 1 if evenly to all"
        title = self._title(f"{self._block()}all heads")
        return figures.head_maps(self._assigned(), self.canvas, title=title, remarks=[remark])

    def relevance(self, of: int | None = None) -> "Figure":
        """Draw the first map of a contrast, by default the predicted one, and a second one.

        The second is the evidence or, if that is the first, attention. An unsigned first map, such
        as attention, is drawn next to the evidence.
        """
        explanation = self.explanation
        of = explanation.predicted if of is None else of
        contrast = explanation.target.contrasts[of]
        kind = KINDS[explanation.first_signed]
        values = explanation.values(kind.name, of)
        sides: dict[str, Gallery | None] = {"top_for": None, "top_against": None}
        if self.slide:
            for side, sign in (("top_for", 1), ("top_against", -1)):
                sides[side] = self.gallery(sign * values, values, signed=True)
        return figures.relevance_maps(
            values,
            explanation.attention,
            self.canvas,
            contrast=contrast.name,
            title_of_map=kind.title_of(contrast),
            evidence=None if kind is EVIDENCE else explanation.evidence_for(of),
            negative=contrast.negative,
            ends=contrast.ends,
            **sides,
            title=self._title(explanation.target.show(explanation.answer)),
            remarks=[
                "" if kind is EVIDENCE else f"{kind.name}: {kind.meaning_of(contrast)}",
                f"evidence: {describe_method(explanation)}",
                contrast.against,
                self.faithfulness,
                self._slides(of),
                "framed: the patches below, left black, right blue" if self.slide else "",
            ],
        )

    def context(self, head: int | None = None) -> "Figure":
        """Draw patch vectors before and after context. For `head` see `tokens`."""
        before, after = self.explanation.before, self.explanation.after
        if before is None or after is None:
            raise ValueError(f"{self.explanation.model} has no context blocks.")
        weights, which = self._weights(head)
        return figures.context_planes(
            Plane(before.points, before.variance),
            Plane(after.points, after.variance),
            weights.argmax(axis=1),
            self.canvas,
            title=self._title("patch vectors"),
            remarks=[f"colour: the token that the patch is assigned to most, {which}"],
        )

    def gallery(self, ranks: Numbers, values: Numbers, *, signed: bool = False) -> Gallery:
        """Return the patches of the highest ranks, each with its value.

        With `signed`, ranks above zero are not mixed with others: if there are any, only they are
        shown.
        """
        if self.slide is None or self.boxes is None:
            raise ValueError("A gallery needs the slide.")
        rows = top_patches(ranks, self.top)
        if signed and (ranks[rows] > 0).any():
            rows = rows[ranks[rows] > 0]
        form = "+#.2g" if signed else ".2f"
        px = min(PATCH, max(1, round(self.boxes.side)))
        return Gallery(
            rows=rows.tolist(),
            patches=[read_patch(self.slide, self.boxes, row, px) for row in rows.tolist()],
            captions=[format(float(values[row]), form) for row in rows],
        )

    def _assigned(self) -> Numbers:
        if self.explanation.assignments is None:
            raise ValueError(f"{self.explanation.model} has no tokens.")
        return self.explanation.assignments[-1]

    def _weights(self, head: int | None) -> tuple[Numbers, str]:
        """Return the assignments in a head (N, M), or the mean over heads, and its name."""
        heads = self._assigned()
        if head is None:
            return heads.mean(axis=0), f"{self._block()}mean over heads"
        return heads[head], f"{self._block()}head {head + 1} of {len(heads)}"

    def _block(self) -> str:
        blocks = 0 if self.explanation.assignments is None else len(self.explanation.assignments)
        return f"block {blocks} of {blocks}, " if blocks > 1 else ""

    def _slides(self, of: int | None = None) -> str:
        """Return the slides of a patient in their order, with their shares of a contrast."""
        shares = slide_shares(self.explanation)
        found = []
        for share in shares:
            evidence = "" if of is None else f"evidence {share.evidence[of]:+.3g}, "
            found.append(f"{share.name} ({evidence}attention {share.attention:.0%})")
        parts = plural(self.explanation.info.part_name)
        return f"{parts}, left to right: {', '.join(found)}" if found else ""

    def _title(self, what: str) -> str:
        return f"{self.name}   {self.explanation.model}, {self.explanation.fold}   {what}"


def describe_method(explanation: Explanation) -> str:
    """Return how the evidence was found, in words."""
    output = explanation.target.output_name
    return {
        "exact": f"what each patch contributes to the {output}, after context; an exact sum",
        "integrated gradients": "estimated by integrated gradients from the mean patch",
        "perturbation": f"the decrease of the {output} without the patch",
    }[explanation.method]


def slide_canvas(
    explained: ExplainedSlide, slide: Slide | None, boxes: PatchBoxes | None
) -> Canvas:
    """Return the canvas of maps: a thumbnail of the slide, or else the bag's grid."""
    return canvas_of(explained.explanation.cells, slide, boxes, explained.mpp(slide))


def canvas_of(
    cells: NDArray[np.integer], slide: Slide | None, boxes: PatchBoxes | None, mpp: float | None
) -> Canvas:
    """Return a canvas over the slide if it is open, else on the grid of cells."""
    if slide is None or boxes is None:
        return Canvas.on_grid(cells)
    # The part with patches has `THUMBNAIL` pixels, unless the whole slide would be too large.
    extent = float((np.ptp(boxes.corners, axis=0) + boxes.side).max())
    scale = max(extent / THUMBNAIL, max(slide.size) / 8000)
    small = slide.thumbnail(scale * slide.mpp)
    return Canvas.on_slide(
        boxes.corners,
        boxes.side,
        small.image,
        small.scale,
        mpp=None if mpp is None else mpp * small.scale,
    )


def most_informative_head(assignments: NDArray[np.floating]) -> int:
    """Return the head of assignments (H, N, M) with the most mutual information.

    Mutual information of patch and token: the entropy of the usage of tokens, minus the mean
    entropy of the patches.
    """
    usage = assignments.mean(axis=1, keepdims=True)
    information = _entropy(usage)[:, 0] - _entropy(assignments).mean(axis=1)
    return int(information.argmax())


def _entropy(shares: NDArray[np.floating]) -> NDArray[np.float64]:
    shares = shares.astype(np.float64)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(-(shares * logs).sum(axis=-1))


def choose_head(explanation: Explanation, head: int | None) -> int | None:
    """Return the head to draw, from 0; None is the mean over heads.

    `head` counts from 1; 0 is the mean, None the most informative head.
    """
    if explanation.assignments is None:
        return None
    heads = explanation.assignments.shape[1]
    if head is None:
        return most_informative_head(explanation.assignments[-1])
    if not 0 <= head <= heads:
        raise UnknownNameError("head", str(head), [str(n) for n in range(heads + 1)])
    return head - 1 if head else None


def show_explanation(explanation: Explanation, *, canvas: Canvas | None = None) -> str:
    """Return an explanation as HTML for a notebook. Without a canvas it is on the bag's grid."""
    of = explanation.predicted
    contrast = explanation.target.contrasts[of]
    kind = KINDS[explanation.first_signed]
    facts = [
        ("answer", explanation.target.show(explanation.answer)),
        ("model", ", ".join(filter(None, (explanation.model, explanation.fold)))),
        ("patches", f"{len(explanation):,}"),
        ("map", f"{kind.title_of(contrast)}: {kind.meaning_of(contrast)}"),
        ("evidence", describe_method(explanation)),
    ]
    figure = figures.relevance_maps(
        explanation.values(kind.name, of),
        explanation.attention,
        canvas or Canvas.on_grid(explanation.cells),
        contrast=contrast.name,
        title_of_map=kind.title_of(contrast),
        evidence=None if kind is EVIDENCE else explanation.evidence_for(of),
        negative=contrast.negative,
        ends=contrast.ends,
    )
    title = f"Explanation of {explanation.slide}" if explanation.slide else "Explanation"
    return show_html(title, facts, html_figure(figure, f"Maps: {kind.title_of(contrast)}"))


def show_explained_slide(explained: ExplainedSlide) -> str:
    """Return an explained slide as HTML for a notebook: over the slide, if its file is found."""
    target, answer = explained.explanation.target, explained.answer
    facts = [
        ("answer of the run", target.show(answer.mean)),
        ("label", explained.label),
        ("models", f"{len(answer.by_fold)}, " + ("unseen" if answer.unseen else "all saw it")),
        ("faithfulness", explained.faithfulness_text()),
    ]
    slide = explained.open_slide()
    try:
        canvas = slide_canvas(explained, slide, explained.patch_boxes(slide))
    finally:
        if slide is not None:
            slide.close()
    shown = show_explanation(explained.explanation, canvas=canvas)
    return show_html(f"Slide {explained.name}", facts, shown)
