"""Trackers: Lightning's loggers of W&B and MLflow, with stand-ins of the two packages."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import mlflow as mlflow_logger
from lightning.pytorch.loggers import wandb as wandb_logger

from caprmil.errors import RecipeError, RunError
from caprmil.runs.run import Run
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe


class WandbRun:
    """A run of W&B: what it was made with, and what was logged to it."""

    def __init__(self, wandb: ModuleType, settings: dict[str, Any]) -> None:
        self.wandb, self.settings = wandb, settings
        self.id = settings.get("id") or f"id{len(wandb.runs)}"  # type: ignore[attr-defined]
        self.name = settings["name"]
        self.parameters: dict[str, Any] = {}
        self.rows: list[dict[str, float]] = []
        self.exit_code: int | None = None
        self.config = SimpleNamespace(update=lambda new, **_: self.parameters.update(new))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code, self.wandb.run = exit_code, None  # type: ignore[attr-defined]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in of the package wandb. It has one active run at a time, as the real one."""
    found = ModuleType("wandb")
    found.run, found.runs = None, []  # type: ignore[attr-defined]

    def init(**settings: Any) -> WandbRun:
        assert found.run is None
        found.run = WandbRun(found, settings)
        found.runs.append(found.run)
        return found.run

    found.init = init  # type: ignore[attr-defined]
    parts = {name: ModuleType(f"wandb.{name}") for name in ("sdk", "sdk.lib", "wandb_run")}
    parts["sdk.lib"].RunDisabled = type("RunDisabled", (), {})  # type: ignore[attr-defined]
    parts["wandb_run"].Run = type("Run", (), {})  # type: ignore[attr-defined]
    for name, module in {"wandb": found, **{f"wandb.{k}": v for k, v in parts.items()}}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(wandb_logger, "_WANDB_AVAILABLE", True)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return found


class MlflowException(Exception):  # noqa: N818
    """As mlflow raises it."""


MlflowException.__module__ = "mlflow.exceptions"


class MlflowClient:
    """The client of a server that keeps everything in the class."""

    runs: dict[str, dict[str, Any]]
    experiments: dict[str, str]

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def search_experiments(self, max_results: int) -> list[str]:
        if "nowhere" in self.uri:
            raise MlflowException(f"API request to {self.uri} failed\nwith many\nlines")
        return []

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return known and SimpleNamespace(experiment_id=known, lifecycle_stage="active")

    def create_experiment(self, name: str, artifact_location: Any) -> str:
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def create_run(self, experiment_id: str, tags: dict[str, str]) -> Any:
        name = f"r{len(self.runs)}"
        self.runs[name] = {"tags": tags, "params": {}, "metrics": {}, "uri": self.uri, "state": ""}
        return self.get_run(name)

    def get_run(self, name: str) -> Any:
        assert name in self.runs
        return SimpleNamespace(info=SimpleNamespace(run_id=name, experiment_id="e0"))

    def log_batch(self, run_id: str, params: Any = (), metrics: Any = ()) -> None:
        run = self.runs[run_id]
        run["params"] |= {each.key: each.value for each in params}
        for each in metrics:
            run["metrics"].setdefault(each.key, []).append(each.value)

    def set_terminated(self, run_id: str, state: str) -> None:
        self.runs[run_id]["state"] = state


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> type[MlflowClient]:
    """A stand-in of the package mlflow."""
    client = type("Client", (MlflowClient,), {"runs": {}, "experiments": {}})
    names = {
        "mlflow": {"set_tracking_uri": lambda _: None},
        "mlflow.tracking": {"MlflowClient": client},
        "mlflow.tracking.context": {},
        "mlflow.tracking.context.registry": {"resolve_tags": lambda tags: tags},
        "mlflow.entities": {"Param": SimpleNamespace, "Metric": SimpleNamespace},
        "mlflow.utils": {},
        "mlflow.utils.mlflow_tags": {"MLFLOW_RUN_NAME": "mlflow.runName"},
    }
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(mlflow_logger, "_MLFLOW_AVAILABLE", True)
    monkeypatch.setattr(mlflow_logger, "_get_resolve_tags", lambda: lambda tags: tags)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return client


def train(recipe: Recipe, out: Path, loggers: dict[str, Any], **changes: Any) -> Run:
    settings = replace(recipe.train, epochs=2, warmup_epochs=1)
    splits = replace(recipe.splits, folds=2)
    recipe = replace(recipe, train=settings, splits=splits, loggers=loggers, **changes)
    return cross_validate(recipe, out, device="cpu", progress=False, score=False)


def test_each_fold_is_a_run_of_wandb_with_recipe_and_test_scores(
    tiny_recipe: Recipe, tmp_path: Path, wandb: Any
) -> None:
    run = train(tiny_recipe, tmp_path / "first", {"WandbLogger": {"entity": "lab"}})
    assert [each.name for each in wandb.runs] == ["first/fold-0", "first/fold-1"]
    for each, fold in zip(wandb.runs, run.splits, strict=True):
        assert each.settings["group"] == "first"
        assert (each.settings["project"], each.settings["entity"]) == ("caprmil", "lab")
        assert each.parameters["model.dim"] == 16
        assert each.parameters["fold"] == fold.name
        assert not any(name.startswith("loggers") for name in each.parameters)
        losses = [row["val_loss"] for row in each.rows if "val_loss" in row]
        assert len(losses) == 2
        test = {name: value for row in each.rows for name, value in row.items() if "test/" in name}
        expected = run.read_predictions(run.fold_folder(fold.name) / "test.csv").scores()
        assert test["test/auc"] == pytest.approx(expected["auc"])
        assert each.exit_code == 0
    assert wandb.run is None


def test_a_fold_that_failed_is_marked_and_resumed_as_the_same_run(
    tiny_recipe: Recipe, tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caprmil.training import fold_worker

    def stop(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(fold_worker, "complete_target", stop)
        with pytest.raises(ZeroDivisionError):
            train(tiny_recipe, tmp_path / "first", {"WandbLogger": {}})
    assert [(each.id, each.exit_code) for each in wandb.runs] == [("id0", 1)]
    assert wandb.run is None
    train(tiny_recipe, tmp_path / "first", {"WandbLogger": {}})
    assert [each.id for each in wandb.runs] == ["id0", "id0", "id2"]


def test_a_run_of_the_user_is_not_taken(tiny_recipe: Recipe, tmp_path: Path, wandb: Any) -> None:
    own = wandb.init(name="mine")
    with pytest.raises(RunError, match=r"wandb\.finish\(\)"):
        train(tiny_recipe, tmp_path / "first", {"WandbLogger": {}})
    assert own.exit_code is None


def test_each_fold_is_a_run_of_mlflow_with_tags_of_its_group(
    tiny_recipe: Recipe, tmp_path: Path, mlflow: type[MlflowClient]
) -> None:
    tags = {"MLFlowLogger": {"tags": {"ward": "3"}}}
    run = train(tiny_recipe, tmp_path / "first", tags)
    assert [*mlflow.experiments] == ["caprmil"]
    assert len(mlflow.runs) == 2
    for each, fold in zip(mlflow.runs.values(), run.splits, strict=True):
        assert each["tags"] == {
            "mlflow.runName": f"first/{fold.name}",
            "caprmil.run": "first",
            "caprmil.fold": fold.name,
            "ward": "3",
        }
        assert each["uri"] == f"sqlite:///{tmp_path / 'first' / 'mlflow.db'}"
        assert each["params"]["train.epochs"] == "2"
        expected = run.read_predictions(run.fold_folder(fold.name) / "test.csv").scores()
        assert each["metrics"]["test/auc"] == [pytest.approx(expected["auc"])]
        assert len(each["metrics"]["val_loss"]) == 2
        assert each["state"] == "FINISHED"


def test_a_wrong_address_is_one_line_before_anything_is_written(
    tiny_recipe: Recipe, tmp_path: Path, mlflow: type[MlflowClient]
) -> None:
    loggers = {"MLFlowLogger": {"tracking_uri": "http://me:secret@nowhere:5000"}}
    with pytest.raises(RunError) as found:
        train(tiny_recipe, tmp_path / "first", loggers)
    text = str(found.value)
    assert "MLFlowLogger does not work at http://nowhere:5000" in text
    assert "\n" not in text
    assert "secret" not in text
    assert not (tmp_path / "first").exists()


def test_a_tracker_that_fails_in_training_is_one_line(
    tiny_recipe: Recipe, tmp_path: Path, mlflow: type[MlflowClient]
) -> None:
    def fail(*_: object, metrics: Any = (), **__: object) -> None:
        if metrics:
            raise MlflowException("the server is gone")

    mlflow.log_batch = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(RunError, match=r"the server is gone\. .* the same command resumes"):
        train(tiny_recipe, tmp_path / "first", {"MLFlowLogger": {"tracking_uri": "http://here"}})


def test_an_error_of_training_stays_one(
    tiny_recipe: Recipe, tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match="MLFlowLogger cannot be made"):
        train(tiny_recipe, tmp_path / "first", {"MLFlowLogger": {"colour": "red"}})
