"""A strip chart: the values of groups of slides as dots on one axis."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from caprmil.report.html_page import render
from caprmil.report.text_format import number

Numbers = NDArray[np.floating]

MAX_DOTS = 300  # per row; more slides are shown by their quantiles
ROW_HEIGHT = 50
MAX_NAME = 15  # characters of a row's name
LEFT, RIGHT, TOP, WIDTH = 118, 484, 16, 500


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The values at both ends of an axis, and its ticks."""

    low: float = 0.0
    high: float = 1.0
    ticks: Mapping[float, str] = field(
        default_factory=lambda: {tick: f"{tick:.0%}" for tick in (0, 0.25, 0.5, 0.75, 1)}
    )

    @classmethod
    def around(cls, values: Iterable[float]) -> "Axis":
        """Return an axis that holds all values, with round numbers as ticks."""
        from matplotlib.ticker import MaxNLocator

        known = np.array(list(values), dtype=np.float64)
        low, high = float(known.min()), float(known.max())
        margin = 0.04 * (high - low) or 0.5
        low, high = low - margin, high + margin
        ticks = [tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
        return cls(low=low, high=high, ticks={float(tick): number(float(tick)) for tick in ticks})

    def x_of(self, value: float) -> float:
        """Return where a value lies across the chart."""
        share = (value - self.low) / (self.high - self.low)
        return round(LEFT + share * (RIGHT - LEFT), 2)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A group of slides: its name, and the positions of its dots."""

    name: str
    short_name: str
    slides: int
    middle: float
    base: float
    dots: list[tuple[float, float]]


def strip_chart(
    groups: Mapping[str, Numbers],
    *,
    title: str,
    alt: str,
    here: float | None = None,
    models: Sequence[float] = (),
    axis: Axis | None = None,
    unit: str = "slide",
) -> Markup:
    """Draw the values of each group as a row of dots, and `here`, if given, as a line across.

    Several `models` are dots on the axis. By default the axis is that of probabilities.
    """
    axis = axis or Axis()
    rows = []
    for row, (name, values) in enumerate(groups.items(), 1):
        base = TOP + ROW_HEIGHT * row
        dots = [(x, round(base - 4 - rise, 2)) for x, rise in stack(quantiles(values), axis)]
        short = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
        rows.append(
            Row(
                name=name,
                short_name=short,
                slides=len(values),
                middle=base - ROW_HEIGHT / 2,
                base=base,
                dots=dots,
            )
        )
    return render(
        "strip_chart.html",
        unit=unit,
        rows=rows,
        ticks=[(text, axis.x_of(tick)) for tick, text in axis.ticks.items()],
        here=None if here is None else axis.x_of(here),
        models=[axis.x_of(value) for value in models] if len(models) > 1 else [],
        left=LEFT,
        right=RIGHT,
        top=TOP,
        bottom=TOP + ROW_HEIGHT * len(rows),
        width=WIDTH,
        title=title,
        alt=alt,
    )


def quantiles(values: Numbers) -> Numbers:
    """Return the values in order; of too many, as many quantiles as can be drawn."""
    ordered = np.sort(values)
    if len(ordered) <= MAX_DOTS:
        return ordered
    return np.quantile(ordered, (np.arange(MAX_DOTS) + 0.5) / MAX_DOTS)


def stack(
    values: Numbers, axis: Axis, height: float = ROW_HEIGHT - 10
) -> list[tuple[float, float]]:
    """Return the positions of dots, with equal ones on top of each other within the height."""
    columns: dict[int, list[float]] = {}
    for value in values:
        x = axis.x_of(float(value))
        columns.setdefault(round(x / 5), []).append(x)
    tallest = max(len(column) for column in columns.values())
    step = min(5.6, height / max(tallest - 1, 1))
    return [(x, step * n) for column in columns.values() for n, x in enumerate(column)]
