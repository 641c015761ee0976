"""What all figures share: colours, empty axes, and how they are saved.

Figures are objects, without pyplot and its global state, so they can be drawn in threads and
without a display. Matplotlib is imported inside the functions. Colours are those of Okabe and Ito,
which are distinct with any colour vision.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.io.atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values: TypeAlias = Sequence[float | int] | NDArray[Any]

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK, YELLOW = "#CC79A7", "#56B4E9", "#000000", "#F0E442"
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, YELLOW)
GREY, GRID = "#777777", "#E5E5E5"

Slides: TypeAlias = tuple[NDArray[np.integer], NDArray[np.floating]]  # labels and probabilities


class Metric(Protocol):
    """What a figure reads of the record of a metric."""

    @property
    def name(self) -> str: ...
    @property
    def long_title(self) -> str: ...
    @property
    def higher_is_better(self) -> bool: ...
    @property
    def chance(self) -> float | None: ...


def save(figure: "Figure", path: Path | str, dpi: int = 150, *, replace: bool = False) -> Path:
    """Write a figure; the suffix is the format (png, pdf, svg)."""
    _plain_text(figure)
    with atomic_write(path, replace=replace) as partial:
        figure.savefig(partial, dpi=dpi)
    return Path(path)


def settle(figure: "Figure") -> None:
    """Compute the layout of a figure once, before it is saved several times.

    Otherwise Matplotlib repeats the layout each time, and draws every image twice for it.
    """
    _plain_text(figure)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def _plain_text(figure: "Figure") -> None:
    """Draw a dollar sign as it is: Matplotlib would read the name of a class as a formula."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: "Axes", *, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Set titles and labels, with a light grid and without the upper and right edge."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=3)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(xlabel, fontsize=10)
    axes.set_ylabel(ylabel, fontsize=10)


def log_scale(axes: "Axes", which: str, subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Make the axis x or y logarithmic, with plain numbers at `subs` times powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def caption(figure: "Figure", *remarks: str) -> None:
    """Write remarks below a figure, broken into lines of its width."""
    width, lines = int(16 * figure.get_figwidth()), [""]  # 16 characters per inch
    for remark in filter(None, remarks):
        longer = f"{lines[-1]}    {remark}".strip()
        lines = [*lines[:-1], longer] if len(longer) <= width else [*lines, *wrap(remark, width)]
    figure.supxlabel("\n".join(lines), fontsize=8, color=GREY)
