"""Tables with three lines of heads, in Markdown and LaTeX, and the format of their numbers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan

from caprmil.experiments.paper import Figure
from caprmil.io import tables


@dataclass(frozen=True)
class Cell:
    """A number as text, and its spread."""

    text: str = ""
    spread: str = ""

    def plain(self) -> str:
        return f"{self.text} ± {self.spread}" if self.spread else self.text

    def latex(self) -> str:
        if not self.text:
            return ""
        return f"${self.text}_{{{self.spread}}}$" if self.spread else f"${self.text}$"


BLANK = Cell()


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: cohort or quantity, metric or unit, and whose numbers it has."""

    group: str
    title: str
    whose: str
    sources: tuple[int, ...] = ()

    @property
    def references(self) -> str:
        """The numbers of its sources, e.g. [1, 3]."""
        return f"[{', '.join(map(str, self.sources))}]" if self.sources else ""

    @property
    def heads(self) -> tuple[str, str, str]:
        """The three lines of its head."""
        return self.group, self.title, " ".join(filter(None, [self.whose, self.references]))


@dataclass(frozen=True)
class Line:
    """A row of a table."""

    labels: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One of the paper's tables."""

    number: int
    title: str
    labels: tuple[str, ...]
    columns: Sequence[Column]
    rows: Sequence[Line]
    notes: Sequence[str]
    sources: Sequence[str]
    """What the numbers in brackets refer to, each with its number."""

    @property
    def head_levels(self) -> list[int]:
        """The lines of the head that have a text."""
        return [n for n in range(3) if any(column.heads[n] for column in self.columns)]

    def head_spans(self, level: int) -> list[tuple[str, int]]:
        """Return the texts of a line of the head, each with the number of columns below it."""
        paths = groupby(self.columns, key=lambda column: column.heads[: level + 1])
        return [(path[level], len(list(own))) for path, own in paths]

    def as_markdown(self) -> str:
        header = [*self.labels, *(" ".join(filter(None, each.heads)) for each in self.columns)]
        rows = [[*row.labels, *(cell.plain() for cell in row.cells)] for row in self.rows]
        title = f"# Table {self.number}: {self.title}"
        return f"{title}\n\n" + tables.markdown_table(header, rows, [*self.notes, *self.sources])

    def as_latex(self) -> str:
        """Return a LaTeX table; it needs the package booktabs."""
        margin = " & " * len(self.labels)
        lines = []
        for level in self.head_levels:
            spans = self.head_spans(level)
            cells = [rf"\multicolumn{{{n}}}{{c}}{{{_escape(text)}}}" for text, n in spans]
            start = " & ".join(map(_escape, self.labels)) + " & " if level == 2 else margin
            lines.append(start + " & ".join(cells) + r" \\")
        body = [
            " & ".join([*map(_escape, row.labels), *(cell.latex() for cell in row.cells)]) + r" \\"
            for row in self.rows
        ]
        return "\n".join(
            [
                f"% Table {self.number}: {self.title}",
                *(f"% {note}" for note in [*self.notes, *self.sources]),
                rf"\begin{{tabular}}{{{'l' * len(self.labels)}{'c' * len(self.columns)}}}",
                r"\toprule",
                *lines,
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )


def _escape(text: str) -> str:
    return re.sub(r"([_%&#$])", r"\\\1", text)


def score(figure: Figure | None) -> Cell:
    """Return a score as the paper prints it: .975 and .006."""
    if figure is None or isnan(figure.mean):
        return BLANK
    return Cell(_short(figure.mean), "" if isnan(figure.std) else _short(figure.std))


def _short(value: float) -> str:
    return re.sub(r"^(-?)0\.", r"\1.", f"{value:.3f}")


def amount(value: float | None, *, decimals: int | None = None) -> Cell:
    """Return a number with three digits after the point below 1, and two above."""
    if value is None:
        return BLANK
    places = decimals if decimals is not None else 3 if value < 1 else 2
    return Cell(f"{value:.{places}f}")


def seconds(value: float | None) -> Cell:
    """Return a time with one digit after the point, or two digits in all below a second."""
    if value is None:
        return BLANK
    return Cell(f"{value:.1f}" if value >= 1 else f"{value:.2g}")
