"""The section of regions in a slide report: what the prediction is without each of them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from markupsafe import Markup

from caprmil.errors import count
from caprmil.explain import KINDS, RegionEffects
from caprmil.explain.map_kinds import EVIDENCE
from caprmil.explain.marked_regions import LEAST
from caprmil.explain.removal import answer_words
from caprmil.report.html_page import EMPTY, render
from caprmil.report.patch_pictures import Picture
from caprmil.report.report_inputs import SlideInputs
from caprmil.report.text_format import PERCENT, number

MARGIN = 0.3  # around a region, as a share of its longer side


class RegionCard(NamedTuple):
    """A region in the list."""

    number: int
    kind: str
    change: str  # of the answer
    random: str
    size: str
    picture: Picture | None  # of the slide around it
    view: str  # the square of the picture: x, y, width and height
    path: str  # its outline, as SVG draws it


class RegionSide(NamedTuple):
    """The regions for a contrast, or against it."""

    kind: str
    title: str
    cards: list[RegionCard]
    together: str  # all of them removed at once, in a sentence


def region_section(inputs: SlideInputs) -> Markup:
    """Return the regions that the first map marks, in the order of their measured effect."""
    explanation, effects = inputs.explained.explanation, inputs.explained.regions
    if effects is None:
        return EMPTY
    contrast, parts = explanation.target.contrasts[effects.of], inputs.parts
    kind, whole = KINDS[effects.map], parts.answer_text(float(effects.answer[effects.of]))
    above = ", relative to the slide's mean" if kind is EVIDENCE else ""
    return render(
        "regions.html",
        title=f"{kind.title_of(contrast)}{above}",
        reason=effects.reason,
        answer=answer_words(explanation.target.number_name, contrast.name),
        whole=whole,
        model=f"{explanation.model} of {explanation.fold}",
        least=f"{LEAST:.0%}".replace("%", PERCENT),
        sides=[
            _side(inputs, effects, sign, words)
            for sign, words in ((1, contrast.positive), (-1, contrast.negative))
        ]
        if effects.regions
        else [],
    )


def _side(inputs: SlideInputs, effects: RegionEffects, sign: int, words: str) -> RegionSide:
    found = inputs.numbers.facts["regions"]["found"]
    together = effects.together.get(sign)
    text, of = inputs.parts.answer_text, effects.of
    return RegionSide(
        kind="for" if sign > 0 else "against",
        title=words,
        cards=[_card(inputs, region, effects) for region in found if region["sign"] == sign],
        together=""
        if together is None
        else (
            f"All {len(effects.of_sign(sign))} removed together "
            f"({count(len(together.rows), 'patch')}): {text(float(together.answer[of]))}; "
            f"as many at random: {text(float(together.random[of]))}."
        ),
    )


def _card(inputs: SlideInputs, region: dict[str, Any], effects: RegionEffects) -> RegionCard:
    text, of = inputs.parts.answer_text, effects.of
    x, y, side = _square(region["box"])
    size = count(region["patches"], "patch")
    if region["area"] is not None:
        size += f", {number(float(format(region['area'], '.2g')))} mm²"
    picture = inputs.pictures.square(x, y, side)
    if picture is None:  # the whole grid, in which the region is filled
        wide, high = inputs.numbers.facts["size"]
        view = f"0 0 {wide:g} {high:g}"
    else:
        view = f"{x:g} {y:g} {side:g} {side:g}"
    return RegionCard(
        number=region["number"],
        kind="for" if region["sign"] > 0 else "against",
        change=f"{text(effects.answer[of])} → {text(region['answer'][of])}",
        random=text(region["random"][of]),
        size=size,
        picture=picture,
        view=view,
        path=svg_path(region["rings"]),
    )


def _square(box: list[float]) -> tuple[float, float, float]:
    """Return a square around a box, with a margin: left, top and side."""
    x, y, wide, high = box
    side = max(wide, high) * (1 + 2 * MARGIN)
    return x + (wide - side) / 2, y + (high - side) / 2, side


def svg_path(rings: Iterable[Iterable[tuple[float, float]]]) -> str:
    """Return rings as the path of an SVG. Holes are left out by the even-odd rule."""
    return "".join("M" + "L".join(f"{x:g},{y:g}" for x, y in ring) + "Z" for ring in rings)
