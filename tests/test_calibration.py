"""Calibration: the best temperature, fitted on the validation part, and reliability bins."""

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import binomtest
from sklearn.metrics import log_loss as sklearn_log_loss

from caprmil.errors import CohortError
from caprmil.evaluation.calibration import calibrate
from caprmil.evaluation.predictions import Predictions
from caprmil.io.json_files import as_json
from caprmil.runs.run import Run
from caprmil.targets import Classification
from caprmil.targets.classification_metrics import ace_floor
from caprmil.targets.recalibration import LOG_LOSS
from caprmil.targets.reliability_bins import reliability
from caprmil.targets.temperature import soften, temperature


def calibrated_logits(n: int, *, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return labels, and logits whose softmax is the true probabilities."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, classes))
    cumulative = softmax(logits, axis=1).cumsum(axis=1)[:, :-1]
    return (rng.random((n, 1)) >= cumulative).sum(axis=1), logits


def answers(
    n: int = 60, *, sharper: float = 1.0, fold: str = "fold-0", classes: int = 2, seed: int = 0
) -> Predictions:
    labels, logits = calibrated_logits(n, classes=classes, seed=seed)
    return Predictions(
        slides=tuple(f"s{seed}-{k}" for k in range(n)),
        target=Classification(classes=("normal", "tumour", "other")[:classes]),
        answers=softmax(sharper * logits, axis=1),
        labels=labels,
        folds=(fold,) * n,
    )


def study(
    *, sharper: float = 3.0, classes: int = 2
) -> tuple[Predictions, Mapping[str, Predictions]]:
    """Return the test predictions of two folds, and their validation parts."""
    tests = [answers(seed=k, fold=f"fold-{k}", sharper=sharper, classes=classes) for k in (0, 1)]
    validation = {
        f"fold-{k}": answers(400, seed=k + 10, fold=f"fold-{k}", sharper=sharper, classes=classes)
        for k in (0, 1)
    }
    return Predictions.concatenate(tests), validation


# The temperature


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("sharper", [0.3, 1.0, 4.0])
def test_no_temperature_of_a_fine_grid_is_better(classes: int, sharper: float) -> None:
    table = answers(80, sharper=sharper, classes=classes)
    labels, p = np.asarray(table.labels), table.answers
    grid = np.geomspace(0.05, 20, 2001)
    losses = [-np.log(softmax(np.log(p) / t, axis=1)[range(80), labels]).mean() for t in grid]
    assert temperature(labels, p) == pytest.approx(grid[np.argmin(losses)], rel=4e-3)


@pytest.mark.parametrize("factor", [0.25, 1.0, 5.0])
def test_the_factor_of_multiplied_logits_is_the_temperature(factor: float) -> None:
    labels, logits = calibrated_logits(20_000)
    assert temperature(labels, softmax(factor * logits, axis=1)) == pytest.approx(factor, rel=0.05)


def test_a_multiple_of_the_logits_is_a_multiple_of_the_temperature() -> None:
    labels, logits = calibrated_logits(50)
    once, tripled = (temperature(labels, softmax(f * logits, axis=1)) for f in (1, 3))
    assert once is not None
    assert tripled == pytest.approx(3 * once, rel=1e-4)


@pytest.mark.parametrize("right", [True, False])
def test_there_is_no_best_temperature_if_all_predictions_are_correct_or_all_are_wrong(
    right: bool,
) -> None:
    labels, rng = np.array([0, 1] * 5), np.random.default_rng(0)
    predicted = labels if right else 1 - labels
    for confidence in (0.1, 0.5, 0.999, 1.0):
        share = confidence * rng.uniform(0.5, 1, size=(10, 1))
        assert temperature(labels, share * np.eye(2)[predicted] + (1 - share) / 2) is None


def test_uniform_answers_have_no_best_temperature() -> None:
    assert temperature(np.array([0, 1, 1]), np.full((3, 2), 0.5)) is None


def test_softening_is_the_softmax_of_smaller_logits_and_keeps_the_order() -> None:
    _, logits = calibrated_logits(30, classes=3)
    soft = soften(softmax(logits, axis=1), 2.5)
    np.testing.assert_allclose(soft, softmax(logits / 2.5, axis=1))
    np.testing.assert_array_equal(soft.argmax(axis=1), logits.argmax(axis=1))


def test_a_probability_of_one_is_softened_to_a_finite_number() -> None:
    soft = soften(np.array([[1.0, 0.0], [0.0, 1.0]]), 3.0)
    assert np.isfinite(soft).all()
    np.testing.assert_allclose(soft.sum(axis=1), 1)


def test_the_log_loss_is_that_of_scikit_learn() -> None:
    labels, logits = calibrated_logits(40, classes=3)
    p = softmax(logits, axis=1)
    assert LOG_LOSS.function(labels, p) == pytest.approx(sklearn_log_loss(labels, p))


# Fold by fold


@pytest.mark.parametrize("classes", [2, 3])
def test_each_fold_has_the_temperature_of_its_own_validation_part(classes: int) -> None:
    test, validation = study(classes=classes)
    found = calibrate(test, validation)
    for fold, part in validation.items():
        own = temperature(np.asarray(part.labels), part.answers)
        assert found.temperatures[fold] == own
        p = test.by_fold()[fold].answers
        np.testing.assert_allclose(found.after.by_fold()[fold].answers, soften(p, own or 1))


def test_the_temperature_does_not_depend_on_the_labels_of_the_test_part() -> None:
    test, validation = study()
    shuffled = np.random.default_rng(0).permutation(np.asarray(test.labels))
    expected, found = (calibrate(t, validation) for t in (test, replace(test, labels=shuffled)))
    assert found.temperatures == expected.temperatures
    np.testing.assert_array_equal(found.after.answers, expected.after.answers)
    assert found.scores["before"] != expected.scores["before"]


def test_an_overconfident_model_is_corrected() -> None:
    found = calibrate(*study(sharper=4.0))
    assert all(t > 3 for t in found.temperatures.values())
    for name in ("ace", "ece", "brier", "log_loss"):
        assert found.scores["after"][name] < found.scores["before"][name]


def test_scores_are_means_over_folds() -> None:
    test, validation = study()
    found = calibrate(test, validation)
    for name in ("ace", "ece", "brier"):
        folds = [scores[name] for scores in test.fold_scores().values()]
        assert found.scores["before"][name] == pytest.approx(np.mean(folds))
    floors = [ace_floor(part.answers)[0] for part in test.by_fold().values()]
    assert found.scores["before"]["ace_floor"] == pytest.approx(np.mean(floors))


def test_the_auc_does_not_change() -> None:
    found = calibrate(*study())
    for before, after in zip(
        found.before.fold_scores().values(), found.after.fold_scores().values(), strict=True
    ):
        assert after["auc"] == before["auc"]


def test_a_fold_without_a_temperature_keeps_its_answers_and_has_a_note() -> None:
    test, validation = study()
    one = validation["fold-1"]
    alone = one.take(np.flatnonzero(np.asarray(one.labels) == 0).tolist())
    for parts, reason in (
        ({}, "fold-1: there is no validation part, so T = 1."),
        ({"fold-1": alone}, "fold-1: the validation part has one class only, so T = 1."),
    ):
        found = calibrate(test, {"fold-0": validation["fold-0"], **parts})
        assert found.temperatures["fold-1"] == 1
        assert f"- {reason}\n" in found.as_markdown()
        own = found.after.by_fold()["fold-1"].answers
        np.testing.assert_array_equal(own, test.by_fold()["fold-1"].answers)


def test_a_validation_part_without_mistakes_gives_no_temperature() -> None:
    test, validation = study()
    perfect = validation["fold-0"]
    right = 0.1 + 0.8 * np.eye(2)[np.asarray(perfect.labels)]
    found = calibrate(test, {"fold-0": replace(perfect, answers=right)})
    assert found.temperatures["fold-0"] == 1
    assert "predicted too well, or too badly" in found.notes[0]


def test_answers_without_folds_are_refused() -> None:
    with pytest.raises(CohortError, match="have no folds"):
        calibrate(replace(answers(), folds=None), {})


def test_a_run_stores_the_calibration_that_a_second_fit_finds(tiny_run: Run) -> None:
    found = calibrate(tiny_run.predictions, tiny_run.validation)
    kept = json.loads((tiny_run.folder / "calibration.json").read_text())
    assert kept == json.loads(as_json(found.as_dict()))
    assert set(kept["temperatures"]) == {fold.name for fold in tiny_run.splits}
    assert found.as_markdown() in (tiny_run.folder / "scores.md").read_text()


# Reliability


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("n", [7, 60, 333])
def test_bins_are_those_of_a_plain_loop(n: int, classes: int) -> None:
    table = answers(n, classes=classes)
    p, labels = table.answers, np.asarray(table.labels)
    predicted = np.ones(n, int) if classes == 2 else p.argmax(axis=1)
    rows = sorted((p[k, predicted[k]], labels[k] == predicted[k]) for k in range(n))
    number = min(max(n // 10, 1), 10)
    ends = [round(b * n / number) for b in range(number + 1)]
    found = reliability(*table.truth).bins
    for bin_, start, end in zip(found, ends, ends[1:], strict=False):
        scores, hits = zip(*rows[start:end], strict=True)
        assert bin_[:2] == pytest.approx((np.mean(scores), np.mean(hits)))
        assert bin_.slides == end - start
    assert len(found) == number


def test_intervals_are_those_of_wilson() -> None:
    for bin_ in reliability(*answers(200, sharper=2).truth).bins:
        hits = round(bin_.share * bin_.slides)
        low, high = binomtest(hits, bin_.slides).proportion_ci(method="wilson")
        assert (bin_.low, bin_.high) == pytest.approx((low, high), abs=1e-12)


def test_equal_answers_stay_in_one_bin() -> None:
    table = answers(200)
    coarse = np.rint(3 * table.answers) / 3
    bins = reliability(*replace(table, answers=coarse).truth).bins
    np.testing.assert_allclose([b.forecast for b in bins], [0, 1 / 3, 2 / 3, 1], atol=1e-12)
    assert sum(b.slides for b in bins) == 200


def test_the_bins_of_a_calibrated_model_are_within_their_intervals() -> None:
    bins = reliability(*answers(5000).truth).bins
    assert sum(b.low <= b.forecast <= b.high for b in bins) >= 8


def test_the_figure_names_the_class_of_the_probability() -> None:
    two, three = (calibrate(*study(classes=classes)).draw() for classes in (2, 3))
    assert two.axes[2].get_xlabel() == "Probability of tumour"
    assert three.axes[2].get_xlabel() == "Probability of the predicted class"
