"""What a reproduction found: the paper's figures and ours, as text, CSV, Markdown and LaTeX."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from math import isnan
from pathlib import Path

from caprmil.experiments import paper
from caprmil.experiments.reproduce.protocols import Protocol, Row
from caprmil.io import tables
from caprmil.io.atomic import write_text


@dataclass(frozen=True, kw_only=True)
class Line:
    """One model and metric: the paper's figure and ours."""

    model: str
    metric: str
    parameters: int
    printed: paper.Figure | None  # in the paper
    ours: paper.Figure
    floor: float  # of the ACE: what a perfectly calibrated model would read; NaN for others

    @property
    def units(self) -> float:
        """The difference, in units of the paper's spread."""
        if self.printed is None:
            return float("nan")
        return (self.ours.mean - self.printed.mean) / self.printed.std


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A protocol that was run, with the table that compares it to the paper."""

    protocol: Protocol
    lines: Sequence[Line]
    notes: Sequence[str]

    def rows(self) -> list[Row]:
        """Return the table as text, a row for each model and metric."""
        return [
            {
                "model": line.model,
                "parameters": f"{line.parameters:,}",
                "metric": line.metric.upper() if line.metric != "kappa" else "kappa",
                "paper": _show(*line.printed) if line.printed else "-",
                "ours": _show(*line.ours),
                "diff / std": "-" if isnan(line.units) else f"{line.units:+.1f}",
                "floor": "-" if isnan(line.floor) else f"{line.floor:.3f}".replace("0.", "."),
            }
            for line in self.lines
        ]

    def as_markdown(self) -> str:
        rows = self.rows()
        table = tables.markdown_table(
            list(rows[0]), [list(row.values()) for row in rows], self.notes
        )
        return f"# {self.protocol.title}\n\n{table}"

    def as_latex(self) -> str:
        """Return a table for a paper; it needs the package booktabs."""
        rows = self.rows()
        body = [" & ".join(row.values()).replace("±", r"$\pm$") + r" \\" for row in rows]
        return "\n".join(
            [
                r"\begin{tabular}{lrlrrrr}",
                r"\toprule",
                " & ".join(rows[0]) + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                *(f"% {note}" for note in self.notes),
                "",
            ]
        )

    def as_csv(self) -> str:
        """Return every number in full precision."""
        text = StringIO()
        table = csv.writer(text, lineterminator="\n")
        head = ["model", "parameters", "metric", "paper_mean", "paper_std"]
        table.writerow([*head, "mean", "std", "difference_in_paper_stds", "ace_floor"])
        for line in self.lines:
            printed = line.printed or ("", "")
            numbers = [*printed, *line.ours, line.units, line.floor]
            shown = ["" if isinstance(n, float) and isnan(n) else n for n in numbers]
            table.writerow([line.model, line.parameters, line.metric, *shown])
        return text.getvalue()

    def write(self, folder: Path) -> None:
        """Write table.md, table.csv and table.tex: they are made from the runs, so made anew."""
        write_text(folder / "table.md", self.as_markdown(), replace=True)
        write_text(folder / "table.csv", self.as_csv(), replace=True)
        write_text(folder / "table.tex", self.as_latex(), replace=True)


def _show(mean: float, std: float) -> str:
    shown = f"{mean:.3f}" if isnan(std) else f"{mean:.3f} ± {std:.3f}"
    return shown.replace("0.", ".")
