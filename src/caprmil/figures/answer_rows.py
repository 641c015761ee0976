"""The answer for several versions of a slide, one row each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from caprmil.figures.style import BLUE, GREY, VERMILLION, caption, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AnswerRow(NamedTuple):
    """A version of a slide: the answer of each model, and their mean."""

    title: str
    models: Sequence[float]
    mean: float
    is_whole: bool  # the slide as it is: the row with which the next ones are compared


def answer_rows(
    rows: Sequence[AnswerRow],
    *,
    title: str,
    xlabel: str,
    limits: tuple[float, float] | None = None,
) -> "Figure":
    """Draw the mean answer of each row as a dot, with a line from that of the whole slide."""
    figure = new_figure(7.2, 1.5 + 0.36 * len(rows))
    axes = figure.subplots()
    tidy(axes, title=title, xlabel=xlabel)
    axes.grid(visible=False, axis="y")
    whole = rows[0].mean
    for number, row in enumerate(rows):
        whole = row.mean if row.is_whole else whole
        colour = GREY if row.is_whole else VERMILLION
        axes.plot([whole, row.mean], [number, number], color=colour, lw=2, solid_capstyle="butt")
        if len(row.models) > 1:
            axes.plot(row.models, [number] * len(row.models), "|", color=BLUE, ms=11, mew=1.2)
        axes.plot([row.mean], [number], "o", color=colour, ms=8, mec="white", clip_on=False)
        right = axes.get_yaxis_transform()
        text = f"{row.mean:.4g}" if limits is None else f"{row.mean:.3f}"
        axes.text(1.03, number, text, transform=right, va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), labels=[row.title for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if limits is not None:
        low, high = limits
        axes.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    models = "blue: each model" if any(len(row.models) > 1 for row in rows) else ""
    caption(figure, "line: the change from the whole slide", models)
    return figure
