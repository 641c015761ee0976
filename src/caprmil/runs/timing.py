"""The time and memory of a fold's training, measured in it, in timing.json.

It is not in the history: that is the same whenever a training is repeated.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from caprmil.errors import RunError
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json, read_json

TIMING = "timing.json"


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """One epoch over the training part, without validation."""

    epoch: int
    seconds: float
    peak_mib: float | None
    """Peak of torch's allocator on a GPU; None on a CPU, which has no such counter."""
    device: str


@dataclass(frozen=True, kw_only=True)
class TestTiming:
    """The prediction of the test part."""

    __test__ = False  # not a test, in spite of its name

    seconds: float
    slides: int
    device: str


@dataclass(frozen=True, kw_only=True)
class FoldTiming:
    """What was measured of a fold. Each epoch was measured whole, also in a resumed training."""

    epochs: tuple[EpochTiming, ...] = ()
    test: TestTiming | None = None

    def write(self, folder: Path) -> None:
        write_text(folder / TIMING, as_json(asdict(self)), replace=True)


def read_timing(folder: Path) -> FoldTiming:
    """Return what was measured of a fold: nothing, if an earlier version trained it."""
    path = folder / TIMING
    if not path.exists():
        return FoldTiming()
    try:
        found = read_json(path)
        test = found["test"]
        return FoldTiming(
            epochs=tuple(EpochTiming(**epoch) for epoch in found["epochs"]),
            test=TestTiming(**test) if test else None,
        )
    except (ValueError, KeyError, TypeError) as problem:
        raise RunError(
            f"{path} is damaged ({type(problem).__name__}: {problem}). Remove it: the times of "
            "this fold are then left blank."
        ) from problem


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
