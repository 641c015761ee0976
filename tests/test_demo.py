"""The demo: it runs, it does nothing twice, and the paper's story comes out."""

from pathlib import Path

import numpy as np
import pytest

from caprmil import demo
from caprmil.synthetic import RareSignal


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "COHORT", RareSignal(slides=20, width=16, patches=(10, 20)))
    quick = {"splits": {"folds": 2}, "train": {"epochs": 2, "warmup_epochs": 1}}
    monkeypatch.setattr(demo, "SETTINGS", quick)


@pytest.mark.usefixtures("small")
def test_the_demo_scores_three_models_and_draws_them(tmp_path: Path) -> None:
    results = demo.demo(tmp_path, progress=False)
    assert [result.name for result in results] == ["Mean", "ABMIL", "CAPRMIL + Mean"]
    assert all(len(result.folds("auc")) == 2 for result in results)
    assert (tmp_path / "demo.png").stat().st_size > 1000


@pytest.mark.usefixtures("small")
def test_a_demo_that_is_finished_is_not_done_again(tmp_path: Path) -> None:
    demo.demo(tmp_path, progress=False)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    demo.demo(tmp_path, progress=False)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_plain_averaging_loses_a_rare_signal_and_context_finds_it(tmp_path: Path) -> None:
    aucs = {result.name: np.mean(result.folds("auc")) for result in demo.demo(tmp_path)}
    assert aucs["Mean"] < 0.7
    assert aucs["ABMIL"] > 0.9
    assert aucs["CAPRMIL + Mean"] > 0.9
