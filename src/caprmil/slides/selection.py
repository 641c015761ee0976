"""Selection of slides: those in a table, or one shard of all."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from caprmil.errors import CohortError, RecipeError, shorten
from caprmil.io import tables
from caprmil.slides.names import slide_name

_log = logging.getLogger("caprmil")


def select_listed(
    slides: Mapping[str, Path], table: Path
) -> tuple[dict[str, Path], dict[str, float]]:
    """Return the slides that are listed in a table, and the scales in its column `mpp`.

    Listed slides that were not found are left out, with a note: a table may be of several folders.
    """
    content = tables.read_table(table)
    column = tables.find_column(content, tables.COLUMNS["slide"])
    if column is None:
        raise CohortError(f"{table} has no slide column. Call it 'slide'.")
    names = [slide_name(cell) for cell in tables.names(content, column)]
    missing = [name for name in names if name not in slides]
    if len(missing) == len(names):
        raise CohortError(
            f"None of the slides in {table} was found: {shorten(missing)}. The slides are called "
            f"{shorten(slides)}. Correct the names, or pass the folder with their files."
        )
    if missing:
        _log.warning("note: in %s, and not found (%d): %s.", table, len(missing), shorten(missing))
    scale = tables.find_column(content, tables.COLUMNS["mpp"])
    mpps: dict[str, float] = {}
    if scale is not None:
        for name, (position, cell) in zip(names, content[scale].items(), strict=True):
            if tables.is_known(cell) and not tables.is_number(cell):
                raise CohortError(f"{position}: {scale} is '{cell}', not a number.")
            if tables.is_known(cell) and mpps.setdefault(name, float(cell)) != float(cell):
                raise CohortError(
                    f"{position}: {name} has another {scale} in an earlier row. Keep one."
                )
    return {name: slides[name] for name in dict.fromkeys(names) if name in slides}, mpps


def parse_shard(text: str) -> tuple[int, int]:
    """Return index and count of a shard such as `2/8`, the second of eight."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= index <= count:
        raise RecipeError(
            f"--shard must be I/N with I from 1 to N, e.g. 2/8, not '{text}'. "
            "Array jobs must count from 1: --array=1-8."
        )
    return index, count


def select_shard(slides: Mapping[str, Path], index: int, count: int) -> dict[str, Path]:
    """Return every `count`-th slide by name, starting with the `index`-th.

    The shards do not depend on which slides are finished, so jobs may start at any time.
    """
    return {name: slides[name] for name in sorted(slides)[index - 1 :: count]}
