"""The time and memory of a fold's training, measured in it, in timing.json.

It is not in the history: that is the same whenever a training is repeated.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from caprmil import config
from caprmil.errors import RecipeError
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json

TIMING = "timing.json"


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """One epoch over the training part, without validation."""

    epoch: int
    seconds: float
    peak_mib: float | None
    """Peak of torch's allocator on a GPU; None on a CPU, which has no such counter."""
    device: str

    def __post_init__(self) -> None:
        check_not_negative(self.epoch, self.seconds, self.peak_mib)


@dataclass(frozen=True, kw_only=True)
class TestTiming:
    """The prediction of the test part."""

    __test__ = False  # not a test, in spite of its name

    seconds: float
    slides: int
    device: str

    def __post_init__(self) -> None:
        check_not_negative(self.seconds, self.slides)


def check_not_negative(*numbers: float | None) -> None:
    """Raise if a number that was measured is negative."""
    if any(number is not None and number < 0 for number in numbers):
        raise RecipeError("a number is negative")


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
    advice = "Remove it: the times of this fold are then left blank."
    return config.load_json(path, into=FoldTiming, advice=advice)


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
