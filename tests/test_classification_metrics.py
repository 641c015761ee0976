"""Metrics of classification: against scikit-learn, against plain loops, and in small samples."""

import time
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn import metrics as reference

from caprmil.errors import CaprmilError, CohortError, UnknownNameError
from caprmil.targets import Classification
from caprmil.targets import classification_metrics as metrics
from caprmil.targets.metric import METRICS, Interval, bootstrap, mean_and_spread

Slides = tuple[np.ndarray, np.ndarray]


def target(classes: int) -> Classification:
    return Classification(classes=tuple("abcdef"[:classes]))


def score(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    return target(probabilities.shape[1]).score(labels, probabilities)


def intervals(
    labels: np.ndarray,
    probabilities: np.ndarray,
    patients: list[str],
    *,
    metrics: list[str] | None = None,
    **settings: Any,
) -> dict[str, Interval]:
    classes = target(probabilities.shape[1])
    chosen = [classes.metric(name) for name in metrics or classes.metrics]
    return bootstrap(labels, probabilities, patients, chosen, **settings)


def draw(n: int, classes: int, seed: int = 0, steps: int | None = None) -> Slides:
    """Draw labels and their probabilities. Few steps give ties and exact zeros."""
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet([0.5] * classes, n)
    if steps:
        probabilities = rng.multinomial(steps, probabilities) / steps
    cumulative = probabilities.cumsum(axis=1)[:, :-1]
    return (rng.random((n, 1)) >= cumulative).sum(axis=1), probabilities


@st.composite
def slides(pick: st.DrawFn, classes: int | None = None) -> Slides:
    classes = classes or pick(st.integers(2, 5))
    n, seed = pick(st.integers(1, 60)), pick(st.integers(0, 10_000))
    return draw(n, classes, seed, steps=pick(st.sampled_from([10, 100, None])))


def plain_ace(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the adaptive calibration error by its definition, step by step."""
    by_class = []
    for c in range(probabilities.shape[1]):
        pairs = [(p, y == c) for p, y in zip(probabilities[:, c], labels, strict=True) if p != 0]
        ordered = sorted(p for p, _ in pairs)
        n = len(pairs)
        edges = [ordered[min(round(i * n / 10), n - 1)] for i in range(1, 10)] if n else []
        hits, sums = [0.0] * 10, [0.0] * 10
        for p, hit in pairs:
            bin_ = sum(edge <= p for edge in edges)
            hits[bin_] += hit
            sums[bin_] += p
        by_class.append(sum(abs(h - s) for h, s in zip(hits, sums, strict=True)) / n if n else 0)
    return float(np.mean(by_class))


def plain_ece(hits: np.ndarray, scores: np.ndarray) -> float:
    total = 0.0
    for b in range(10):
        inside = (scores >= b / 10) & ((scores < (b + 1) / 10) | (b == 9))
        if inside.any():
            total += inside.mean() * abs(hits[inside].mean() - scores[inside].mean())
    return total


@settings(deadline=None, max_examples=60)
@given(slides())
def test_ace_is_the_plain_definition(case: Slides) -> None:
    assert metrics.ace(*case) == pytest.approx(plain_ace(*case), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(slides())
def test_ece_is_the_plain_definition(case: Slides) -> None:
    labels, probabilities = case
    right = probabilities.argmax(axis=1) == labels
    expected = plain_ece(right, probabilities.max(axis=1))
    assert metrics.ece(labels, probabilities) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(slides(classes=2))
def test_ece_positive_is_the_plain_definition(case: Slides) -> None:
    labels, probabilities = case
    expected = plain_ece(labels == 1, probabilities[:, 1])
    assert metrics.ece_positive(labels, probabilities) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(slides())
def test_metrics_of_predicted_classes_are_those_of_scikit_learn(case: Slides) -> None:
    labels, probabilities = case
    predicted, classes = probabilities.argmax(axis=1), range(probabilities.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predicted classes that are not among the labels
        expected = {
            "accuracy": reference.accuracy_score(labels, predicted),
            "balanced_accuracy": reference.balanced_accuracy_score(labels, predicted),
            "f1": reference.f1_score(labels, predicted, average="macro"),
            "kappa": reference.cohen_kappa_score(
                labels, predicted, labels=list(classes), weights="quadratic"
            ),
        }
    found = score(labels, probabilities)
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True)


@settings(deadline=None, max_examples=60)
@given(slides())
def test_the_brier_score_is_that_of_scikit_learn(case: Slides) -> None:
    labels, probabilities = case
    n_outputs = probabilities.shape[1]
    reference_input = probabilities[:, 1] if n_outputs == 2 else probabilities
    names: dict[str, Any] = {"pos_label": 1} if n_outputs == 2 else {"labels": range(n_outputs)}
    if n_outputs == 2 and len(set(labels)) < 2:
        expected = float(np.mean((reference_input - labels) ** 2))
    else:
        expected = reference.brier_score_loss(labels, reference_input, **names)
    assert metrics.brier(labels, probabilities) == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(slides())
def test_the_auc_is_the_mean_of_scikit_learn_over_classes_with_both_labels(case: Slides) -> None:
    labels, probabilities = case
    codes = range(probabilities.shape[1]) if probabilities.shape[1] > 2 else [1]
    aucs = [
        reference.roc_auc_score(labels == c, probabilities[:, c])
        for c in codes
        if 0 < (labels == c).sum() < len(labels)
    ]
    expected = np.mean(aucs) if aucs else float("nan")
    assert metrics.auc(labels, probabilities) == pytest.approx(expected, nan_ok=True)


def test_the_auc_of_three_classes_is_the_macro_average_of_scikit_learn() -> None:
    labels, probabilities = draw(200, 3)
    expected = reference.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert metrics.auc(labels, probabilities) == pytest.approx(expected)


def test_ties_count_half_in_the_auc() -> None:
    assert metrics.auc(np.array([0, 1, 0, 1]), np.full((4, 2), 0.5)) == 0.5


def test_the_auc_leaves_out_an_absent_class_whose_own_auc_is_nan() -> None:
    labels, probabilities = draw(60, 3)
    probabilities, labels = probabilities[labels < 2], labels[labels < 2]
    by_class = metrics.auc_by_class(labels, probabilities)
    assert np.isnan(by_class).tolist() == [False, False, True]
    assert metrics.auc(labels, probabilities) == pytest.approx(by_class[:2].mean())


def test_auc_and_kappa_of_a_single_class_are_nan() -> None:
    found = score(np.zeros(3, int), np.tile([0.9, 0.1], (3, 1)))
    assert np.isnan([found["auc"], found["kappa"]]).all()
    assert found["accuracy"] == 1


def test_the_calibration_error_of_certain_and_correct_predictions_is_zero() -> None:
    labels = np.array([0, 1, 2, 1, 0])
    assert metrics.ace(labels, np.eye(3)[labels]) == 0
    assert metrics.ece(labels, np.eye(3)[labels]) == 0


def test_a_probability_on_a_bin_edge_is_in_the_upper_bin() -> None:
    # 0.6 and 0.65 are in the bin that starts at 0.6: one positive of two, and 1.25 expected.
    probabilities = np.array([[0.4, 0.6], [0.35, 0.65]])
    assert metrics.ece_positive(np.array([1, 0]), probabilities) == pytest.approx(0.125)


def test_a_probability_of_one_is_in_the_last_bin() -> None:
    # 1.0 and 0.95 are in one bin: one positive of two, and 1.95 expected.
    probabilities = np.array([[0.0, 1.0], [0.05, 0.95]])
    assert metrics.ece_positive(np.array([1, 0]), probabilities) == pytest.approx(0.475)


@pytest.mark.parametrize(
    ("n", "expected"), [(87, 0.067), (129, 0.055), (258, 0.040), (1592, 0.017)]
)
def test_the_floor_of_a_calibrated_model_has_the_known_value(n: int, expected: float) -> None:
    positive = np.random.default_rng(0).beta(0.3, 0.3, (30, n))
    floors = [metrics.ace_floor(np.stack([1 - p, p], axis=1), draws=20) for p in positive]
    assert np.mean(floors, axis=0)[0] == pytest.approx(expected, abs=0.004)


def many_classes(
    slides: int = 120, classes: int = 30
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Labels and probabilities of many classes, some of them equal or 0, one class absent."""
    rng = np.random.default_rng(0)
    labels = rng.integers(classes - 1, size=slides)
    scores = rng.dirichlet(np.ones(classes), size=slides) + 0.1 * np.eye(classes)[labels]
    scores = scores.round(2) * (scores > 0.01)
    return labels, scores / scores.sum(axis=1, keepdims=True)


def test_the_auc_of_draws_of_many_classes_is_that_of_repeated_slides() -> None:
    labels, scores = many_classes()
    times = np.random.default_rng(1).integers(3, size=(5, len(labels)))
    found = METRICS["classification"]["auc"].draws(labels, scores, times.astype(float))
    for draw, area in zip(times, found, strict=True):
        rows = np.repeat(np.arange(len(labels)), draw)
        assert area == pytest.approx(metrics.auc(labels[rows], scores[rows]), rel=1e-12)


def test_the_floor_is_the_mean_ace_of_labels_drawn_from_the_probabilities() -> None:
    _, scores = many_classes()
    rng = np.random.default_rng(0)
    ladder = scores.cumsum(axis=1)
    drawn = [(rng.random((len(scores), 1)) >= ladder[:, :-1]).sum(axis=1) for _ in range(20)]
    errors = [metrics.ace(labels, scores) for labels in drawn]
    mean, spread = metrics.ace_floor(scores, draws=20)
    assert (mean, spread) == (pytest.approx(np.mean(errors)), pytest.approx(np.std(errors, ddof=1)))


def test_the_floor_has_the_known_standard_deviation() -> None:
    positive = np.random.default_rng(0).beta(0.3, 0.3, (60, 129))
    draws = [metrics.ace_floor(np.stack([1 - p, p], axis=1), draws=8) for p in positive]
    within, between = np.mean([std for _, std in draws]), np.std([mean for mean, _ in draws])
    assert np.hypot(within, between) == pytest.approx(0.018, abs=0.003)


def test_the_floor_of_certain_predictions_is_zero() -> None:
    assert metrics.ace_floor(np.eye(3)) == (0, 0)


def test_the_error_of_a_miscalibrated_model_is_far_above_its_floor() -> None:
    labels, _ = draw(300, 2)
    underconfident = np.where(labels[:, None] == [0, 1], 0.6, 0.4)  # always correct
    mean, std = metrics.ace_floor(underconfident)
    assert metrics.ace(labels, underconfident) > mean + 5 * std


def test_every_metric_is_scored_where_it_applies() -> None:
    assert list(score(*draw(30, 2))) == list(target(2).metrics)
    assert set(target(2).metrics) - set(score(*draw(30, 3))) == {"ece_positive"}


def test_probabilities_in_half_precision_are_scored_in_full_precision() -> None:
    labels, probabilities = draw(50, 3)
    coarse = probabilities.astype(np.float16)
    assert score(labels, coarse) == score(labels, coarse.astype(np.float64))


def test_the_spread_is_the_sample_standard_deviation() -> None:
    assert mean_and_spread([1.0, 2.0, 3.0]) == (2, 1, 3)


def test_the_spread_of_one_fold_is_nan() -> None:
    mean, std, counted = mean_and_spread([0.9])
    assert (mean, counted) == (0.9, 1)
    assert np.isnan(std)


def test_folds_without_a_value_are_left_out_of_mean_and_count() -> None:
    assert mean_and_spread([1.0, float("nan"), 3.0]).counted == 2
    empty = mean_and_spread([float("nan")])
    assert empty.counted == 0
    assert np.isnan(empty.mean)


def test_the_bootstrap_draws_whole_patients() -> None:
    # Each patient has one correct and one wrong slide, so whole patients always give 0.5.
    labels = np.tile([0, 1], 20)
    probabilities = np.tile([0.9, 0.1], (40, 1))
    pairs = [f"p{n // 2}" for n in range(40)]
    by_patient = intervals(labels, probabilities, pairs, metrics=["accuracy"], draws=100)
    by_slide = intervals(
        labels, probabilities, [str(n) for n in range(40)], metrics=["accuracy"], draws=100
    )
    assert by_patient["accuracy"] == (0.5, 0.5)
    assert by_slide["accuracy"].high - by_slide["accuracy"].low > 0.2


def test_an_interval_is_wider_if_patients_have_several_slides() -> None:
    labels, probabilities = draw(40, 2)
    labels, probabilities = labels.repeat(5), probabilities.repeat(5, axis=0)
    width = {}
    for name, group in (("patients", 5), ("slides", 1)):
        patients = [str(n // group) for n in range(200)]
        low, high = intervals(labels, probabilities, patients, metrics=["brier"])["brier"]
        width[name] = high - low
    assert width["patients"] > 1.7 * width["slides"]


def test_intervals_cover_the_true_value_at_their_nominal_rate() -> None:
    true_value = metrics.accuracy(*draw(100_000, 2, seed=1))
    inside = 0
    for seed in range(60):
        labels, probabilities = draw(100, 2, seed=100 + seed)
        patients = [str(n) for n in range(100)]
        interval = intervals(
            labels, probabilities, patients, metrics=["accuracy"], draws=200, level=0.9
        )["accuracy"]
        inside += interval.low <= true_value <= interval.high
    assert 46 <= inside <= 60  # 54 expected


def test_draws_without_a_positive_are_left_out_of_the_auc() -> None:
    labels = np.array([0, 0, 0, 0, 1])  # a third of the draws lack the only positive
    probabilities = np.array([[0.8, 0.2]] * 4 + [[0.1, 0.9]])
    found = intervals(labels, probabilities, list("abcde"), draws=100)
    assert found["auc"] == (1, 1)


def test_the_interval_of_one_patient_is_nan() -> None:
    found = intervals(*draw(20, 2), ["p"] * 20, draws=20)
    assert np.isnan(list(found.values())).all()


def test_the_same_seed_gives_the_same_interval() -> None:
    labels, probabilities = draw(40, 3)
    patients = [str(n) for n in range(40)]
    first, again, other = (
        intervals(labels, probabilities, patients, draws=50, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_thousand_draws_take_seconds() -> None:
    labels, probabilities = draw(400, 2)
    begin = time.perf_counter()
    intervals(labels, probabilities, [str(n // 2) for n in range(400)])
    assert time.perf_counter() - begin < 20  # 2 on an idle core


@pytest.mark.parametrize(
    ("labels", "probabilities", "words"),
    [
        ([0, 1], [[0.5, 0.5]], "labels.shape"),
        ([0], [[1.0]], "classes >= 2"),
        ([0], [0.5, 0.5], "classes >= 2"),
        ([0.0], [[0.5, 0.5]], "float64"),
        ([2], [[0.5, 0.5]], "Label 2 is out of range: with 2 classes, labels are 0 to 1"),
        ([-1], [[0.5, 0.5]], "Label -1"),
        ([0, 1], [[0.5, 0.5], [np.nan, 0.5]], "Row 1: nan, 0.5"),
        ([0], [[0.5, 0.6]], "sum to 1"),
        ([0], [[-0.5, 1.5]], "between 0 and 1"),
    ],
)
def test_invalid_input_is_an_error(labels: list[Any], probabilities: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        metrics.ace(np.array(labels), np.array(probabilities))


def test_scoring_no_predictions_is_an_error() -> None:
    with pytest.raises(CohortError, match="no predictions"):
        metrics.auc(np.zeros(0, int), np.zeros((0, 2)))


def test_rounded_probabilities_are_accepted() -> None:
    assert metrics.accuracy(np.array([0]), np.array([[0.6, 0.3995]])) == 1


def test_an_unknown_metric_gets_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'auc'"):
        intervals(*draw(5, 2), list("abcde"), metrics=["acu"])


def test_ece_positive_of_three_classes_is_an_error() -> None:
    with pytest.raises(ValueError, match="two classes") as caught:
        metrics.ece_positive(*draw(5, 3))
    assert not isinstance(caught.value, CaprmilError)


@pytest.mark.parametrize("settings", [{"level": 1.0}, {"level": 95.0}, {"draws": 0}])
def test_invalid_settings_of_a_bootstrap_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be between"):
        intervals(*draw(5, 2), list("abcde"), **settings)


def test_a_bootstrap_needs_a_patient_for_each_slide() -> None:
    with pytest.raises(ValueError, match="one patient for each label"):
        intervals(*draw(5, 2), ["a"])
