"""Regression: metrics against scikit-learn and SciPy, labels, loss, and its parts of a report."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import mean_absolute_error, r2_score

from caprmil import MILRegressor
from caprmil.errors import CohortError, RecipeError
from caprmil.evaluation.predictions import Predictions
from caprmil.evaluation.score_summary import summary
from caprmil.explain.faithfulness import DeletionCurves, panels
from caprmil.io.findings import Findings
from caprmil.report.prediction_parts import how_many
from caprmil.report.strip_chart import Axis
from caprmil.report.text_format import decimals, fixed, number, signed_fixed
from caprmil.report.value_parts import ValueParts
from caprmil.synthetic import GradedBags
from caprmil.targets import Classification, Regression
from caprmil.targets.metric import bootstrap

MARGIN = 0.05  # of R2, below the oracle
COHORT = GradedBags(slides=320, patches=30, width=4, seed=4)

METRICS = Regression().metrics
REFERENCES = {
    "mae": mean_absolute_error,
    "r2": r2_score,
    "pearson": lambda labels, found: pearsonr(labels, found).statistic,
    "spearman": lambda labels, found: spearmanr(labels, found).statistic,
}


def numbers(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels with ties, and predictions that follow them in part."""
    rng = np.random.default_rng(seed)
    labels = np.round(rng.normal(50, 10, size=n))
    return labels, (labels + rng.normal(0, 8, size=n))[:, None]


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=20, deadline=None)
@given(n=st.integers(3, 60), seed=st.integers(0, 10**6))
def test_a_metric_is_that_of_another_library(name: str, n: int, seed: int) -> None:
    labels, answers = numbers(n, seed)
    if len(set(labels)) > 1:
        expected = REFERENCES[name](labels, answers[:, 0])
        assert METRICS[name].function(labels, answers) == pytest.approx(expected, abs=1e-12)


def test_every_metric_has_a_reference() -> None:
    assert set(METRICS) == set(REFERENCES)


def test_undefined_metrics_are_nan() -> None:
    same, spread = np.ones(4), np.arange(4.0)[:, None]
    for name in ("r2", "pearson", "spearman"):
        assert np.isnan(METRICS[name].function(same, spread))
        assert np.isnan(METRICS[name].function(same[:1], spread[:1]))
    for name in ("pearson", "spearman"):  # of predictions that are all equal
        assert np.isnan(METRICS[name].function(np.arange(4.0), np.ones((4, 1))))


@pytest.mark.parametrize("name", REFERENCES)
def test_an_interval_is_the_percentiles_of_a_naive_bootstrap_of_patients(name: str) -> None:
    labels, answers = numbers(30, 5)
    patients = [f"p{n % 12}" for n in range(30)]
    (found,) = bootstrap(labels, answers, patients, [METRICS[name]], draws=60, seed=7).values()
    rng, unique = np.random.default_rng(7), sorted(set(patients))
    values = []
    for _ in range(60):
        drawn = [unique[n] for n in rng.integers(len(unique), size=len(unique))]
        rows = [row for patient in drawn for row in range(30) if patients[row] == patient]
        values.append(REFERENCES[name](labels[rows], answers[rows, 0]))
    assert tuple(found) == pytest.approx(np.quantile(values, [0.025, 0.975]), abs=1e-9)


@pytest.mark.parametrize("name", REFERENCES)
def test_draws_scored_together_equal_draws_scored_one_by_one(name: str) -> None:
    labels, answers = numbers(12, 3)
    weights = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=30).astype(float)
    weights[:4] = np.eye(12)[:4] * 3  # the same slide three times
    weights[4] = 0
    found = METRICS[name].draws(labels, answers, weights)
    plain = replace(METRICS[name], weighted=None).draws(labels, answers, weights)
    np.testing.assert_allclose(found, plain, atol=1e-12)


def test_r2_of_equal_labels_is_nan_also_if_their_mean_is_rounded() -> None:
    labels, answers = np.full(3, 0.1), np.arange(3.0)[:, None]  # their mean is not 0.1
    for name in ("r2", "pearson", "spearman"):
        assert np.isnan(METRICS[name].function(labels, answers))
        assert np.isnan(METRICS[name].draws(labels, answers, np.ones((1, 3)))).all()


def test_a_summary_has_all_metrics_with_their_intervals() -> None:
    labels, answers = numbers(40, 2)
    table = Predictions(
        slides=tuple(f"s{n}" for n in range(40)),
        target=Regression(),
        answers=answers,
        labels=labels,
        folds=("a",) * 20 + ("b",) * 20,
    )
    found = summary(table, draws=50)
    halves = [r2_score(labels[part], answers[part, 0]) for part in (slice(20), slice(20, 40))]
    assert found.metrics["r2"].mean_over_folds == pytest.approx(np.mean(halves))
    assert all(metric.interval is not None for metric in found.metrics.values())


@pytest.mark.parametrize("loss", ["l1", "l2", "huber"])
def test_the_loss_is_that_of_standardised_labels(loss: str) -> None:
    target = Regression(loss=loss).fit([10.0, 20.0, 60.0])
    values, outputs = torch.tensor([15.0, 80.0]), torch.tensor([[0.3], [-0.2]])
    errors = outputs[:, 0] - (values - 30) / np.std([10, 20, 60])
    huber = torch.where(errors.abs() < 1, errors**2 / 2, errors.abs() - 0.5)
    expected = {"l1": errors.abs(), "l2": errors**2, "huber": huber}[loss].mean()
    found = target.criterion([10.0, 20.0, 60.0])(outputs, values)
    torch.testing.assert_close(found, expected)


def test_an_answer_is_in_the_units_of_the_labels() -> None:
    target = Regression().fit([10.0, 20.0, 60.0])
    found = target.answer(torch.tensor([[0.0], [1.0]]))
    assert found.flatten().tolist() == pytest.approx([30, 30 + np.std([10, 20, 60])])


def test_labels_that_are_not_numbers_are_named() -> None:
    found = Findings()
    cells = {"a": "1.5", "b": "high", "c": "", "d": "inf"}
    _, labels = Regression().read(cells, "age", found, required=True)
    assert labels == {"a": 1.5}
    assert "without a label (2): c, d (inf)" in " ".join(found.problems)
    assert "not a number (1): b (high)" in " ".join(found.problems)


def test_folds_are_balanced_by_quarters_of_the_labels() -> None:
    codes, names = Regression().strata({f"s{n}": float(n) for n in range(8)})
    assert list(codes.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(names) == 4
    two, names = Regression().strata({"a": 1.0, "b": 1.0, "c": 1.0, "d": 2.0})
    assert set(two.values()) <= set(range(len(names)))


@pytest.mark.parametrize("zeros", [3, 5, 8])
def test_no_stratum_is_empty_where_many_labels_are_equal(zeros: int) -> None:
    codes, names = Regression().strata({f"s{n}": float(max(0, n - zeros)) for n in range(9)})
    assert set(codes.values()) == set(range(len(names)))
    assert codes["s0"] == 0


def test_the_scale_of_the_labels_cannot_be_set() -> None:
    with pytest.raises(RecipeError, match="cannot be set"):
        Regression(std=2.0).read({"a": "1", "b": "2"}, "age", Findings(), required=True)


def test_an_unknown_loss_and_a_prediction_that_is_not_a_number_are_refused() -> None:
    with pytest.raises(RecipeError, match="must be l1, l2 or huber"):
        Regression(loss="l3")  # type: ignore[arg-type]
    with pytest.raises(CohortError, match="s2: nan is not a predicted number"):
        Regression().check_answers(np.array([[1.0], [np.nan]]), ["s1", "s2"])


def test_a_wrong_label_in_a_table_of_predictions_is_named_once(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    table.write_text("slide,label,predicted\na,high,1\n")
    with pytest.raises(CohortError, match="line 2: label 'high' is not a number") as problem:
        Predictions.read(table)
    assert str(problem.value).count("found.csv") == 1


# Numbers in reports


def test_numbers_are_shown_with_significant_decimals() -> None:
    assert [decimals(s) for s in (0.012, 0.5, 12.0, 900.0, 1e5, 0.0)] == [4, 3, 1, 0, 0, None]
    assert [fixed(value, 1) for value in (41.98, -0.04, -3.25, 12345.6)] == [
        *("42.0", "0.0", "−3.2", "12,345.6")
    ]
    assert [signed_fixed(value, 1) for value in (2.0, 0.01, -2.0)] == ["+2.0", "0.0", "−2.0"]
    assert [number(v) for v in (0.0, 12.3456, -1e-6, 123456.0)] == [
        *("0", "12.35", "−1.00e-06", "123,456")
    ]


def test_counts_are_written_in_words() -> None:
    assert how_many(np.array([True, False, False, True])) == "2 of 4 (50\u00a0%)"
    assert how_many(np.array([True, True])) == "all 2"
    assert how_many(np.array([False])) == "none of 1"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_an_axis_covers_all_its_values(values: list[float]) -> None:
    axis = Axis.around(values)
    positions = [axis.x_of(value) for value in values]
    assert min(positions) >= axis.x_of(axis.low)
    assert max(positions) <= axis.x_of(axis.high)
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)


@pytest.fixture
def parts() -> ValueParts:
    """The parts for 20 predictions. The last has no label."""
    labels, answers = numbers(20, 9)
    labels[-1] = np.nan
    table = Predictions(
        slides=tuple(f"s{n}" for n in range(20)),
        target=Regression(),
        answers=answers,
        labels=labels,
        folds=("a",) * 20,
    )
    known = {name: f"{label:g}" for name, label in zip(table.slides, labels, strict=True)}
    run = SimpleNamespace(
        labels={name: cell for name, cell in known.items() if cell != "nan"},
        target=Regression(),
        predictions=table,
        finished=True,
    )
    return ValueParts(run)  # type: ignore[arg-type]


def test_the_largest_errors_come_first_and_are_marked(parts: ValueParts) -> None:
    table = parts.run.predictions
    sizes = np.abs(table.answers[:, 0] - np.asarray(table.labels))
    ordered = [int(row) for row in np.argsort(-sizes) if not np.isnan(sizes[row])]
    assert parts.worst(table, 5) == ordered[:5]
    assert parts.marked(table) == set(ordered[:2])  # the largest tenth of 19
    halves = parts.best(table)
    assert len(halves) == 2
    assert ordered[-1] in halves


def test_errors_are_summarised_by_quarter_of_the_label(parts: ValueParts) -> None:
    table = parts.run.predictions.labelled()
    labels, errors = table.truth[0], table.answers[:, 0] - table.truth[0]
    edges = np.unique(np.quantile(labels, [0.25, 0.5, 0.75]))
    groups = pd.Series(errors).groupby(np.digitize(labels, edges))
    cells = re.findall(r"<td>(.+?)</td>", parts.results(table))
    rows = [cells[n : n + 3] for n in range(0, len(cells), 3)]
    assert [int(row[0]) for row in rows] == groups.size().tolist()
    means = [float(row[1].replace("−", "-")) for row in rows]
    assert means == pytest.approx(groups.mean().tolist(), abs=0.05)
    sizes = [float(row[2]) for row in rows]
    assert sizes == pytest.approx(groups.agg(lambda own: own.abs().mean()).tolist(), abs=0.05)


def test_a_slide_without_a_label_has_no_error(parts: ValueParts) -> None:
    cells = parts.cells(parts.run.predictions, 19)
    assert [cell.text for cell in cells][::2] == ["–", "–"]
    assert "True value" in parts.mistake(parts.run.predictions, 0)


def test_another_slide_is_compared_with_each_test_slide_once(parts: ValueParts) -> None:
    assert len(parts.other_slides("new")) == 19
    assert len(parts.other_slides("s3")) == 18


def test_a_deletion_curve_of_a_value_is_not_a_probability() -> None:
    curves: dict[str, DeletionCurves] = {}
    (value,) = panels("slide", Regression(), "a higher value", curves)
    assert (value.ylabel, value.limits) == ("Predicted value", None)
    classes = Classification(classes=("normal", "tumour"))
    probability, _ = panels("slide", classes, "tumour", curves)
    assert (probability.ylabel, probability.limits) == ("Probability of tumour", (0, 1))


# Known truth


@pytest.fixture(scope="module")
def shares() -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Bags, the shares that their patches are drawn with, and those that an oracle predicts."""
    bags = [COHORT.bag(number) for number in range(COHORT.slides)]
    best = np.array([COHORT.expected_share(int(bag.planted.sum())) for bag in bags])
    return [bag.features for bag in bags], np.array([bag.share for bag in bags]), best


def regressor(**changes: Any) -> MILRegressor:
    options: dict[str, Any] = {"epochs": 12, "lr": 1e-2, "warmup_epochs": 0, "batch_size": 8}
    return MILRegressor("mean", **options | {"device": "cpu", "settings": {"dim": 8}} | changes)


def test_the_oracle_of_the_generated_shares_is_the_mean_of_many_draws() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.random(200_000)
    planted = rng.binomial(5, drawn)
    small = GradedBags(patches=5)
    for count in range(6):
        expected = drawn[planted == count].mean()
        assert small.expected_share(count) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("uncertainty", ["none", pytest.param("gaussian", marks=pytest.mark.slow)])
def test_generated_shares_are_predicted_nearly_as_well_as_by_the_oracle(
    shares: tuple[list[np.ndarray], np.ndarray, np.ndarray], uncertainty: str
) -> None:
    bags, truth, best = shares
    found = regressor(uncertainty=uncertainty).fit(bags[:150], truth[:150]).predict(bags[150:])
    oracle = r2_score(truth[150:], best[150:])
    assert oracle > 0.85
    assert r2_score(truth[150:], found) > oracle - MARGIN


def test_permuted_shares_are_predicted_by_chance(
    shares: tuple[list[np.ndarray], np.ndarray, np.ndarray],
) -> None:
    bags, truth, _ = shares
    mixed = np.random.default_rng(0).permutation(truth)
    found = regressor(epochs=4).fit(bags[:150], mixed[:150]).predict(bags[150:])
    # Three standard errors of a correlation of 170 slides.
    assert abs(spearmanr(mixed[150:], found).statistic) < 0.23
    assert r2_score(mixed[150:], found) < 0.1
