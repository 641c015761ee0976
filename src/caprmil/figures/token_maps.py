"""Token maps: the assignment of patches to tokens, with the top patches as in the paper."""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.canvas import (
    Canvas,
    Gallery,
    colour_bar,
    draw_gallery,
    draw_map,
    outline,
    scale_bar,
    text_colour,
)
from caprmil.figures.style import COLOURS, GREY, VERMILLION, caption, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR_MAP = "viridis"
# After the eight of Okabe and Ito: Paul Tol's "muted", for up to sixteen tokens.
MORE_COLOURS = (
    "#332288",
    "#117733",
    "#999933",
    "#882255",
    "#44AA99",
    "#AA4499",
    "#DDCC77",
    "#661100",
)
SMALL = 300  # pixels on the longer side of a small map
COLUMNS = 4  # of tokens, and of a gallery


def colour_of(token: int) -> str:
    """Return the colour of a token, the same in all figures."""
    colours = (*COLOURS, *MORE_COLOURS)
    return colours[token % len(colours)]


def token_maps(
    assignments: NDArray[Any],
    canvas: Canvas,
    *,
    head: int | None = None,
    galleries: Sequence[Gallery] = (),
    title: str = "",
    remarks: Sequence[str] = (),
) -> "Figure":
    """Draw the assignment of patches to each token, with the token's top patches below.

    Assignments are (H, N, M), of one block. The maps are those of one head, or the mean over heads.
    Without galleries, the usage of each token in each head is shown below.
    """
    weights = assignments.mean(axis=0) if head is None else assignments[head]
    tokens = weights.shape[1]
    bands = ceil(tokens / COLUMNS)
    columns = ceil(tokens / bands)
    wide = 3.3 if columns < 3 else 2.7
    rows = ceil(max((len(part.patches) for part in galleries), default=0) / COLUMNS)
    heights = [wide * float(np.clip(canvas.aspect, 0.3, 1.7)) + 0.3]
    heights = (heights + [wide * rows / COLUMNS + 0.1] * bool(rows)) * bands
    each = len(heights) // bands
    if not rows:
        heights.append(0.8 + max(0.24 * len(assignments), 0.1 * tokens))
    figure = new_figure(wide * columns + 0.9, sum(heights) + 0.8)
    figure.set_layout_engine("compressed" if rows and canvas.aspect < 1.3 else "constrained")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    maps = []
    for token in range(tokens):
        row, column = token // columns * each, token % columns
        maps.append(figure.add_subplot(grid[row, column]))
        name = f"Token {token + 1}   {weights[:, token].mean():.1%}"
        values = weights[:, token]
        shown = draw_map(maps[-1], canvas, values, colours=COLOUR_MAP, limits=(0, 1), title=name)
        if rows:
            outline(maps[-1], canvas, galleries[token].rows, VERMILLION)
            below = figure.add_subplot(grid[row + 1, column])
            draw_gallery(below, galleries[token], columns=COLUMNS, rows=rows)
    scale_bar(maps[0], canvas)
    colour_bar(maps, shown, "weight", aspect=30)
    if not rows:
        _draw_heads(figure, grid[-1, :].subgridspec(1, 2, width_ratios=(3, 2)), assignments)
    figure.suptitle(title, fontsize=11)
    caption(figure, *remarks)
    return figure


def head_maps(
    assignments: NDArray[Any],
    canvas: Canvas,
    *,
    title: str = "",
    remarks: Sequence[str] = (),
) -> "Figure":
    """Draw small maps of all heads (rows) and tokens (columns), and the usage of each token.

    Assignments are (H, N, M), of one block. The bar at the end of a row is the usage of the head's
    tokens, with the mean entropy of its assignments: 0 for one token per patch, 1 for all alike.
    """
    heads, _, tokens = assignments.shape
    canvas = canvas.coarser(SMALL)
    wide, bar = float(np.clip(6.5 / tokens, 0.8, 1.6)), 2.0
    high = max(0.6, wide * float(np.clip(canvas.aspect, 0.35, 1.5)))
    figure = new_figure(wide * tokens + bar + 1.2, (high + 0.1) * heads + 1.1)
    figure.set_layout_engine("compressed" if 0.5 < canvas.aspect < 1.3 else "constrained")
    ratios = [*[wide] * tokens, bar]
    grid = figure.subplots(heads, tokens + 1, squeeze=False, width_ratios=ratios)
    usage, entropy = assignments.mean(axis=1), entropies(assignments).mean(axis=1)
    for head in range(heads):
        for token in range(tokens):
            axes = grid[head, token]
            values = assignments[head, :, token]
            shown = draw_map(axes, canvas, values, colours=COLOUR_MAP, limits=(0, 1))
            if head == 0:
                axes.set_title(f"Token {token + 1}", fontsize=9.5)
                axes.spines["top"].set(color=colour_of(token), linewidth=4)
        grid[head, 0].set_ylabel(
            f"Head {head + 1}", fontsize=9.5, rotation=0, ha="right", va="center"
        )
        _draw_usage(grid[head, tokens], usage[head], entropy[head])
    grid[0, tokens].set_title("usage of each token", fontsize=9.5)
    scale_bar(grid[heads - 1, 0], canvas)
    size = {"aspect": 40, "shrink": min(0.9, 4 / (high * heads))}
    colour_bar(list(grid[:, :tokens].flat), shown, "weight", **size)
    figure.suptitle(title, fontsize=11)
    caption(figure, *remarks)
    return figure


def entropies(assignments: NDArray[Any]) -> NDArray[np.float64]:
    """Return the normalised entropy of assignments (H, N): 0 for one token, 1 for all alike."""
    shares, tokens = assignments.astype(np.float64), assignments.shape[-1]
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return -(shares * logs).sum(axis=-1) / max(np.log(tokens), 1e-30)


def _draw_usage(axes: "Axes", usage: NDArray[Any], entropy: float) -> None:
    """Draw the usage of a head's tokens as one bar."""
    start = 0.0
    for token, share in enumerate(usage.tolist()):
        axes.barh(0, share, left=start, height=0.5, color=colour_of(token), ec="white", lw=0.5)
        if share > 0.12:
            text = f"{share:.0%}"
            axes.text(
                start + share / 2,
                0,
                text,
                ha="center",
                va="center",
                fontsize=7,
                color=text_colour(colour_of(token)),
            )
        start += share
    axes.text(0, -0.42, f"entropy {entropy:.2f}", fontsize=7.5, color=GREY, va="top")
    axes.set(xlim=(0, 1), ylim=(-1, 1))
    axes.set_axis_off()


def _draw_heads(figure: "Figure", grid: Any, assignments: NDArray[Any]) -> None:
    """Draw the usage of tokens and the entropy of assignments, by head."""
    usage, entropy = assignments.mean(axis=1), entropies(assignments)
    heads = np.arange(len(usage))
    shares, spread = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    tidy(shares, title="Usage of each token", xlabel="share of all patches")
    starts = usage.cumsum(axis=1) - usage
    for token in range(usage.shape[1]):
        options: dict[str, Any] = {"color": colour_of(token), "ec": "white", "lw": 0.5}
        name = f"{token + 1}"
        shares.barh(heads, usage[:, token], 0.7, left=starts[:, token], label=name, **options)
    options = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "ncols": 1 + usage.shape[1] // 9}
    shares.legend(frameon=False, fontsize=8, title="token", **options)
    tidy(spread, title="Entropy of assignments", xlabel="0: one token, 1: all alike")
    low, quarter, middle, three, high = np.quantile(entropy, (0.05, 0.25, 0.5, 0.75, 0.95), axis=1)
    spread.hlines(heads, low, high, color=GREY, lw=1)
    spread.hlines(heads, quarter, three, color=GREY, lw=4)
    spread.plot(middle, heads, "o", color="black", ms=4)
    for axes in (shares, spread):
        axes.set(yticks=heads, ylim=(len(heads) - 0.4, -0.6), xlim=(-0.01, 1.01))
        axes.set_yticklabels([f"head {head + 1}" for head in heads], fontsize=8)
        axes.grid(visible=False, axis="y")
