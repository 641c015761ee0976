"""Patch flipping: what becomes of an answer as patches are taken out, by one map and another."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from caprmil.figures.style import COLOURS, GREY, Values, caption, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels side by side
MEANING = (
    "solid: the most relevant patches go first",
    "dashed: the least relevant go first",
    "number: the area between the two, 0 by chance",
)


class Flip(NamedTuple):
    """The two curves of one map."""

    removed: Values  # share of the patches, from 0 to 1
    most: Values  # the most relevant first
    least: Values
    area: float


class FlipPanel(NamedTuple):
    """One slide, or the mean over a cohort: the curves of each map by its name."""

    title: str
    up: str
    maps: Mapping[str, Flip]
    limits: tuple[float, float] | None = None  # of the scale up, where it has some


def flipping(panels: Sequence[FlipPanel], *, chance: str = "random") -> "Figure":
    """Draw a panel for each slide or cohort. A map has the same colour in all of them.

    The map named as `chance` is grey and thin, and lies upon any that says no more than it.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.maps))
    told = [name for name in names if name != chance]
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(told)}
    columns = min(ACROSS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.6 * columns, 3.9 * rows + 0.4)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel, colours)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    caption(figure, *MEANING)
    return figure


def _draw(axes: "Axes", panel: FlipPanel, colours: Mapping[str, str]) -> None:
    tidy(axes, title=panel.title, across="Patches taken out (%)", up=panel.up)
    for name, flip in panel.maps.items():
        colour = colours.get(name, GREY)
        across = [100 * float(share) for share in flip.removed]
        width, level = (1.8, 2) if name in colours else (0.9, 3)
        label = f"{name}  {round(flip.area, 2) + 0.0:.2f}"  # + 0.0: there is no minus zero
        axes.plot(across, flip.most, color=colour, lw=width, zorder=level, label=label)
        axes.plot(across, flip.least, color=colour, lw=width, zorder=level, ls=(0, (4, 2)))
    axes.set_xlim(-1, 101)
    if panel.limits is not None:
        low, high = panel.limits
        axes.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    # Below the axes it covers no curve: there is no corner that is always free.
    axes.legend(
        frameon=False,
        fontsize=8.5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=2,
        handlelength=1.6,
        columnspacing=1.4,
    )
