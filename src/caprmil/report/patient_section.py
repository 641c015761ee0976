"""The section of a patient's slides, or of sources: what each adds, and its attention."""

from typing import NamedTuple

from markupsafe import Markup

from caprmil.explain.combination import SlideShareOfAnswer
from caprmil.explain.removal import answer_words
from caprmil.explain.slide_shares import slide_shares
from caprmil.report.html_page import EMPTY, render
from caprmil.report.report_inputs import SlideInputs


class SlideRow(NamedTuple):
    """A slide of a patient, with a bar for its evidence: from 0 to 200, with zero at `zero`."""

    name: str
    patches: int
    evidence: float
    attention: float
    zero: float
    left: float
    width: float
    answer: SlideShareOfAnswer | None  # if the slides were answered alone


def patient_section(inputs: SlideInputs) -> Markup:
    """Return the slides of a patient with their shares; nothing for a single slide."""
    explanation = inputs.explained.explanation
    shares = slide_shares(explanation)
    if not shares:
        return EMPTY
    of = explanation.predicted
    contrast = explanation.target.contrasts[of]
    values = [share.evidence[of] for share in shares]
    combination = inputs.explained.combination
    low, high = min(0.0, *values), max(0.0, *values)
    reach = (high - low) or 1.0
    rest = float(contrast.of(explanation.rest.astype(float)))
    return render(
        "patient_slides.html",
        part=explanation.info.part_name,
        contrast=contrast,
        exact=explanation.exact,
        combination=combination,
        number=answer_words(explanation.target.number_name, contrast.name),
        rest=rest,
        total=sum(values) + rest,
        rows=[
            SlideRow(
                name=share.name,
                patches=share.patches,
                evidence=value,
                attention=share.attention,
                zero=round(-low / reach * 200, 2),
                left=round((min(value, 0.0) - low) / reach * 200, 2),
                width=max(round(abs(value) / reach * 200, 2), 1) if value else 0,
                answer=None if combination is None else combination.share(share.slide, of),
            )
            for share, value in zip(shares, values, strict=True)
        ],
    )
