"""Calibration of labels, numbers and survival, against scipy, scikit-learn and naive loops."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit
from scipy.stats import linregress
from sklearn.metrics import log_loss

from caprmil.errors import CohortError
from caprmil.evaluation.calibration import calibrate, calibrate_each
from caprmil.evaluation.predictions import Predictions
from caprmil.figures import as_svg
from caprmil.runs.run import reliability_file
from caprmil.targets import Multilabel, Regression, Several, Survival, Target, Task
from caprmil.targets.calibration_method import CalibrationSide

HORIZONS = (2.0, 5.0, 9.0)
FOLDS = ("fold-0", "fold-1")


def table(target: Target, answers: Any, labels: Any, name: str = "s") -> Predictions:
    """Return answers, half of them of each fold."""
    n = len(answers)
    return Predictions(
        slides=tuple(f"{name}{k}" for k in range(n)),
        target=target,
        answers=np.asarray(answers),
        labels=target.as_labels(np.asarray(labels).tolist()),
        folds=tuple(FOLDS[2 * k // n] for k in range(n)),
    )


def study(make: Any) -> tuple[Predictions, Mapping[str, Predictions]]:
    return make(0, "test"), make(1, "held").by_fold()


def survival_table(seed: int, name: str) -> Predictions:
    """Survival that is predicted as if all hazards were twice as high as they are."""
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=600)
    died, left = rng.exponential(8 * np.exp(-risk)), rng.uniform(0, 20, size=600)
    labels = np.stack([np.minimum(died, left), died <= left], axis=1)
    survival = np.exp(-2 * np.array(HORIZONS) / 8 * np.exp(risk)[:, None])
    return table(Survival(horizons=HORIZONS), np.c_[risk, survival], labels, name)


def labels_table(seed: int, name: str) -> Predictions:
    """Two labels: the first is overconfident, and the second is unknown on some slides."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(400, 2)) * 1.5
    labels = (rng.random((400, 2)) < expit(logits)).astype(float)
    labels[::5, 1] = np.nan
    labels = np.where(np.isnan(labels), -1, labels)
    return table(Multilabel(labels=("EGFR", "KRAS/NRAS")), expit(logits * [3, 1]), labels, name)


def numbers_table(seed: int, name: str) -> Predictions:
    """Numbers that are twice too far from 10, with intervals that are too narrow."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(10, 3, size=400)
    value = 10 + 2 * (mean - 10)
    target = Regression(uncertainty="quantile")
    answers = np.stack([value, value - 1, value + 1], axis=1)
    return table(target, answers, mean + rng.normal(size=400), name)


def test_a_label_has_the_temperature_with_the_least_log_loss_on_the_slides_that_have_it() -> None:
    test, validation = study(labels_table)
    found = calibrate_each(test, validation, every=True)
    assert list(found) == ["EGFR", "KRAS/NRAS"]
    for number, own in enumerate(found.values()):
        for fold, part in validation.items():
            labels, p = np.asarray(part.labels)[:, number], part.answers[:, number]
            known = labels >= 0

            def loss(log_t: float, y: Any = labels[known], p: Any = p[known]) -> float:
                return float(log_loss(y, expit(logit(p) / np.exp(log_t)), labels=[0, 1]))

            best = np.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x)
            assert own.temperatures[fold] == pytest.approx(best, rel=1e-3)
    first = found["EGFR"]
    assert all(2 < t < 4 for t in first.temperatures.values())
    assert first.scores["after"]["ace"] < first.scores["before"]["ace"]
    after, before = first.after.by_fold()["fold-0"], test.by_fold()["fold-0"]
    expected = expit(logit(before.answers[:, :1]) / first.temperatures["fold-0"])
    np.testing.assert_allclose(after.answers, expected)
    assert "/" not in reliability_file("KRAS/NRAS")


def test_numbers_follow_the_line_of_the_validation_part_and_intervals_go_along() -> None:
    test, validation = study(numbers_table)
    found = calibrate(test, validation)
    for fold, part in validation.items():
        line = linregress(part.answers[:, 0], np.asarray(part.labels, dtype=float))
        own = test.by_fold()[fold].answers
        np.testing.assert_allclose(
            found.after.by_fold()[fold].answers, line.slope * own + line.intercept
        )
    before, after = found.scores["before"], found.scores["after"]
    slopes = []
    for own in test.by_fold().values():
        line = linregress(own.answers[:, 0], np.asarray(own.labels, dtype=float))
        slopes.append(line.slope)
    assert before["slope"] == pytest.approx(np.mean(slopes))
    assert before["slope"] == pytest.approx(0.5, abs=0.05)
    assert after["slope"] == pytest.approx(1, abs=0.1)
    assert after["mae"] < before["mae"]
    for when, answers in (("before", found.before), ("after", found.after)):
        covered = [
            np.mean(
                [low <= y <= high for y, (_, low, high) in zip(p.labels, p.answers, strict=True)]
            )
            for p in answers.by_fold().values()
        ]
        assert found.scores[when]["coverage"] == pytest.approx(np.mean(covered))
    assert "labels in 90 % intervals" in found.as_markdown()


def test_the_factor_of_hazards_is_the_events_over_those_expected_and_the_order_stays() -> None:
    test, validation = study(survival_table)
    found = calibrate(test, validation)
    times = np.r_[0.0, HORIZONS]
    for fold, part in validation.items():
        events, expected = 0, 0.0
        for (time, event), (_, *survival) in zip(part.labels, part.answers, strict=True):
            hazards = np.r_[0.0, -np.log(survival)]
            events += int(event and time <= HORIZONS[-1])
            expected += float(np.interp(min(time, HORIZONS[-1]), times, hazards))
        factor = (events + 1) / (expected + 1)
        assert factor == pytest.approx(0.5, abs=0.1)
        own = test.by_fold()[fold].answers
        after = found.after.by_fold()[fold].answers
        np.testing.assert_allclose(after[:, 1:], own[:, 1:] ** factor, atol=1e-9)
        np.testing.assert_array_equal(after[:, 0], own[:, 0])
    before, after = found.scores["before"], found.scores["after"]
    assert before["events_ratio"] == pytest.approx(0.5, abs=0.1)
    assert after["events_ratio"] == pytest.approx(1, abs=0.15)
    for name in ("calibration", "ibs"):
        assert after[name] < before[name]
    assert found.before.fold_scores()["fold-0"]["c_index"] == pytest.approx(
        found.after.fold_scores()["fold-0"]["c_index"]
    )


@pytest.mark.parametrize("make", [labels_table, numbers_table, survival_table])
def test_labels_of_the_test_part_change_no_correction_and_a_missing_validation_part_is_noted(
    make: Any,
) -> None:
    test, validation = study(make)
    rows = np.random.default_rng(2).permutation(len(test))
    shuffled = table(test.target, test.answers, np.asarray(test.labels)[rows], "test")
    one, other = (calibrate_each(t, validation, every=True) for t in (test, shuffled))
    for name in one:
        found, again = (
            {fold: own.words for fold, own in each[name].fitted.items()} for each in (one, other)
        )
        assert found == again
    alone = calibrate_each(test, {"fold-0": validation["fold-0"]}, every=True)
    for own in alone.values():
        last, before = (t.by_fold()["fold-1"].answers for t in (own.after, own.before))
        np.testing.assert_array_equal(last, before)
        assert own.notes[0].startswith("fold-1: there is no validation part, so ")


@pytest.mark.parametrize("make", [labels_table, numbers_table, survival_table])
def test_what_is_drawn_and_written_is_of_both_sides(make: Any, tmp_path: Path) -> None:
    for own in calibrate_each(*study(make), every=True).values():
        assert own.as_markdown().count("| before |") == 1
        assert own.as_dict().keys() == {"method", "corrections", "before", "after", "notes"}
        drawn = own.draw()
        assert drawn is not None
        assert "<svg" in as_svg(drawn, alt="Calibration")


def test_bins_of_numbers_are_those_of_a_plain_loop() -> None:
    found = numbers_table(0, "s")
    from caprmil.targets.reliability_bins import value_bins

    bins = value_bins(*found.truth)
    order = np.argsort(found.answers[:, 0])
    for own, rows in zip(bins, np.array_split(order, len(bins)), strict=True):
        labels = np.asarray(found.labels)[rows]
        assert own.slides == len(rows)
        assert own.share == pytest.approx(labels.mean())
        assert own.forecast == pytest.approx(found.answers[rows, 0].mean())
        assert own.high - own.share == pytest.approx(
            1.96 * labels.std(ddof=1) / len(rows) ** 0.5, rel=1e-3
        )


def test_risks_alone_have_no_calibration_and_nothing_is_called_a_survival() -> None:
    target = Survival()
    risks = table(target, np.zeros((4, 1)), [(1.0, 1.0), (2.0, 0.0)] * 2)
    with pytest.raises(CohortError, match=r"^There is no calibration for survival\."):
        calibrate(risks, {})
    several = Several(tasks={"a": Task(kind="survival"), "b": Task(kind="survival")})
    words = [each.in_words for each in (target, several, Regression(), Multilabel(labels=("x",)))]
    assert words == ["survival", "several targets", "a regression", "several labels"]
    with pytest.raises(CohortError, match="for survival"):
        _ = target.conformal


def test_a_figure_of_one_side_has_no_legend_of_a_correction() -> None:
    own = numbers_table(0, "s")
    side = CalibrationSide(*own.truth)
    method = own.target.calibration
    assert method is not None
    drawn = method.draw(side, None, how="nothing", unit="slide")
    assert drawn is not None
    assert drawn.axes[0].get_legend() is None
