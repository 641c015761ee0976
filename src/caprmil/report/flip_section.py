"""The section of flips in a run report: how many patches must go before a prediction turns."""

from math import floor, isinf, log10

import numpy as np
from markupsafe import Markup

from caprmil.errors import count
from caprmil.explain import KINDS, Flips
from caprmil.explain.map_ranking import PATCHES
from caprmil.report.html_page import EMPTY, render
from caprmil.report.report_inputs import RunInputs
from caprmil.report.strip_chart import Axis, strip_chart
from caprmil.report.text_format import PERCENT

NEVER = 0.24  # from 100 % to never, as a share of the rest of the axis


def flip_section(inputs: RunInputs) -> Markup:
    """Return the share of patches whose removal turns each prediction, and a sentence."""
    flips = inputs.flips
    if flips is None:
        return EMPTY
    return render(
        "flips.html",
        verdict=flips.in_words(inputs.run.unit).replace(" %", PERCENT),
        unit=inputs.run.unit,
        rule=flips.rule,
        map=KINDS[flips.map].name,
        slides=len(flips.slides),
        sampled=PATCHES if any(slide.patches == PATCHES for slide in flips.slides) else 0,
        chart=flip_chart(flips, inputs.run.unit),
    )


def flip_chart(flips: Flips, unit: str) -> Markup:
    """Draw the share of each slide on a logarithmic axis: by the map, and at random."""
    by_map, by_chance = flips.shares()
    known = [share for share in (*by_map, *by_chance) if not isinf(share)]
    low = min(floor(log10(min(known, default=0.01))), -1)
    never = -NEVER * low
    marks = [10.0**power for power in range(low, 1)] + [0.2, 0.5] * (low == -1)
    ticks = {log10(mark): f"{100 * mark:g}{PERCENT}" for mark in marks}
    margin = -0.04 * low
    axis = Axis(low=low - margin, high=never + margin, ticks={**ticks, never: "never"})

    def places(shares: list[float]) -> np.ndarray:
        return np.array([never if isinf(share) else log10(share) for share in shares])

    return strip_chart(
        {"by the map": places(by_map), "at random": places(by_chance)},
        axis=axis,
        unit=unit,
        title="Removed patches before the prediction turns",
        alt=f"{count(len(by_map), unit)} by the share of patches whose removal turns the "
        f"prediction. {flips.in_words(unit)}",
    )
