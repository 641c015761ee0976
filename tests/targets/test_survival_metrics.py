"""Survival metrics, curves and Cox's likelihood against scikit-survival and naive loops."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from sksurv.compare import compare_survival
from sksurv.linear_model import CoxPHSurvivalAnalysis
from sksurv.metrics import (
    brier_score,
    concordance_index_censored,
    concordance_index_ipcw,
    cumulative_dynamic_auc,
    integrated_brier_score,
)
from sksurv.nonparametric import kaplan_meier_estimator, nelson_aalen_estimator
from sksurv.util import Surv

from caprmil.targets import Survival
from caprmil.targets.kaplan_meier import (
    cumulative_hazard,
    kaplan_meier,
    log_rank,
    numbers_at_risk,
)
from caprmil.targets.linear_cox import LinearCox, fit_cox
from caprmil.targets.metric import bootstrap
from caprmil.targets.partial_likelihood import partial_likelihood, risk_sets
from caprmil.targets.survival_losses import DiscreteLoss, MemoryCox, cox_loss
from caprmil.targets.survival_metrics import calibration_groups

HORIZONS = (2.0, 5.0, 9.0)
METRICS = Survival(horizons=HORIZONS).metrics


def cohort(n: int, seed: int, *, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Labels and answers: a risk that follows the hazard in part, and its survival at horizons."""
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=n)
    died, left = rng.exponential(8 * np.exp(-risk)), rng.uniform(0, 20, size=n)
    events = died <= left
    times = np.minimum(died, left) + 0.01
    if ties:  # events with events, and censored with censored
        times = np.ceil(times * 2) / 2 + np.where(events, 0.0, 0.25)
    risk = risk + rng.normal(size=n)
    risk[: n // 4] = risk[0]  # equal risks
    survival = np.exp(-np.array(HORIZONS) / 8 * np.exp(risk)[:, None])
    times[-1], events[-1] = 21.0, False  # somebody is followed beyond all horizons
    return np.stack([times, events], axis=1), np.concatenate([risk[:, None], survival], axis=1)


def structured(labels: np.ndarray) -> np.ndarray:
    return Surv.from_arrays(labels[:, 1] > 0, labels[:, 0])


REFERENCES = {
    "c_index": lambda y, labels, found: concordance_index_censored(
        labels[:, 1] > 0, labels[:, 0], found[:, 0]
    )[0],
    "uno_c_index": lambda y, labels, found: concordance_index_ipcw(y, y, found[:, 0])[0],
    "ibs": lambda y, labels, found: integrated_brier_score(y, y, found[:, 1:], HORIZONS),
    **{
        f"auc_{horizon:g}": lambda y, labels, found, column=column: cumulative_dynamic_auc(
            y,
            y,
            rankdata(1 - found[:, column]),
            [HORIZONS[column - 1]],  # it rounds scores
        )[0][0]
        for column, horizon in enumerate(HORIZONS, 1)
    },
}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=8, deadline=None)
@given(n=st.integers(24, 80), seed=st.integers(0, 10**6))
def test_a_metric_is_that_of_scikit_survival(name: str, ties: bool, n: int, seed: int) -> None:
    labels, answers = cohort(n, seed, ties=ties)
    early = (labels[:, 0] <= HORIZONS[0]) & (labels[:, 1] > 0)
    last_event = labels[labels[:, 1] > 0, 0].max()
    if not early.any() or last_event <= HORIZONS[-1]:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = REFERENCES[name](structured(labels), labels, answers)
    assert METRICS[name].function(labels, answers) == pytest.approx(expected, abs=1e-9)


def test_every_metric_has_a_reference_or_a_test_of_its_own() -> None:
    assert set(METRICS) == {*REFERENCES, "auc", "calibration"}


def test_the_auc_is_the_mean_over_horizons() -> None:
    labels, answers = cohort(60, 1)
    at = [METRICS[f"auc_{horizon:g}"].function(labels, answers) for horizon in HORIZONS]
    assert METRICS["auc"].function(labels, answers) == pytest.approx(np.mean(at))


@pytest.mark.parametrize("name", [*REFERENCES, "auc", "calibration"])
def test_draws_scored_together_equal_draws_scored_one_by_one(name: str) -> None:
    labels, answers = cohort(30, 3, ties=True)
    weights = np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30), size=40).astype(float)
    weights[:3] = np.eye(30)[:3] * 2  # one slide, twice
    weights[3] = 0
    found = METRICS[name].draws(labels, answers, weights)
    plain = replace(METRICS[name], weighted=None).draws(labels, answers, weights)
    np.testing.assert_allclose(found, plain, atol=1e-12)


def test_a_brier_score_is_that_of_scikit_survival() -> None:
    labels, answers = cohort(80, 5)
    _, expected = brier_score(structured(labels), structured(labels), answers[:, 1:], HORIZONS)
    widths = np.diff(HORIZONS)
    mean = ((expected[1:] + expected[:-1]) / 2 * widths).sum() / widths.sum()
    assert METRICS["ibs"].function(labels, answers) == pytest.approx(mean)


def test_a_higher_risk_for_earlier_events_is_a_c_index_above_half() -> None:
    labels = np.array([[1.0, 1], [2, 1], [3, 1], [4, 0]])
    survival = np.array([0.1, 0.3, 0.6, 0.9])
    answers = np.stack([np.array([3.0, 2.0, 1.0, 0.0]), survival, survival, survival], axis=1)
    assert METRICS["c_index"].function(labels, answers) == 1
    assert METRICS["uno_c_index"].function(labels, answers) == 1
    assert METRICS["auc_2"].function(labels, answers) == 1
    reverse = answers * [-1, 1, 1, 1]
    assert METRICS["c_index"].function(labels, reverse) == 0


def test_scores_without_events_or_follow_up_are_nan() -> None:
    labels, answers = cohort(10, 0)
    without = labels * [1, 0]
    assert all(
        np.isnan(METRICS[name].function(without, answers))
        for name in ("c_index", "uno_c_index", "auc")
    )
    early = np.minimum(labels, [1.5, 1])
    assert np.isnan(METRICS["ibs"].function(early, answers))
    assert np.isnan(METRICS["calibration"].function(early, answers))


def test_calibration_is_the_difference_from_the_curve_in_groups_of_similar_prediction() -> None:
    labels, answers = cohort(100, 2)
    groups = list(calibration_groups(labels, answers, horizon=5.0, column=2))
    assert [group.slides for group in groups] == [25] * 4
    order = np.argsort(answers[:, 2], kind="stable")
    rows = order[:25]
    times, survival = kaplan_meier_estimator(labels[rows, 1] > 0, labels[rows, 0])
    observed = survival[np.searchsorted(times, 5.0, side="right") - 1]
    assert groups[0].observed == pytest.approx(observed)
    assert groups[0].predicted == pytest.approx(answers[rows, 2].mean())
    assert groups[0].low < observed < groups[0].high
    only = Survival(horizons=(5.0,)).metrics["calibration"]
    errors = [abs(group.predicted - group.observed) for group in groups]
    assert only.function(labels, answers[:, [0, 2]]) == pytest.approx(np.mean(errors))


@pytest.mark.parametrize("n", [90, 130])
def test_calibration_of_draws_with_several_groups_is_that_of_repeated_slides(n: int) -> None:
    labels, answers = cohort(n, 4, ties=True)
    weights = np.random.default_rng(1).multinomial(n, np.full(n, 1 / n), size=30).astype(float)
    weights[:5] = np.random.default_rng(2).integers(0, 3, size=(5, n))  # of different sizes
    metric = METRICS["calibration"]
    plain = replace(metric, weighted=None).draws(labels, answers, weights)
    np.testing.assert_allclose(metric.draws(labels, answers, weights), plain, atol=1e-12)


def test_the_interval_of_calibration_is_centred_on_the_value_and_by_patient() -> None:
    labels, answers = cohort(120, 6)
    metric, patients = METRICS["calibration"], [f"p{k // 2}" for k in range(120)]
    found = bootstrap(labels, answers, patients, [metric], draws=300, seed=1)["calibration"]
    value = metric.function(labels, answers)
    drawn, rng = [], np.random.default_rng(1)
    for _ in range(300):  # a naive bootstrap of patients
        rows = [2 * p + k for p in rng.integers(60, size=60) for k in (0, 1)]
        drawn.append(metric.function(labels[rows], answers[rows]))
    moved = np.maximum(np.array(drawn) - np.mean(drawn) + value, 0)
    np.testing.assert_allclose(found, np.quantile(moved, [0.025, 0.975]), atol=0.01)
    assert np.mean(drawn) > value  # a bootstrap reads too high: why draws are centred
    assert 0 <= found.low < value < found.high


def test_a_table_of_risks_alone_has_the_c_indices() -> None:
    assert set(Survival().metrics) == {"c_index", "uno_c_index"}


@pytest.mark.parametrize("ties", [False, True])
def test_a_kaplan_meier_curve_and_its_interval_are_those_of_scikit_survival(ties: bool) -> None:
    labels, _ = cohort(60, 4, ties=ties)
    curve = kaplan_meier(labels[:, 0], labels[:, 1] > 0)
    times, survival, interval = kaplan_meier_estimator(
        labels[:, 1] > 0, labels[:, 0], conf_type="log-log"
    )
    np.testing.assert_allclose(curve.times, times)
    np.testing.assert_allclose(curve.survival, survival)
    inner = (survival > 0) & (survival < 1)
    np.testing.assert_allclose(curve.low[inner], interval[0][inner])
    np.testing.assert_allclose(curve.high[inner], interval[1][inner])
    assert curve.median == times[np.flatnonzero(survival <= 0.5)[0]]


def test_a_curve_by_hand() -> None:
    # Four at risk, one dies at 1; at 2 one dies and one is censored; the last dies at 3.
    curve = kaplan_meier(np.array([1.0, 2, 2, 3]), np.array([True, True, False, True]))
    np.testing.assert_allclose(curve.survival, [3 / 4, 1 / 2, 0])
    np.testing.assert_allclose(curve.at([0.5, 1, 2.5, 9]), [1, 3 / 4, 1 / 2, 0])
    assert numbers_at_risk(np.array([1.0, 2, 2, 3]), [0, 2, 2.5]) == [4, 3, 1]


def test_a_cumulative_hazard_is_that_of_nelson_and_aalen() -> None:
    labels, _ = cohort(50, 6, ties=True)
    times, hazard = nelson_aalen_estimator(labels[:, 1] > 0, labels[:, 0])
    np.testing.assert_allclose(cumulative_hazard(labels[:, 0], labels[:, 1] > 0, times), hazard)


@pytest.mark.parametrize("groups", [2, 3])
def test_the_log_rank_test_is_that_of_scikit_survival(groups: int) -> None:
    labels, answers = cohort(60, 7, ties=True)
    codes = np.digitize(answers[:, 0], np.quantile(answers[:, 0], np.arange(1, groups) / groups))
    _, expected = compare_survival(structured(labels), codes)
    assert log_rank(labels[:, 0], labels[:, 1] > 0, codes) == pytest.approx(expected)
    assert np.isnan(log_rank(labels[:, 0], labels[:, 1] > 0, np.zeros(60, dtype=int)))
    assert np.isnan(log_rank(labels[:, 0], labels[:, 1] < 0, codes))


def efron(risks: np.ndarray, times: np.ndarray, events: np.ndarray) -> float:
    """Minus the log partial likelihood, as a loop over times."""
    total = 0.0
    for time in np.unique(times[events]):
        tied = np.flatnonzero(events & (times == time))
        at_risk = np.exp(risks[times >= time]).sum()
        for rank in range(len(tied)):
            out = rank / len(tied) * np.exp(risks[tied]).sum()
            total -= risks[tied[rank]] - np.log(at_risk - out)
    return total


@settings(max_examples=12, deadline=None)
@given(n=st.integers(2, 30), seed=st.integers(0, 10**6), ties=st.booleans())
def test_the_partial_likelihood_is_efrons_and_has_the_gradient_of_autograd(
    n: int, seed: int, ties: bool
) -> None:
    labels, answers = cohort(n, seed, ties=ties)
    labels[0, 1] = 1
    times, events = labels[:, 0], labels[:, 1] > 0
    found, slopes = partial_likelihood(answers[:, 0], risk_sets(times, events), gradient=True)
    expected = efron(answers[:, 0], times, events)
    assert found == pytest.approx(expected)
    risks = torch.tensor(answers[:, 0], requires_grad=True)
    loss = cox_loss(risks, torch.tensor(labels))
    assert loss.item() == pytest.approx(expected / events.sum())
    loss.backward()
    np.testing.assert_allclose(risks.grad.numpy() * events.sum(), slopes, atol=1e-9)


def test_a_linear_model_is_that_of_scikit_survival() -> None:
    labels, answers = cohort(80, 8, ties=True)
    features = np.random.default_rng(0).normal(size=(80, 3)) + answers[:, :1]
    times, events = labels[:, 0], labels[:, 1] > 0
    expected = CoxPHSurvivalAnalysis(ties="efron", alpha=1e-9).fit(features, structured(labels))
    np.testing.assert_allclose(fit_cox(features, times, events, 1e9), expected.coef_, atol=1e-4)
    found = LinearCox(1e6, HORIZONS).fit(features, labels).predict(features)
    curves = expected.predict_survival_function(features)
    np.testing.assert_allclose(
        found[:, 1:], [[curve(time) for time in HORIZONS] for curve in curves], atol=1e-4
    )
    assert np.median(found[:, 0]) == pytest.approx(0)
    assert np.corrcoef(found[:, 0], expected.predict(features))[0, 1] == pytest.approx(1)


def test_a_full_memory_gives_one_slide_its_gradient_of_the_whole_loss() -> None:
    labels, _ = cohort(12, 9)
    labels[1] = labels[0]  # two slides with the same label share their places
    truth = torch.tensor(labels.astype(np.float32))
    criterion = MemoryCox(labels.tolist())
    start = torch.zeros(12, 1)
    for row in range(12):
        criterion(start[row : row + 1].requires_grad_(), truth[row : row + 1])
    risks = torch.zeros(12, requires_grad=True)
    cox_loss(risks, truth).backward()
    for row in (5, 0):
        output = torch.zeros(1, 1, requires_grad=True)
        loss = criterion(output, truth[row : row + 1])
        loss.backward()
        assert loss.item() == pytest.approx(float(cox_loss(torch.zeros(12), truth)), rel=1e-5)
        assert output.grad.item() == pytest.approx(12 * float(risks.grad[row]), rel=1e-4)


def test_the_memory_is_kept_and_evaluation_does_not_change_it() -> None:
    labels, _ = cohort(8, 10)
    truth = torch.tensor(labels.astype(np.float32))
    one, other = MemoryCox(labels.tolist()), MemoryCox(labels.tolist())
    for row in range(5):
        one(torch.full((1, 1), float(row), requires_grad=True), truth[row : row + 1])
    before = one.state_dict()
    with torch.no_grad():
        one(torch.ones(8, 1), truth)
    assert torch.equal(one.risks.nan_to_num(7), before["risks"].nan_to_num(7))
    other.load_state_dict(before)
    values = [
        criterion(torch.ones(1, 1, requires_grad=True), truth[5:6]) for criterion in (one, other)
    ]
    assert values[0].item() == values[1].item() != 0


def test_the_discrete_loss_by_hand() -> None:
    # Intervals (0, 2] and (2, 4]. Hazards of one half: an event at 3 has survived one interval.
    loss = DiscreteLoss((2.0, 4.0))
    half, outputs = np.log(2), torch.zeros(1, 2)
    for label, expected in {
        (1.0, 1): half,
        (2.0, 1): half,
        (3.0, 1): 2 * half,
        (9.0, 1): 2 * half,  # later than all intervals: in the last one
        (1.0, 0): half / 2,  # half of the first interval is survived
        (3.0, 0): half + half / 2,
        (9.0, 0): 2 * half,
    }.items():
        assert float(loss(outputs, torch.tensor([label]))) == pytest.approx(expected), label
