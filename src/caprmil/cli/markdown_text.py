"""Markdown on a terminal: tables that fit it. A pipe or a file gets the Markdown itself."""

import re
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


def show_markdown(text: str) -> None:
    """Print headings, text and tables in Markdown."""
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.console import Console

    draw_markdown(text, Console(markup=False, highlight=False))


def draw_markdown(text: str, console: "Console") -> None:
    """Print Markdown in the width of a console."""
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in block.splitlines()]
        cells = [_cells(line) for line in lines]
        if lines[0].startswith("|") and len(set(map(len, cells))) == 1:
            _draw_table(cells[0], cells[2:], console)  # the line between them has dashes
        elif lines[0].startswith("#"):
            console.print(lines[0].lstrip("# "), style="bold")
        else:
            console.print(block)
        console.print()


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def _draw_table(header: list[str], rows: list[list[str]], console: "Console") -> None:
    """Draw a table. If it is too wide, what is the same in every row is above it."""
    from rich import box
    from rich.table import Table

    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    kept = list(range(len(header)))
    if sum(widths) + 2 * len(widths) > console.width and len(rows) > 1:
        kept = [n for n in kept if len({row[n] for row in rows}) > 1]
        shared = [f"{header[n]}: {rows[0][n]}" for n in range(len(header)) if n not in kept]
        if shared:
            console.print(f"In every row: {'; '.join(shared)}.")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    columns = [[header[n], *(row[n] for row in rows)] for n in kept]
    for column, width in zip(columns, _fit(columns, console.width), strict=True):
        table.add_column(column[0], width=width, overflow="fold")
    for row in rows:
        table.add_row(*(row[n] for n in kept))
    console.print(table)


def _fit(columns: list[list[str]], width: int) -> list[int | None]:
    """Return the width of each column, so that only headings wrap; None if it is too wide."""
    longest = [max(map(len, column)) for column in columns]
    least = [max(map(len, [*heading.split(), *cells])) for heading, *cells in columns]
    spare = width - sum(least) - 3 * len(columns)  # padding, and a space between columns
    if spare < 0:
        return [None] * len(columns)
    found: list[int | None] = list(least)
    for n in sorted(range(len(columns)), key=lambda n: longest[n] - least[n]):
        more = min(longest[n] - least[n], spare)
        found[n], spare = least[n] + more, spare - more
    return found
