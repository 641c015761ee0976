"""Columns of a table that hold the probabilities of classes, by their names."""

from typing import TYPE_CHECKING

from caprmil.io import tables

if TYPE_CHECKING:
    import pandas as pd

PREFIXES = ("prob_", "probability_", "p_")
SCORE = ("probability", "prob", "score")


def probability_columns(
    table: "pd.DataFrame", label: str | None
) -> tuple[str | None, dict[str, str]] | None:
    """Return the column of labels, if any, and the column of each class's probability."""
    # Next to probabilities, a column `class` may be the predicted one.
    words = (word for word in tables.COLUMNS["label"] if word != "class")
    truth = label or tables.find_column(table, words)
    for prefix in PREFIXES:
        if len(columns := _starting_with(table, prefix)) > 1:
            return truth, columns
    # STAMP: the label column has any name, and <its name>_<class> are the probabilities.
    for name in [truth] if truth else table.columns:
        columns = _starting_with(table, f"{name}_")
        if len(columns) > 1 and not columns.keys().isdisjoint(table[name]):
            return name, columns
    if score := tables.find_column(table, SCORE):
        return truth, {"0": "", "1": score}
    return None


def _starting_with(table: "pd.DataFrame", prefix: str) -> dict[str, str]:
    size = len(prefix)
    same = (n for n in table.columns if n[:size].lower() == prefix.lower() and n[size:])
    return {name[size:]: name for name in same}
