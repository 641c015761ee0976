"""Pruning: a point is given up when its validation curve is worse than the median of the others.

What is compared is the lowest validation loss so far, as a mean over the folds so far, with that of
each finished point after as many folds and epochs. The runs themselves hold these curves, so who
trains a point can tell by the files alone, on whatever machine.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path

import numpy as np

from caprmil.errors import CaprmilError
from caprmil.experiments.sweep.plan import Point
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json, read_json
from caprmil.runs.history import Row
from caprmil.runs.run import SCORES, SPLITS

LEAST = 4  # finished points before any can be pruned
PRUNED = "pruned.json"

Curves = Sequence[Sequence[float]]
"""The validation loss of each fold so far, epoch by epoch."""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A point that was given up, and when: it is no result."""

    point: Point
    fold: str
    epoch: int
    loss: float
    median: float
    others: int

    def __str__(self) -> str:
        return (
            f"in {self.fold} after epoch {self.epoch}, with a validation loss of {self.loss:.4f}; "
            f"the median of {self.others} others was {self.median:.4f}"
        )

    def write(self, folder: Path) -> None:
        facts = {name: value for name, value in asdict(self).items() if name != "point"}
        write_text(folder / PRUNED, as_json(facts))

    @staticmethod
    def read(folder: Path, point: Point) -> "Pruned | None":
        """Return that a point was pruned before, if it was."""
        path = folder / PRUNED
        return Pruned(point=point, **read_json(path)) if path.exists() else None


class GivenUp(CaprmilError):  # noqa: N818  no error: it has done what was asked
    """Raised in the midst of a training that is given up."""

    def __init__(self, verdict: Pruned) -> None:
        super().__init__(f"Pruned {verdict}.")
        self.verdict = verdict


class Judge:
    """Hears the epochs of a point, and raises when it is worse than the median of the others."""

    def __init__(self, points: Path, point: Point, *, warmup: int) -> None:
        self.points, self.point, self.warmup = points, point, warmup
        self.others: dict[str, Curves] = {}

    def __call__(self, fold: str, row: Row) -> None:
        folder = self.points / self.point.name / "folds"
        own = [*read_curves(folder, before=fold), _losses(folder / f".{fold}.part/history.csv")]
        if len(own) == 1 and row["epoch"] < self.warmup:
            return
        self._look_around()
        loss, others = lowest(own), [level_with(own, curves) for curves in self.others.values()]
        others = [value for value in others if not np.isnan(value)]
        if len(others) >= LEAST and loss > np.median(others):
            raise GivenUp(
                Pruned(
                    point=self.point,
                    fold=fold,
                    epoch=int(row["epoch"]),
                    loss=loss,
                    median=float(np.median(others)),
                    others=len(others),
                )
            )

    def _look_around(self) -> None:
        """Read the curves of points that are finished by now."""
        for scores in self.points.glob(f"*/{SCORES}"):
            name = scores.parent.name
            if name not in self.others and name != self.point.name:
                self.others[name] = read_curves(scores.parent / "folds")


def lowest(curves: Curves) -> float:
    """Return the mean over folds of the lowest loss so far."""
    return float(np.mean([min(losses, default=nan) for losses in curves]))


def level_with(own: Curves, other: Curves) -> float:
    """Return the lowest loss of another point when it was as far; NaN if it never was.

    In a fold that was stopped early the lowest stays what it was.
    """
    if len(other) < len(own):
        return nan
    return lowest([*other[: len(own) - 1], other[len(own) - 1][: len(own[-1])]])


def read_curves(folder: Path, *, before: str | None = None) -> Curves:
    """Return the curves of the folds that are done, in order, up to one if it is named."""
    splits = read_json(folder.parent / SPLITS)["folds"]
    names: list[str] = [fold["name"] for fold in splits]
    upto = names if before is None else names[: names.index(before)]
    return [_losses(folder / name / "history.csv") for name in upto]


def _losses(path: Path) -> list[float]:
    with path.open(encoding="utf-8") as file:
        rows: list[Mapping[str, str]] = list(csv.DictReader(file))
    return [float(row["val_loss"]) for row in rows if "val_loss" in row]
