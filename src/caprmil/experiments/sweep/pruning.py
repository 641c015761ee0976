"""Pruning: Optuna's MedianPruner on the validation losses that runs keep.

A worker reads the losses of finished points from their runs. So pruning needs no messages between
workers, and works on every machine that sees the folder of the sweep.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import numpy as np
import optuna
from optuna.pruners import MedianPruner

from caprmil import config
from caprmil.experiments.sweep import PRUNED
from caprmil.experiments.sweep.axes import Point
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.runs.history import HISTORY, Row, read_history
from caprmil.runs.scores import SCORES
from caprmil.runs.splits import read_splits

MIN_POINTS = 4  # finished points, before one can be pruned
STEPS_PER_FOLD = 100_000  # more than epochs: a step stands for the same fold and epoch everywhere

Losses: TypeAlias = Sequence[Sequence[float]]
"""The validation loss of each fold so far, by epoch."""


@dataclass(frozen=True, kw_only=True)
class PruningRecord:
    """In which fold a point was stopped, after which epoch, and why: pruned.json."""

    fold: str
    epoch: int
    loss: float
    median: float
    others: int


@dataclass(frozen=True, kw_only=True)
class Pruned(PruningRecord):
    """A point that was stopped early."""

    point: Point

    def __str__(self) -> str:
        return (
            f"in {self.fold} after epoch {self.epoch}, with a validation loss of {self.loss:.4f}; "
            f"the median of {self.others} others was {self.median:.4f}"
        )

    def write(self, folder: Path) -> None:
        fields = {name: value for name, value in asdict(self).items() if name != "point"}
        write_text(folder / PRUNED, as_json(fields))

    @staticmethod
    def read(folder: Path, point: Point) -> "Pruned | None":
        """Return how a point was pruned before, or None."""
        path = folder / PRUNED
        if not path.exists():
            return None
        advice = "Remove it: the point is then trained to its end."
        found = config.load_json(path, into=PruningRecord, advice=advice)
        return Pruned(point=point, **asdict(found))


class PruningCheck:
    """A callback for every epoch of a point. It raises optuna.TrialPruned to stop the training."""

    def __init__(self, points: Path, point: Point, *, warmup_epochs: int) -> None:
        self.points, self.point = points, point
        self.pruned: Pruned | None = None
        self.read: set[str] = {point.name}
        pruner = MedianPruner(MIN_POINTS, warmup_epochs, n_min_trials=MIN_POINTS)
        self.study = optuna.create_study(direction="minimize", pruner=pruner)
        self.trial = self.study.ask()
        self.reported: dict[int, float] = {}

    def __call__(self, fold: str, row: Row) -> None:
        folder = self.points / self.point.name / "folds"
        losses = [*read_losses(folder, before=fold), _losses(folder / f".{fold}.part")]
        for step, loss in reported_values(losses).items():
            if step not in self.reported:
                self.reported[step] = loss
                self.trial.report(loss, step)
        self._add_finished_points()
        if self.trial.should_prune():
            self.pruned = self._describe(fold, int(row["epoch"]))
            raise optuna.TrialPruned(f"Pruned {self.pruned}.")

    def _add_finished_points(self) -> None:
        """Add the points that have finished by now to the study."""
        for scores in self.points.glob(f"*/{SCORES}"):
            if scores.parent.name not in self.read:
                self.read.add(scores.parent.name)
                values = reported_values(read_losses(scores.parent / "folds"))
                if values:
                    finished = optuna.create_trial(
                        value=list(values.values())[-1], intermediate_values=values
                    )
                    self.study.add_trial(finished)

    def _describe(self, fold: str, epoch: int) -> Pruned:
        step = max(self.reported)
        finished = self.study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
        others = [t.intermediate_values[step] for t in finished if step in t.intermediate_values]
        return Pruned(
            point=self.point,
            fold=fold,
            epoch=epoch,
            loss=min(self.reported.values()),
            median=float(np.median(others)),
            others=len(others),
        )


def reported_values(losses: Losses) -> dict[int, float]:
    """Return what is reported to Optuna after each epoch of each fold, by step.

    It is the mean over the folds so far of the lowest loss so far in each.
    """
    values: dict[int, float] = {}
    finished: list[float] = []
    for number, fold in enumerate(losses):
        for epoch, lowest in enumerate(accumulate(fold, min)):
            values[STEPS_PER_FOLD * number + epoch] = float(np.mean([*finished, lowest]))
        finished += [min(fold)] if fold else []
    return values


def read_losses(folder: Path, *, before: str | None = None) -> Losses:
    """Return the losses of the folds in order: of all, or of those before one."""
    names = [fold.name for fold in read_splits(folder.parent).folds]
    names = names if before is None else names[: names.index(before)]
    return [_losses(folder / name) for name in names]


def _losses(fold: Path) -> list[float]:
    return read_history(fold / HISTORY).get("val_loss", [])
