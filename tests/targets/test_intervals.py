"""Intervals of a regression: losses, metrics and columns, against SciPy, scikit-learn and loops."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import norm
from sklearn.metrics import mean_pinball_loss
from small_cohorts import CELLS, write_cohort

from caprmil import config, explain, report
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CohortError, RecipeError
from caprmil.estimators import MILRegressor
from caprmil.evaluation.comparison import compare
from caprmil.evaluation.predictions import Predictions
from caprmil.explain.explanation_folder import write_explanation
from caprmil.targets import Regression
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from quick_scoring import quick_scoring

LABELS = np.random.default_rng(0).normal(50, 10, size=40)
ENDS = np.random.default_rng(1).normal(50, 10, size=(40, 2))
ANSWERS = np.concatenate([LABELS[:, None] + 1, np.sort(ENDS, axis=1)], axis=1)


def fitted(**settings: Any) -> Regression:
    return Regression(**settings).fit(LABELS.tolist())


def standardised() -> torch.Tensor:
    return torch.from_numpy((LABELS - LABELS.mean()) / LABELS.std())


def test_without_uncertainty_settings_outputs_and_loss_are_those_of_before() -> None:
    assert config.as_table(Regression()) == {"loss": "huber", "mean": 0.0, "std": 1.0}
    target, outputs = fitted(), torch.randn(40, 1, dtype=torch.float64)
    assert (target.n_outputs, target.columns) == (1, ("predicted",))
    found = target.criterion([])(outputs, torch.from_numpy(LABELS))
    assert found.equal(F.huber_loss(outputs.squeeze(-1), standardised()))
    assert target.answer(outputs).equal(outputs * target.std + target.mean)


def test_the_gaussian_loss_is_the_likelihood_and_the_interval_that_of_the_normal() -> None:
    target, outputs = fitted(uncertainty="gaussian", level=0.8), torch.randn(40, 2).double()
    value, spread = outputs[:, 0].numpy(), np.exp(outputs[:, 1].numpy() / 2)
    expected = -norm.logpdf(standardised().numpy(), value, spread) - np.log(2 * np.pi) / 2
    found = target.criterion([])(outputs, torch.from_numpy(LABELS))
    assert float(found) == pytest.approx(expected.mean())
    ends = np.stack(norm.interval(0.8, value, spread), axis=1) * target.std + target.mean
    np.testing.assert_allclose(target.answer(outputs)[:, 1:], ends)


def test_the_quantile_loss_is_that_of_the_value_and_two_pinball_losses() -> None:
    target, outputs = fitted(uncertainty="quantile"), torch.randn(40, 3).double()
    outputs.requires_grad_()
    truth = standardised()
    answers = (target.answer(outputs).detach().numpy() - target.mean) / target.std
    assert (np.diff(answers[:, [1, 0, 2]], axis=1) > 0).all()
    expected = F.huber_loss(outputs[:, 0], truth).item() + sum(
        mean_pinball_loss(truth.numpy(), answers[:, column], alpha=alpha)
        for column, alpha in ((1, 0.05), (2, 0.95))
    )
    found = target.criterion([])(outputs, torch.from_numpy(LABELS))
    assert found.item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(found, outputs)
    (alone,) = torch.autograd.grad(F.huber_loss(outputs[:, 0], truth), outputs)
    torch.testing.assert_close(gradient[:, 0], alone[:, 0])  # the ends do not pull at the value


def test_coverage_and_interval_score_are_those_of_a_naive_loop() -> None:
    target = Regression(uncertainty="quantile", level=0.8)
    inside, total = 0, 0.0
    for label, (_, low, high) in zip(LABELS, ANSWERS, strict=True):
        inside += low <= label <= high
        total += high - low
        total += 10 * (low - label) if label < low else 0
        total += 10 * (label - high) if label > high else 0
    scores = target.score(LABELS, ANSWERS)
    assert scores["coverage"] == inside / 40
    assert scores["interval_score"] == pytest.approx(total / 40)
    ones = np.ones((1, 40))
    for name in ("coverage", "interval_score"):
        metric = target.metrics[name]
        assert metric.draws(LABELS, ANSWERS, ones)[0] == pytest.approx(scores[name])
    assert "coverage" not in Regression().metrics


def table(target: Regression, answers: np.ndarray) -> Predictions:
    names = tuple(f"s{n}" for n in range(40))
    return Predictions(slides=names, target=target, answers=answers, labels=LABELS, patients=names)


def test_a_table_with_intervals_reads_back_with_its_level(tmp_path: Path) -> None:
    written = table(Regression(uncertainty="gaussian", level=0.95), ANSWERS)
    read = Predictions.read(written.write(tmp_path / "p.csv"))
    assert read.target.columns == ("predicted", "low_95", "high_95")
    np.testing.assert_array_equal(read.answers, ANSWERS)
    assert read.scores() == written.scores()
    frame = pd.read_csv(tmp_path / "p.csv")
    frame[["low_95", "high_95"]] = frame[["high_95", "low_95"]]
    with pytest.raises(CohortError, match="below its start"):
        Predictions.read(frame)


def test_values_are_compared_also_if_only_one_table_has_intervals() -> None:
    tables = {
        "intervals": table(Regression(uncertainty="quantile"), ANSWERS),
        "values": table(Regression(), ANSWERS[:, :1] + 1),
    }
    for names in (["intervals", "values"], ["values", "intervals"]):
        found = compare({name: tables[name] for name in names}, draws=20)
        by_name = {d.metric: d for d in found.differences}
        assert "coverage" not in by_name
        assert by_name["mae"].difference == pytest.approx(-1 if names[0] == "intervals" else 1)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RecipeError, match="must be none, gaussian, quantile"):
        Regression(uncertainty="bayes")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="level is a share between 0 and 1"):
        Regression(level=90)
    with pytest.raises(RecipeError, match="There are no intervals"):
        MILRegressor().predict_interval([])


@pytest.mark.slow
@pytest.mark.parametrize("uncertainty", ["gaussian", "quantile"])
def test_intervals_are_wide_where_the_labels_are_noisy(uncertainty: Any) -> None:
    """The noise of a label is 1 or 8, by a feature of its bag."""
    rng = np.random.default_rng(0)
    noisy = rng.random(600) < 0.5
    values = rng.uniform(-10, 10, size=600)
    rows = np.stack([values / 5, noisy], axis=1).astype(np.float32)
    bags = [np.stack([row, row]) for row in rows]
    labels = values + np.where(noisy, 8, 1) * rng.normal(size=600)
    options: dict[str, Any] = {"epochs": 30, "lr": 1e-2, "warmup_epochs": 0, "batch_size": 16}
    model = MILRegressor("mean", uncertainty=uncertainty, settings={"dim": 16}, **options)
    ends = model.fit(bags[:400], labels[:400]).predict_interval(bags[400:])
    inside = (ends[:, 0] <= labels[400:]) & (labels[400:] <= ends[:, 1])
    assert 0.82 < inside.mean() < 0.97
    widths = ends[:, 1] - ends[:, 0]
    assert widths[noisy[400:]].mean() > 3 * widths[~noisy[400:]].mean()


@pytest.mark.slow
def test_a_run_with_intervals_is_explained_by_its_value_and_reported(tmp_path: Path) -> None:
    labels = write_cohort(tmp_path, CELLS["regression"])
    recipe = Recipe(
        cohort=str(labels),
        features=str(tmp_path / "features"),
        target=Regression(uncertainty="quantile"),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=2, warmup_epochs=0, lr=1e-2),
        loggers={},
    )
    with quick_scoring():
        run = cross_validate(recipe, tmp_path / "run", device="cpu", progress=False)
    explained = explain.explain_slide(run, explain.locate_slide(run, "slide_003"), device="cpu")
    found, target = explained.explanation, run.fold_target(explained.explanation.fold)
    (contrast,) = target.contrasts
    total = float(contrast.of(found.logits.astype(float)))
    terms = found.evidence_for(0).astype(float).sum() + float(contrast.of(found.rest.astype(float)))
    assert terms == pytest.approx(total, abs=1e-4)
    assert target.answer(torch.from_numpy(found.logits).double())[0] == pytest.approx(
        total + target.mean  # type: ignore[attr-defined]
    )
    (tmp_path / "explained").mkdir()
    write_explanation(tmp_path / "explained", explained, run)
    outputs = json.loads((tmp_path / "explained" / "explanation.json").read_text())["explained"]
    assert list(outputs["logits"]) == list(target.output_names)
    page = report.slide_report(run, explained)
    assert "90 % interval" in page
    assert {"low_90", "high_90"} <= set(run.predictions.to_frame().columns)
