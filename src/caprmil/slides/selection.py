"""Selection: which slides of those that are there: the ones in a table, or a share of all."""

import re
from collections.abc import Mapping
from pathlib import Path

from caprmil.errors import CohortError, RecipeError, shorten
from caprmil.io import tables
from caprmil.slides.names import slide_name


def select_listed(
    slides: Mapping[str, Path], table: Path
) -> tuple[dict[str, Path], dict[str, float]]:
    """Return the slides that a table names, and the scales that its column `mpp` gives."""
    content = tables.read(table)
    column = next(iter(tables.called(content.columns, tables.COLUMNS["slide"])), None)
    if column is None:
        raise CohortError(f"{table} has no column of slides. Call it 'slide'.")
    names = [slide_name(cell) for cell in content.names(column)]
    if missing := [name for name in names if name not in slides]:
        raise CohortError(
            f"Not among the slides given, but in {table} ({len(missing)}): {shorten(missing)}. "
            "Remove their lines, or pass the folder that they are in."
        )
    scale = next(iter(tables.called(content.columns, tables.COLUMNS["mpp"])), None)
    mpps: dict[str, float] = {}
    if scale is not None:
        for name, (cell, place) in zip(names, content.placed(scale), strict=True):
            if tables.is_known(cell) and not tables.is_number(cell):
                raise CohortError(f"{place}: {scale} is '{cell}', not a number.")
            if tables.is_known(cell) and mpps.setdefault(name, float(cell)) != float(cell):
                raise CohortError(f"{place}: {name} has another {scale} above. Keep one of them.")
    return {name: slides[name] for name in dict.fromkeys(names)}, mpps


def parse_shard(text: str) -> tuple[int, int]:
    """Return which share of how many is meant by `2/8`, the second of eight."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    which, many = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= which <= many:
        raise RecipeError(
            f"--shard reads I/N with I from 1 to N, e.g. 2/8, not '{text}'. "
            "Array jobs must count from 1: --array=1-8."
        )
    return which, many


def select_shard(slides: Mapping[str, Path], which: int, many: int) -> dict[str, Path]:
    """Return one of as many shares as there are jobs: every so-manieth slide by name.

    Which slides are done already plays no part, so that all jobs see the same shares whenever they
    start.
    """
    return {name: slides[name] for name in sorted(slides)[which - 1 :: many]}
