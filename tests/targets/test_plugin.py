"""A model, a metric and a target of another package, with only what CONTRIBUTING.md names."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
from small_cohorts import write_cohort
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.errors import CaprmilError
from caprmil.models import MODELS
from caprmil.runs.run import Run
from caprmil.targets import METRICS, TARGETS, Regression, Target, register_target
from quick_scoring import quick_scoring

PLUGIN = '''
"""Ki-67 as a number on a logarithmic scale, a model of the largest patch, and a metric."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from caprmil.models import MILModel, Output, register_model
from caprmil.targets import Contrast, Metric, Regression, register_metric, register_target


@register_model("largest")
class Largest(MILModel):
    """A linear layer per patch, and the patch with the largest first unit."""

    def __init__(self, in_dim, n_outputs, *, dim=8):
        super().__init__(in_dim, n_outputs, dim=dim)
        self.project = nn.Linear(in_dim, dim)
        self.predict = nn.Linear(dim, n_outputs)

    def forward_bags(self, features, mask, grid):
        patches = self.project(features).masked_fill(~mask[..., None], -torch.inf)
        first = patches[..., 0].argmax(dim=1)
        embedding = patches[torch.arange(len(patches)), first]
        attention = nn.functional.one_hot(first, patches.shape[1]).to(embedding.dtype)
        return Output(logits=self.predict(embedding), embedding=embedding, attention=attention)


@register_target("log_regression")
@dataclass(frozen=True, kw_only=True)
class LogRegression(Regression):
    """A positive number per slide, predicted on a logarithmic scale."""

    headline = "within"

    def fit(self, labels):
        return super().fit(np.log(labels))

    def criterion(self, labels):
        loss = super().criterion(labels)
        return lambda outputs, values: loss(outputs, values.log())

    def answer(self, outputs):
        return super().answer(outputs).exp()

    @property
    def contrasts(self):
        return (Contrast(name="a higher logarithm", of=lambda outputs: outputs[..., 0] * self.std),)


def within(labels, answers):
    """Return the share of predictions within 20 % of the label."""
    return float(np.mean(np.abs(answers[:, 0] / labels - 1) < 0.2))


register_metric(
    "log_regression", Metric(name="within", title="Within 20 %", function=within)
)
'''

RECIPE = """
cohort = "{folder}/labels.csv"
features = "{folder}/features"
loggers = {{}}

[target]
kind = "log_regression"
loss = "l2"

[model]
name = "largest"
dim = 8

[splits]
folds = 2
validation = 0.25

[train]
epochs = 1
warmup_epochs = 0
lr = 0.01
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The plugin, imported as in a user's script."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "my_plugin.py").write_text(PLUGIN)
    with patch.dict(MODELS), patch.dict(TARGETS), patch.dict(METRICS), quick_scoring():
        sys.path.insert(0, str(folder))
        yield importlib.import_module("my_plugin")
        sys.path.remove(str(folder))
        del sys.modules["my_plugin"]


@pytest.fixture(scope="module")
def run(plugin: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the plugin's model and target."""
    folder = tmp_path_factory.mktemp("cohort")
    write_cohort(folder, lambda share: f"{np.exp(1 + 3 * share):.3f}")
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder.as_posix()))
    caprmil("train", folder / "recipe.toml", "--out", folder / "run", "--device", "cpu")
    return Run(folder / "run")


def caprmil(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_is_trained_and_scored_with_the_plugin(plugin: ModuleType, run: Run) -> None:
    assert type(run.target) is type(run.predictions.target) is plugin.LogRegression
    assert type(run.model("fold-0")) is plugin.Largest
    assert list(run.scores["metrics"]) == ["r2", "mae", "pearson", "spearman", "within"]
    labels, answers = run.predictions.truth
    shares = np.abs(answers[:, 0] - labels) < 0.2 * labels
    assert run.scores["metrics"]["within"]["all_slides_pooled"] == shares.mean()
    assert (answers > 0).all()


def test_the_target_is_fitted_to_the_logarithm_of_the_training_labels(run: Run) -> None:
    train = [float(run.labels[name]) for name in run.splits[0].train]
    target = run.fold_target("fold-0")
    assert isinstance(target, Regression)
    assert target.mean == pytest.approx(np.log(train).mean())


def test_a_run_of_the_plugin_is_evaluated_and_compared(run: Run) -> None:
    assert "within" in caprmil("evaluate", run.folder)
    output = caprmil("compare", run.folder)  # with its baselines, by the plugin's metric
    assert "metric: within" in output


def test_a_run_of_the_plugin_is_reported(run: Run, tmp_path: Path) -> None:
    caprmil("report", run.folder, "--out", tmp_path / "report", "--slides", 1)
    text = (tmp_path / "report" / "index.html").read_text()
    assert "Within 20 %" in text
    assert "log_regression" in text
    slide = next((tmp_path / "report" / "slides").iterdir()).read_text()
    assert "Evidence for a higher logarithm and against a higher logarithm" in slide


def test_without_the_plugin_its_run_is_refused(run: Run) -> None:
    with patch.dict(TARGETS):
        del TARGETS["log_regression"]
        with pytest.raises(CaprmilError, match="log_regression"):
            Run(run.folder)


def test_contributing_md_names_everything_that_the_plugin_uses() -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    used = ["register_model", "register_metric", "register_target", "MILModel", "forward_bags"]
    for name in (*used, "Metric"):
        assert name in PLUGIN
        assert name in page


def test_a_name_is_registered_once(plugin: ModuleType) -> None:
    with pytest.raises(ValueError, match="already a target called 'regression'"):
        register_target("regression")(type("Other", (Target,), {}))
