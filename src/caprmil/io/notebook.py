"""How objects show themselves in a notebook: a title, a table of facts, pictures and tables.

Every text is escaped. Colours are those of the notebook, so that it may be dark.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL = "text-align:left;padding:2px 12px 2px 0"


def show_html(title: str, facts: Iterable[tuple[str, object]], *parts: str) -> str:
    """Return the HTML of an object: its title, what is known of it, and further parts."""
    known = [(name, value) for name, value in facts if value is not None]
    rows = "".join(_row([("th", name), ("td", value)]) for name, value in known)
    body = f'<table style="margin:4px 0">{rows}</table>' if rows else ""
    return f"<div><strong>{escape(title)}</strong>{body}{''.join(parts)}</div>"


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Return a table."""
    head = _row([("th", cell) for cell in header])
    body = "".join(_row([("td", cell) for cell in row]) for row in rows)
    below = f"<div><small>{escape(note)}</small></div>" if note else ""
    return f'<table style="margin:4px 0">{head}{body}</table>{below}'


def _row(cells: Iterable[tuple[str, object]]) -> str:
    shown = (f'<{kind} style="{CELL}">{escape(str(cell))}</{kind}>' for kind, cell in cells)
    return f"<tr>{''.join(shown)}</tr>"


def html_picture(pixels: NDArray[np.uint8], text: str, *, width: int | None = None) -> str:
    """Return an image; `text` says what it shows."""
    from PIL import Image

    content = BytesIO()
    Image.fromarray(pixels).save(content, format="PNG")
    return _picture(content.getvalue(), text, f"width:{width}px;" if width else "")


def html_figure(figure: "Figure", text: str) -> str:
    """Return a figure as an image; `text` says what it shows."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return _picture(content.getvalue(), text)


def _picture(content: bytes, text: str, style: str = "") -> str:
    data = base64.b64encode(content).decode()
    return (
        f'<img alt="{escape(text)}" style="{style}max-width:100%;image-rendering:auto" '
        f'src="data:image/png;base64,{data}">'
    )


def first_rows(frame: Any, most: int = 10) -> str:
    """Return the first rows of a DataFrame as a table, with the number of the others."""
    rows = [[_cell(value) for value in row] for row in frame.head(most).itertuples(index=False)]
    hidden = len(frame) - most
    return html_table([*frame.columns], rows, f"and {hidden} more rows" if hidden > 0 else "")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
