"""Deletion curves: a prediction as patches are removed in the order of each map."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from caprmil.figures.style import COLOURS, GREY, Values, caption, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3  # panels in a row
MEANING = (
    "solid: the most relevant patches are removed first",
    "dashed: the least relevant first",
    "number: the area between the two, 0 by chance",
)


class DeletionCurve(NamedTuple):
    """The two curves of one map."""

    removed: Values  # share of the patches, from 0 to 1
    most: Values  # the most relevant patches first
    least: Values
    area: float


class DeletionPanel(NamedTuple):
    """The curves of each map, for one slide or as the mean over slides."""

    title: str
    ylabel: str
    maps: Mapping[str, DeletionCurve]
    limits: tuple[float, float] | None = None  # of the vertical axis


def deletion_curves(panels: Sequence[DeletionPanel], *, chance: str = "random") -> "Figure":
    """Draw a panel for each slide or cohort. A map has the same colour in all panels.

    The map called `chance` is thin and grey. It is drawn on top, so that a map which equals it does
    not hide it.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.maps))
    coloured = [name for name in names if name != chance]
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(coloured)}
    columns = min(COLUMNS, len(panels))
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


def _draw(axes: "Axes", panel: DeletionPanel, colours: Mapping[str, str]) -> None:
    tidy(axes, title=panel.title, xlabel="Patches removed (%)", ylabel=panel.ylabel)
    for name, curve in panel.maps.items():
        colour = colours.get(name, GREY)
        across = [100 * float(share) for share in curve.removed]
        width, level = (1.8, 2) if name in colours else (0.9, 3)
        label = f"{name}  {round(curve.area, 2) + 0.0:.2f}"  # + 0.0: no minus zero
        axes.plot(across, curve.most, color=colour, lw=width, zorder=level, label=label)
        axes.plot(across, curve.least, color=colour, lw=width, zorder=level, ls=(0, (4, 2)))
    axes.set_xlim(-1, 101)
    if panel.limits is not None:
        low, high = panel.limits
        axes.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    # Below the axes, since no corner is always free of curves.
    axes.legend(
        frameon=False,
        fontsize=8.5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=2,
        handlelength=1.6,
        columnspacing=1.4,
    )
