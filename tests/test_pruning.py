"""What pruning promises: the verdict of Optuna's median, by the files of runs alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest

from caprmil.experiments.sweep import Plan, Point, Pruned, sweep
from caprmil.experiments.sweep.pruning import GivenUp, Judge
from caprmil.runs.run import Run
from caprmil.training import cross_validation as training
from caprmil.training.recipe import Recipe

EPOCHS = 6


def write_history(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{epoch},{loss}" for epoch, loss in enumerate(losses)]
    (folder / "history.csv").write_text("\n".join(["epoch,val_loss", *rows]) + "\n")


def write_point(points: Path, name: str, losses: list[float], *, finished: bool = True) -> None:
    fold = "fold-0" if finished else ".fold-0.part"
    write_history(points / name / "folds" / fold, losses)
    (points / name / "splits.json").write_text(json.dumps({"folds": [{"name": "fold-0"}]}))
    if finished:
        (points / name / "scores.json").touch()


def by_optuna(others: list[list[float]], losses: list[float]) -> int | None:
    """Return the epoch in which Optuna's median prunes, told the lowest loss so far."""
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(4, 2))
    for curve in others:
        values = dict(enumerate(np.minimum.accumulate(curve).tolist()))
        study.add_trial(optuna.create_trial(value=min(curve), intermediate_values=values))
    trial = study.ask()
    for epoch, loss in enumerate(np.minimum.accumulate(losses).tolist()):
        trial.report(loss, epoch)
        if trial.should_prune():
            return epoch
    return None


def by_us(points: Path, losses: list[float]) -> int | None:
    judge = Judge(points, Point(name="new", changes={}), warmup=2)
    for epoch in range(EPOCHS):
        write_point(points, "new", losses[: epoch + 1], finished=False)
        try:
            judge("fold-0", {"epoch": epoch})
        except GivenUp as end:
            return end.verdict.epoch
    return None


def test_a_point_is_pruned_when_optunas_median_would(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    found = []
    for case in range(30):
        *others, own = rng.uniform(0.3, 0.9, (3 + case % 5, EPOCHS)).round(3).tolist()
        points = tmp_path / str(case)
        for number, curve in enumerate(others):
            write_point(points, f"p{number}", curve)
        found.append(by_us(points, own))
        assert found[-1] == by_optuna(others, own)
    assert None in found
    assert len(set(found)) > 2


def test_pruned_points_are_in_the_table_but_are_no_results_and_are_not_trained_again(
    tiny_run: Run, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def complete(recipe: Recipe, out: Path, **_: object) -> Run:
        tried.append(out.name)
        if recipe.model.settings["tokens"] == 4:
            point = Point(name=out.name, changes={"model.tokens": "4"})
            facts = {"fold": "fold-0", "epoch": 7, "loss": 0.7, "median": 0.5, "others": 4}
            raise GivenUp(Pruned(point=point, **facts))  # type: ignore[arg-type]
        return tiny_run

    monkeypatch.setattr(training, "complete", complete)
    plan = Plan(recipe=replace(tiny_recipe), axes={"model.tokens": "2,4,8"}, prune=True)
    found = sweep(plan, tmp_path / "out", progress=False)
    assert [result.point.name for result in found.results] == ["tokens=2", "tokens=8"]
    assert "pruned: fold-0, epoch 7" in (tmp_path / "out/sweep.md").read_text()
    assert "tokens=4" not in (tmp_path / "out/sweep.csv").read_text()
    again = sweep(plan, tmp_path / "out", progress=False)
    assert again.pruned == found.pruned
    assert tried.count("tokens=4") == 1
