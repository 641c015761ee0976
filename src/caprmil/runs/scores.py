"""The scores of a run, in scores.json, and its calibration. They are checked when they are read."""

from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

from caprmil import config
from caprmil.errors import RecipeError, RunError
from caprmil.io.json_files import read_json

SCORES, CALIBRATION = "scores.json", "calibration.json"
LOWEST, HIGHEST = 0.001, 1000  # a temperature beyond says nothing but 0 and 1, or nothing at all

Number = float | None  # None where a score has no value


@dataclass(frozen=True, kw_only=True)
class MetricScores:
    """A metric over folds and pooled."""

    mean_over_folds: Number
    std_over_folds: Number
    folds_counted: int
    all_slides_pooled: Number
    interval: tuple[Number, ...] | None

    def __post_init__(self) -> None:
        if self.interval is not None and len(self.interval) != 2:
            raise RecipeError(f"an interval has two ends, not {len(self.interval)}")


@dataclass(frozen=True, kw_only=True)
class Temperatures:
    """The temperature of each fold, and its effect."""

    temperatures: dict[str, Number] = field(default_factory=dict)
    method: str = ""
    corrections: dict[str, str] = field(default_factory=dict)
    """What is corrected by something else than a temperature: only measured."""
    before: dict[str, Number] = field(default_factory=dict)
    after: dict[str, Number] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, t in self.temperatures.items():
            if t is not None and not LOWEST <= t <= HIGHEST:
                raise RecipeError(
                    f"the temperature of {name} is {t:g}, and must be from {LOWEST} to {HIGHEST:,}"
                )

    @property
    def used(self) -> dict[str, float]:
        """The temperatures that change something: a temperature of 1 means none."""
        known = {name: t for name, t in self.temperatures.items() if t is not None}
        return {name: t for name, t in known.items() if not isclose(t, 1.0)}


@dataclass(frozen=True, kw_only=True)
class CalibrationFile(Temperatures):
    """The calibration of a run. Of several targets, each has its own temperatures."""

    targets: dict[str, Temperatures] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DifferenceFile:
    """A difference from a baseline, or from a model of one modality."""

    first: str = ""
    second: str
    verdict: str
    first_mean: Number
    first_std: Number
    second_mean: Number
    second_std: Number
    difference: Number
    low: Number
    high: Number
    others: dict[str, Any] = field(default_factory=dict, metadata=config.REST)


@dataclass(frozen=True, kw_only=True)
class ComparisonFile:
    """The comparison with baselines, or with the models of one modality."""

    differences: tuple[DifferenceFile, ...] = ()
    notes: tuple[str, ...] = ()
    others: dict[str, Any] = field(default_factory=dict, metadata=config.REST)


@dataclass(frozen=True, kw_only=True)
class ScoresFile:
    """Everything in scores.json that is read again."""

    patients: int | None
    metrics: dict[str, MetricScores]
    folds: dict[str, dict[str, Number]]
    interval_level: float
    notes: tuple[str, ...]
    slides: int | None = None  # None if patients are predicted
    unit: str = "slide"
    calibration: CalibrationFile | None = None
    baselines: ComparisonFile | None = None
    modalities: ComparisonFile | None = None
    others: dict[str, Any] = field(default_factory=dict, metadata=config.REST)

    def __post_init__(self) -> None:
        if not 0 < self.interval_level < 1:
            raise RecipeError(f"interval_level is {self.interval_level}, and must be a share")
        if any(scores.keys() != self.metrics.keys() for scores in self.folds.values()):
            raise RecipeError("a fold has other metrics than the run")


def read_scores(folder: Path, headline: str) -> dict[str, Any]:
    """Return the scores of a run as they are in the file. It must have the headline metric."""
    path = folder / SCORES
    advice = "Restore it from a copy, or remove it and repeat the train command: it is made again."
    checked = config.load_json(path, into=ScoresFile, advice=advice)
    if headline not in checked.metrics:
        raise RunError(f"{path} is damaged (it has no {headline}). {advice}")
    return read_json(path)


def read_calibration(folder: Path) -> CalibrationFile:
    """Return the calibration of a run. Without a file, nothing is calibrated."""
    path = folder / CALIBRATION
    if not path.exists():
        return CalibrationFile()
    advice = f"Delete the file, then: caprmil calibrate {folder}"
    return config.load_json(path, into=CalibrationFile, advice=advice)
