"""Charts: numbers as small drawings in SVG, which take their colours from the page around them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caprmil.report.page import Html, join, tag

Numbers = NDArray[np.floating]
DOTS = 300  # of a row of a strip: more are shown by so many quantiles
ROW = 50  # height of a row of a strip
NAME = 15  # letters of a label beside it


@dataclass(frozen=True, kw_only=True)
class Axes:
    """A frame with scales, in which lines and dots are drawn."""

    across: tuple[float, float] = (0.0, 1.0)
    up: tuple[float, float] = (0.0, 1.0)
    width: float = 460
    height: float = 320
    margins: tuple[float, float, float, float] = (12, 12, 44, 54)  # top, right, bottom, left

    def x(self, value: float) -> float:
        _, right, _, left = self.margins
        low, high = self.across
        return round(left + (value - low) / (high - low) * (self.width - left - right), 2)

    def y(self, value: float) -> float:
        top, _, bottom, _ = self.margins
        low, high = self.up
        return round(
            self.height - bottom - (value - low) / (high - low) * (self.height - top - bottom), 2
        )

    def line(self, xs: Iterable[float], ys: Iterable[float], kind: str) -> Html:
        points = " ".join(f"{self.x(x):g},{self.y(y):g}" for x, y in zip(xs, ys, strict=True))
        return tag("polyline", points=points, class_=f"line {kind}")

    def dot(self, x: float, y: float, kind: str, radius: float = 4, said: str = "") -> Html:
        inside = tag("title", said) if said else None
        return tag("circle", inside, cx=self.x(x), cy=self.y(y), r=radius, class_=f"dot {kind}")

    def draw(self, *children: Html, across: str, up: str, alt: str) -> Html:
        """Return the drawing: what is in it, ticks, and what the axes mean."""
        middle = (self.across[0] + self.across[1]) / 2, (self.up[0] + self.up[1]) / 2
        at = self.x(middle[0]), self.y(middle[1])
        words = [
            tag("text", across, x=at[0], y=self.height - 6, class_="title", text_anchor="middle"),
            tag(
                "text",
                up,
                transform=f"translate(12 {at[1]}) rotate(-90)",
                class_="title",
                text_anchor="middle",
            ),
        ]
        return figure(join([*self._ticks(), *words, *children]), self.width, self.height, alt)

    def _ticks(self) -> Iterable[Html]:
        bottom, left = self.up[0], self.across[0]
        for value in ticks(*self.across, most=6):
            x = self.x(value)
            yield tag("line", x1=x, x2=x, y1=self.y(bottom), y2=self.y(self.up[1]), class_="grid")
            yield tag("text", f"{value:g}", x=x, y=self.y(bottom) + 15, text_anchor="middle")
        for value in ticks(*self.up, most=6):
            y = self.y(value)
            yield tag("line", x1=self.x(left), x2=self.x(self.across[1]), y1=y, y2=y, class_="grid")
            yield tag("text", f"{value:g}", x=self.x(left) - 6, y=y + 4, text_anchor="end")


def figure(inside: Html, width: float, height: float, alt: str) -> Html:
    size = f"0 0 {width:g} {height:g}"
    return tag("svg", tag("title", alt), inside, viewBox=size, role="img", class_="chart")


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between two others, `most` at the most."""
    rough = (high - low) / most
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first = np.ceil(low / step - 1e-9)
    last = np.floor(high / step + 1e-9)
    return [float(round(n * step, 10)) + 0.0 for n in np.arange(first, last + 1)]


def strip(
    groups: Mapping[str, Numbers], *, here: float, models: Sequence[float], event: str
) -> Html:
    """Draw the probabilities of a cohort, a row for each true label, and a slide among them."""
    wide, top, bottom = 500, 16, 16 + ROW * len(groups)
    height = bottom + 42
    scale = Axes(width=wide, height=height, margins=(0, 16, 0, 118))
    parts: list[Html] = []
    for value in (0, 0.25, 0.5, 0.75, 1):
        x = scale.x(value)
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        parts.append(tag("text", f"{value:.0%}", x=x, y=bottom + 17, text_anchor="middle"))
    for number, (label, values) in enumerate(groups.items()):
        ground = top + ROW * (number + 1)
        parts += _row_name(label, len(values), ground - ROW / 2)
        parts.append(tag("line", x1=scale.x(0), x2=scale.x(1), y1=ground, y2=ground, class_="grid"))
        for x, rise in stacks(quantiles(values), scale, ROW - 10):
            parts.append(tag("circle", cx=x, cy=round(ground - 4 - rise, 2), r=3, class_="peer"))
    x = scale.x(here)
    parts.append(tag("line", x1=x, x2=x, y1=10, y2=bottom, class_="here"))
    parts.append(tag("path", d=f"M{x - 6:g} 1 h12 l-6 9 z", class_="here-mark"))
    parts += [
        tag("circle", cx=scale.x(p), cy=bottom, r=3.4, class_="model")
        for p in (models if len(models) > 1 else ())
    ]
    middle, title = scale.x(0.5), f"Probability of {event}"
    parts.append(tag("text", title, x=middle, y=height - 4, class_="title", text_anchor="middle"))
    alt = f"Probabilities of {event} of the test slides by true label; this slide is at {here:.3f}."
    return figure(join(parts), wide, height, alt)


def _row_name(label: str, size: int, y: float) -> list[Html]:
    short = label if len(label) <= NAME else f"{label[: NAME - 1]}…"
    place = {"x": 106, "text_anchor": "end"}
    return [
        tag("text", tag("title", label), short, y=y, class_="row-name", **place),
        tag("text", f"{size:,} slide{'' if size == 1 else 's'}", y=y + 15, **place),
    ]


def quantiles(values: Numbers) -> Numbers:
    """Return the values, or so many of them that they can be drawn."""
    ordered = np.sort(values)
    return ordered if len(ordered) <= DOTS else np.quantile(ordered, (np.arange(DOTS) + 0.5) / DOTS)


def stacks(values: Numbers, scale: Axes, room: float) -> list[tuple[float, float]]:
    """Return where dots lie, those of one place on top of each other, as high as there is room."""
    columns: dict[int, list[float]] = {}
    for value in values:
        x = scale.x(float(value))
        columns.setdefault(round(x / 5), []).append(x)
    tallest = max(len(own) for own in columns.values())
    step = min(5.6, room / max(tallest - 1, 1))
    return [(x, step * n) for own in columns.values() for n, x in enumerate(own)]


def steps(rows: Sequence[tuple[float, float]]) -> list[Html]:
    """Draw the rows of a sum as bars, each from where the one before ended: (start, end)."""
    ends = [end for row in rows for end in row]
    low, high = min(0.0, *ends), max(0.0, *ends)
    reach = (high - low) or 1.0
    bars = []
    for start, end in rows:
        left, right = sorted(((start - low) / reach * 200, (end - low) / reach * 200))
        kind = "for" if end >= start else "against"
        zero = round(-low / reach * 200, 2)
        bars.append(
            tag(
                "svg",
                tag("line", x1=zero, x2=zero, y1=0, y2=20, class_="zero"),
                tag(
                    "rect",
                    x=round(left, 2),
                    y=4,
                    width=max(round(right - left, 2), 1) if end != start else 0,
                    height=12,
                    rx=1.5,
                    class_=f"bar {kind}",
                ),
                viewBox="-2 0 204 20",
                class_="step",
                aria_hidden="true",
                preserveAspectRatio="none",
            )
        )
    return bars
