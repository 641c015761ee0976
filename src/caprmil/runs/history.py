"""The history of a fold: a row of numbers per epoch, in history.csv."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from caprmil.io.atomic import write_text

HISTORY = "history.csv"

Row: TypeAlias = dict[str, float]


def write_history(rows: Sequence[Row], path: Path) -> None:
    """Write the rows of all epochs so far."""
    text = pd.DataFrame(rows, columns=list(rows[0])).to_csv(
        index=False, lineterminator="\n", na_rep="nan"
    )
    write_text(path, text, replace=True)


def read_history(path: Path) -> dict[str, list[float]]:
    """Return the columns of a history."""
    return {str(name): column.tolist() for name, column in pd.read_csv(path).items()}
