"""Patch vectors before and after context, on their first two principal components."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.canvas import Canvas, draw_painted, scale_bar
from caprmil.figures.style import caption, new_figure, tidy
from caprmil.figures.token_maps import colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Plane(NamedTuple):
    """Patches on their first two principal components, and the variance of each."""

    points: NDArray[Any]  # (N, 2)
    variance: tuple[float, float]  # as shares of the total


def context_planes(
    before: Plane,
    after: Plane,
    tokens: NDArray[np.integer],
    canvas: Canvas | None = None,
    *,
    title: str = "",
    remarks: Sequence[str] = (),
) -> "Figure":
    """Draw patches before and after context, coloured by the token they are assigned to most.

    With a canvas, the third panel shows these tokens on the slide. Points are an image in a PDF,
    since 20,000 circles open slowly.
    """
    figure = new_figure(4.1 * (2 + (canvas is not None)) + 1.4, 4.4)
    row = figure.subplots(1, 2 + (canvas is not None))
    for axes, plane, name in zip(row, (before, after), ("Before context", "After"), strict=False):
        tidy(axes, title=name)
        _draw_points(axes, plane, tokens)
    if canvas is not None:
        _draw_on_slide(row[2], canvas, tokens)
    _legend(figure, tokens)
    figure.suptitle(title, fontsize=11)
    caption(figure, *remarks)
    return figure


def _draw_points(axes: "Axes", plane: Plane, tokens: NDArray[np.integer]) -> None:
    order = np.random.default_rng(0).permutation(
        len(tokens)
    )  # or the last token would hide the others
    size = float(np.clip(6000 / len(tokens), 1.5, 24))
    colours = [colour_of(int(token)) for token in tokens[order]]
    options: dict[str, Any] = {"s": size, "c": colours, "alpha": 0.75, "linewidths": 0}
    axes.scatter(*plane.points[order].T, **options, rasterized=True)
    first, second = plane.variance
    axes.set_xlabel(f"first component, {first:.0%} of variance", fontsize=9)
    axes.set_ylabel(f"second component, {second:.0%}", fontsize=9)
    axes.locator_params(nbins=5)


def _draw_on_slide(axes: "Axes", canvas: Canvas, tokens: NDArray[np.integer]) -> None:
    from matplotlib.colors import ListedColormap

    # Where patches overlap, draw the most frequent token: token numbers have no mean.
    found = np.unique(tokens)
    shares = np.stack([canvas.paint(tokens == token) for token in found])
    most = np.where(np.isnan(shares[0]), np.nan, shares.argmax(axis=0))
    colours = ListedColormap([colour_of(int(token)) for token in found])
    limits = (-0.5, len(found) - 0.5)
    draw_painted(axes, canvas, most, colours=colours, limits=limits, title="On the slide")
    scale_bar(axes, canvas)


def _legend(figure: "Figure", tokens: NDArray[np.integer]) -> None:
    from matplotlib.lines import Line2D

    found, counts = np.unique(tokens, return_counts=True)
    marks = [
        Line2D(
            [],
            [],
            ls="",
            marker="o",
            color=colour_of(int(token)),
            label=f"token {token + 1}: {n:,}",
        )
        for token, n in zip(found, counts, strict=True)
    ]
    figure.legend(handles=marks, frameon=False, fontsize=8.5, loc="outside right center")
