"""The history of a fold: a row of numbers per epoch, in history.csv."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

from caprmil.errors import RunError, one_line
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
    """Return the columns of a history. NaN is an epoch without a value."""
    try:
        table = pd.read_csv(path, dtype=np.float64)
        if np.isinf(table.to_numpy()).any() or table.get("epoch", pd.Series([0])).isna().any():
            raise ValueError("a number is infinite, or an epoch has none")
    except (OSError, ValueError, OverflowError) as problem:
        reason = one_line(problem, 200)
        raise RunError(
            f"{path} is missing or damaged ({reason}). Restore it from a copy, or train the run "
            "again, in a new folder."
        ) from problem
    return {str(name): column.tolist() for name, column in table.items()}
