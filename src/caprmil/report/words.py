"""Words: numbers as people say them."""

from collections.abc import Iterator
from datetime import datetime

from caprmil.explain import Explanation, Method
from caprmil.slides.qc import Record

PERCENT = "\u00a0%"  # stays on the line of its number
SURE = 0.9995  # a model is never so sure that 100 % would be honest

FLAGS = {
    "faint": "The stain is faint: tissue may have been missed, and colours differ from others.",
    "pen": "There is pen on the slide. Patches under it were left out.",
    "no glass": "No empty glass was found, so all of the picture was taken for tissue.",
    "no tissue": "No tissue was found.",
}

METHODS: dict[Method, str] = {
    "exact": (
        "A logit of this model is a sum over patches. The numbers below are its terms: "
        "exact, not an estimate."
    ),
    "integrated gradients": (
        "A logit of this model is no sum over patches. The numbers below are estimates by "
        "integrated gradients, from a bag in which every patch is the mean one. They add up only "
        "to within the error that is shown."
    ),
    "perturbation": (
        "A logit of this model is no sum over patches. The numbers below are estimates: by how "
        "much the lead falls when that patch alone is taken out. They do not add up; what they "
        "leave over is the first row."
    ),
}
RESTS: dict[Method, str] = {
    "exact": "Before any patch: the bias",
    "integrated gradients": "A bag of mean patches",
    "perturbation": "What no single patch explains",
}
DRAWS = (
    " This model draws at random. The evidence adds up to the mean logit over its draws, which "
    "need not be the logit of the mean probability."
)


def percent(share: float) -> str:
    """Return a probability in per cent, which is never all or nothing."""
    if share > SURE:
        return f"> 99.9{PERCENT}"
    if share < 1 - SURE:
        return f"< 0.1{PERCENT}"
    digits = 1 if share > 0.985 or share < 0.015 else 0
    return f"{100 * share:.{digits}f}{PERCENT}"


def part(share: float) -> str:
    """Return a share of a whole, which may be all of it."""
    if 0 < share < 0.0005:
        return f"< 0.1{PERCENT}"
    digits = 0 if share >= 0.0995 or not share else 1
    return f"{100 * share:.{digits}f}{PERCENT}"


def count(n: int, what: str, more: str | None = None) -> str:
    """Return 1 patch, 2 patches, 20,000 patches."""
    plural = more or (f"{what}es" if what.endswith(("ch", "s")) else f"{what}s")
    return f"{n:,} {what if n == 1 else plural}"


def signed(value: float) -> str:
    """Return a number with its sign, a real minus, and three digits that count at the least."""
    if value == 0:
        return "0"
    size = abs(value)
    said = f"{size:.3f}" if size >= 0.1 else f"{size:.3g}"
    return f"{'+' if value > 0 else '−'}{said}"


def how(told: Explanation) -> str:
    """Return how the evidence was found, and whether it adds up."""
    return METHODS[told.method] + (DRAWS if told.exact and told.spread is not None else "")


def quality(record: Record | None) -> Iterator[str]:
    """Return what was noted of a slide when it was encoded, as sentences."""
    if record is None:
        yield "Nothing is known of how the slide was encoded: there is no note beside its bag."
        return
    flags = [flag for flag in record.flags.split("; ") if flag]
    for flag in flags:
        yield FLAGS.get(flag, f"{flag[:1].upper()}{flag[1:]}.")
    if not flags:
        yield "Nothing suspicious was found: no pen, no faint stain, no doubt about the scale."
    if record.tissue_mm2:
        yield (
            f"Tissue: {record.tissue_mm2:.3g} mm², {part(record.tissue_share)} of the slide, in "
            f"{count(record.patches, 'patch')}."
        )
    if record.width and record.mpp:
        yield f"The slide is {record.width:,} x {record.height:,} pixels of {record.mpp:g} µm."
    if record.reader:
        yield f"It was read as {record.reader}."


def moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
