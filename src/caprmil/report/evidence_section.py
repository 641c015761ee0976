"""The section of evidence in a slide report: the sum behind a prediction, and its patches."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from caprmil.errors import count
from caprmil.explain import TOP, ExplainedSlide, Explanation, Method, top_patches
from caprmil.explain.browser import totals
from caprmil.explain.covariate_terms import shares
from caprmil.report.html_page import render
from caprmil.report.patch_pictures import GalleryPatch
from caprmil.report.report_inputs import SlideInputs
from caprmil.report.text_format import share, signed
from caprmil.targets import Contrast

METHODS: dict[Method, str] = {
    "exact": (
        "The {output} of this model is a sum over patches. The numbers below are its terms: what "
        "each patch contributes, after it has received the context of all others. They add up "
        "exactly. This is not what the prediction depends on: see above."
    ),
    "integrated gradients": (
        "The {output} of this model is not a sum over patches. The numbers below are estimates by "
        "integrated gradients. Their baseline is a bag in which every patch is the mean patch. "
        "They add up to the {output} only within the error that is shown."
    ),
    "perturbation": (
        "The {output} of this model is not a sum over patches. The numbers below are estimates: "
        "how much the sum falls when that patch alone is removed. They do not add up to the sum. "
        "The first row holds the difference."
    ),
}
RESTS: dict[Method, str] = {
    "exact": "Bias, without any patch",
    "integrated gradients": "A bag of mean patches",
    "perturbation": "Not explained by single patches",
}
RANDOM = (
    " This model draws random samples. The evidence adds up to the mean {output} over its draws, "
    "which can differ from the {output} of the mean prediction."
)

COMBINED = (
    " The slides of the patient were answered alone. What a patch adds to the {output} of its "
    "slide is times the weight of the slide, and the sum is the mean of the slides' {output}s with "
    "these weights. The answer of the patient is the mean of their answers, so it is not the "
    "answer that belongs to this sum."
)


@dataclass(frozen=True, eq=False, kw_only=True)
class EvidenceSum:
    """A contrast as a sum: the rest, the patches in favour, and the patches against."""

    terms: NDArray[np.float64]  # (N,)
    rest: float
    total: float  # from the outputs of the model
    covariates: tuple[tuple[str, float], ...] = ()  # what each adds, by its title
    scalings: tuple[tuple[str, float], ...] = ()  # what each changes of the patches, by its name

    @classmethod
    def of(cls, explanation: Explanation, number: int) -> "EvidenceSum":
        contrast, known = explanation.target.contrasts[number], explanation.covariates
        rest = explanation.bias if known else explanation.rest
        return cls(
            terms=explanation.evidence_for(number).astype(np.float64),
            rest=totals(explanation.target, rest)[number],
            total=totals(explanation.target, explanation.logits)[number],
            covariates=tuple((each.title, each.of(contrast)) for each in known),
            scalings=tuple(
                (each.name, scaling)
                for each in known
                if (scaling := each.scaling_of(contrast)) is not None
            ),
        )

    @property
    def positive(self) -> float:
        return float(self.terms[self.terms > 0].sum())

    @property
    def negative(self) -> float:
        return float(self.terms[self.terms < 0].sum())

    @property
    def sum(self) -> float:
        return self.before_patches + self.positive + self.negative

    @property
    def before_patches(self) -> float:
        """The rest and the covariates."""
        return self.rest + sum(value for _, value in self.covariates)

    def modalities(self) -> str:
        """Return the share of the patches and of each covariate, in a sentence, if there are any.

        It is that of the sizes of the terms; the patches together are one of them. Covariates that
        scale the patches have no share: the sentence says by how much they change the sum.
        """
        if not self.covariates:
            return ""
        if self.scalings:
            each = [f"{name} {signed(value)}" for name, value in self.scalings]
            total = sum(value for _, value in self.scalings)
            return (
                "The covariates also scale what the patches add. Against the covariates of the "
                f"average training slide this changes the sum of the patches by {signed(total)} "
                f"({', '.join(each)}). It belongs to the patches and to the covariates, so "
                "neither has a share."
            )
        adds = [value for _, value in self.covariates]
        patches, parts = shares(self.positive + self.negative, adds)
        each = [
            f"{title.partition(':')[0]} {share(part)}"
            for (title, _), part in zip(self.covariates, parts, strict=True)
        ]
        return (
            f"Of the sizes of these terms, the patches together have {share(patches)} and the "
            f"covariates {share(sum(parts))} ({', '.join(each)}). A covariate adds nothing if it "
            "is that of the average training slide."
        )

    @property
    def gap(self) -> float:
        """The difference between the model's own outputs and the sum."""
        return self.total - self.sum

    def half(self, sign: int = 1) -> int:
        """Return how few patches hold half of the evidence in favour, or against."""
        ordered = np.sort((sign * self.terms).clip(min=0))[::-1]
        if not ordered.sum():
            return 0
        return int(np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)) + 1

    def top(self, sign: int = 1) -> list[int]:
        """Return the patches with the most evidence in favour, or against."""
        best = top_patches(sign * self.terms, TOP)
        return [int(row) for row in best if sign * self.terms[row] > 0]


class SumRow(NamedTuple):
    """A row of the table of a sum, with its bar: from 0 to 200, with zero at `zero`."""

    kind: str
    title: str
    value: float
    zero: float
    left: float
    width: float
    is_positive: bool


class Side(NamedTuple):
    """The patches in favour of a contrast, or against it."""

    kind: str
    title: str
    share: str
    gallery: list[GalleryPatch]


def evidence_section(inputs: SlideInputs) -> Markup:
    """Return the evidence for the predicted contrast, and folded away that for others."""
    explanation, parts = inputs.explained.explanation, inputs.parts
    sums = {n: EvidenceSum.of(explanation, n) for n in parts.contrasts(inputs.explained)}
    inputs.pictures.include([s.top(sign) for s in sums.values() for sign in (1, -1)], TOP)
    remark = parts.evidence_remark(inputs.explained)
    first = next(iter(sums))
    terms = sums[first].terms
    if (terms > 0).all() or (terms < 0).all():
        remark += (
            " All patches are evidence for the same side. Select “above the slide’s mean” on the "
            "map to see which of them are stronger than others."
        )
    return render(
        "evidence.html",
        contrast=explanation.target.contrasts[first],
        method=_method(inputs.explained),
        evidence=[
            (explanation.target.contrasts[n], _contrast(inputs, n, own)) for n, own in sums.items()
        ],
        remark=remark,
    )


def _method(explained: ExplainedSlide) -> str:
    """Return how the evidence was computed, in sentences."""
    explanation, combination = explained.explanation, explained.combination
    random = explanation.exact and explanation.spread is not None
    text = METHODS[explanation.method] + (RANDOM if random else "")
    if combination is not None and combination.mixes:
        text += COMBINED
    return text.format(output=explanation.target.output_name)


def _contrast(inputs: SlideInputs, number: int, evidence: EvidenceSum) -> Markup:
    contrast = inputs.explained.explanation.target.contrasts[number]
    combination = inputs.explained.combination
    mixes = combination is not None and combination.mixes
    meaning = inputs.parts.total_meaning(inputs.explained.explanation, evidence.sum)
    return render(
        "evidence_sum.html",
        number=number,
        contrast=contrast,
        output=inputs.explained.explanation.target.output_name,
        patches=len(evidence.terms),
        half=evidence.half(),
        rows=_rows(inputs.explained.explanation, contrast, evidence),
        gap=evidence.gap,
        modalities=evidence.modalities(),
        meaning="" if mixes else meaning,
        sides=[_side(inputs, contrast, evidence, sign) for sign in (1, -1)],
    )


def _rows(explanation: Explanation, contrast: Contrast, evidence: EvidenceSum) -> list[SumRow]:
    """Return the sum row by row. Each bar starts where the one before it ended."""
    before, total = evidence.before_patches, evidence.sum
    high, end = before + evidence.positive, evidence.rest
    lines = [("rest", RESTS[explanation.method], evidence.rest, 0.0, evidence.rest)]
    for title, value in evidence.covariates:
        lines.append(("covariate", title, value, end, end + value))
        end += value
    lines += [
        ("positive", contrast.positive, evidence.positive, before, high),
        ("negative", contrast.negative, evidence.negative, high, total),
        ("total", f"= {contrast.total}", total, 0.0, total),
    ]
    ends = [end for *_, start, stop in lines for end in (start, stop)]
    low, reach = min(0.0, *ends), (max(0.0, *ends) - min(0.0, *ends)) or 1.0
    patches = {
        "positive": int((evidence.terms > 0).sum()),
        "negative": int((evidence.terms < 0).sum()),
    }
    rows = []
    for kind, title, value, start, stop in lines:
        left, right = sorted((end - low) / reach * 200 for end in (start, stop))
        if kind in patches:
            title = f"{count(patches[kind], 'patch')} {title}"
        rows.append(
            SumRow(
                kind=kind,
                title=title,
                value=value,
                zero=round(-low / reach * 200, 2),
                left=round(left, 2),
                width=max(round(right - left, 2), 1) if stop != start else 0,
                is_positive=stop >= start,
            )
        )
    return rows


def _side(inputs: SlideInputs, contrast: Contrast, evidence: EvidenceSum, sign: int) -> Side:
    patches = evidence.top(sign)
    whole = evidence.positive if sign > 0 else evidence.negative
    shares = [float(evidence.terms[row]) / whole for row in patches]
    captions = [
        (share(own), signed(float(evidence.terms[row])))
        for row, own in zip(patches, shares, strict=True)
    ]
    return Side(
        kind="for" if sign > 0 else "against",
        title=contrast.positive if sign > 0 else contrast.negative,
        share=share(sum(shares)),
        gallery=inputs.pictures.gallery(patches, captions),
    )
