"""Pruning: the median rule, read from the files of runs; pruned points stay pruned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from caprmil.experiments.sweep.axes import Point
from caprmil.experiments.sweep.plan import Plan
from caprmil.experiments.sweep.pruning import Pruned, PruningCheck
from caprmil.experiments.sweep.runner import run_sweep
from caprmil.runs.run import Run
from caprmil.training import cross_validation as training
from caprmil.training.recipe import Recipe

pytestmark = pytest.mark.slow

EPOCHS, WARMUP, FOLDS = 5, 2, ("fold-0", "fold-1")
Curve = list[float]


def write_history(folder: Path, losses: Curve) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{epoch},{loss}" for epoch, loss in enumerate(losses)]
    (folder / "history.csv").write_text("\n".join(["epoch,val_loss", *rows]) + "\n")


def write_point(points: Path, name: str, curves: list[Curve], *, finished: bool = True) -> None:
    """Write the files of a point. If it is not finished, its last fold is being trained."""
    for fold, losses in zip(FOLDS, curves, strict=False):
        last = not finished and losses is curves[-1]
        write_history(points / name / "folds" / (f".{fold}.part" if last else fold), losses)
    parts: dict[str, Any] = {"seed": 0, "train": [], "validation": [], "test": []}
    splits: dict[str, Any] = {"patients": {}, "labels": {}, "paths": {}}
    splits["folds"] = [{"name": fold, **parts} for fold in FOLDS]
    (points / name / "splits.json").write_text(json.dumps(splits))
    if finished:
        (points / name / "scores.json").touch()


def level(curves: list[Curve]) -> float:
    """Return the mean over folds of the lowest loss."""
    return float(np.mean([min(losses) for losses in curves]))


def cut(curves: list[Curve], fold: int, epoch: int) -> list[Curve]:
    """Return the curves up to an epoch of a fold."""
    return [*curves[:fold], curves[fold][: epoch + 1]]


def expected_end(others: list[list[Curve]], own: list[Curve]) -> tuple[int, int] | None:
    """Return the fold and epoch in which the median rule stops a point, step by step."""
    lowest = np.inf
    for fold in range(len(FOLDS)):
        for epoch in range(len(own[fold])):
            lowest = min(lowest, level(cut(own, fold, epoch)))
            reached = [other for other in others if len(other[fold]) > epoch]
            levels = [level(cut(other, fold, epoch)) for other in reached]
            warm = fold > 0 or epoch >= WARMUP
            if warm and len(levels) >= 4 and lowest > np.median(levels):
                return fold, epoch
    return None


def train(points: Path, own: list[Curve]) -> Pruned | None:
    """Return how a point is pruned whose curves grow epoch by epoch."""
    check = PruningCheck(points, Point(name="new", changes={}), warmup_epochs=WARMUP)
    for fold in range(len(FOLDS)):
        for epoch in range(len(own[fold])):
            write_point(points, "new", cut(own, fold, epoch), finished=False)
            try:
                check(FOLDS[fold], {"epoch": epoch})
            except optuna.TrialPruned:
                return check.pruned
    return None


def test_a_point_is_pruned_when_it_is_worse_than_the_median(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ends = []
    for case in range(40):
        points = tmp_path / str(case)
        *others, own = [
            [rng.uniform(0.3, 0.9, rng.integers(3, EPOCHS + 1)).round(3).tolist() for _ in FOLDS]
            for _ in range(4 + case % 6)
        ]
        for number, curves in enumerate(others):
            write_point(points, f"p{number}", curves)
        write_point(points, "running", [[0.01], [0.01]], finished=False)  # it does not count
        expected, pruned = expected_end(others, own), train(points, own)
        ends.append(expected)
        if expected is None:
            assert pruned is None
        else:
            assert pruned is not None
            assert (pruned.fold, pruned.epoch) == (FOLDS[expected[0]], expected[1])
            at_end = [
                cut(other, *expected) for other in others if len(other[expected[0]]) > expected[1]
            ]
            assert pruned.others == len(at_end)
            assert pruned.median == pytest.approx(np.median([level(each) for each in at_end]))
            assert pruned.loss > pruned.median
    assert {None, 0, 1} == {end if end is None else end[0] for end in ends}


def test_a_point_that_is_resumed_counts_its_earlier_epochs(tmp_path: Path) -> None:
    for number in range(4):
        write_point(tmp_path, f"p{number}", [[0.5] * EPOCHS] * 2)
    good_start = [[0.4, 0.9, 0.9, 0.9, 0.9]]
    write_point(tmp_path, "new", good_start, finished=False)
    check = PruningCheck(tmp_path, Point(name="new", changes={}), warmup_epochs=WARMUP)
    check("fold-0", {"epoch": 4})
    assert check.pruned is None


def test_points_without_validation_are_not_compared(tmp_path: Path) -> None:
    for number in range(5):
        write_point(tmp_path, f"p{number}", [[0.5], [0.5]])
        for path in (tmp_path / f"p{number}").rglob("history.csv"):
            path.write_text("epoch,train_loss\n0,0.5\n")
    assert train(tmp_path, [[0.9] * EPOCHS] * 2) is None


def test_pruned_points_are_in_the_table_without_scores_and_are_not_trained_again(
    tiny_run: Run, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []
    verdict = {"fold": "fold-0", "epoch": 7, "loss": 0.7, "median": 0.5, "others": 4}

    def check(self: PruningCheck, fold: str, row: dict[str, float]) -> None:
        self.pruned = Pruned(point=self.point, **verdict)  # type: ignore[arg-type]
        raise optuna.TrialPruned

    def complete(recipe: Recipe, out: Path, *, on_epoch: Any, **_: object) -> Run:
        attempts.append(out.name)
        if recipe.model.settings["tokens"] == 4:
            on_epoch("fold-0", {"epoch": 7})
        return tiny_run

    monkeypatch.setattr(training, "complete", complete)
    monkeypatch.setattr(PruningCheck, "__call__", check)
    plan = Plan(recipe=tiny_recipe, axes={"model.tokens": "2,4,8"}, prune=True)
    results = run_sweep(plan, tmp_path / "out", progress=False)
    assert [point.point.name for point in results.points] == ["tokens=2", "tokens=8"]
    assert "pruned: fold-0, epoch 7" in (tmp_path / "out/sweep.md").read_text()
    assert "tokens=4" not in (tmp_path / "out/sweep.csv").read_text()
    again = run_sweep(plan, tmp_path / "out", progress=False)
    assert again.pruned == results.pruned
    assert attempts.count("tokens=4") == 1
