"""External validation: intervals against naive loops, corrections against scipy, shifts planted."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from scipy.stats import linregress
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CaprmilError, CohortError, RunError
from caprmil.evaluation import recalibration as recalibrating
from caprmil.evaluation.external_scores import (
    headline_sentence,
    mean_over_models,
    score_external,
)
from caprmil.evaluation.paired_tests import draw_patients
from caprmil.evaluation.predictions import Predictions
from caprmil.evaluation.recalibration import correct, draw_slides, recalibrate
from caprmil.evaluation.shift import Shift, Sides, measure, of_features, of_numbers, of_shares
from caprmil.features import bags
from caprmil.report.external_page import write_external
from caprmil.runs.external import validate_external
from caprmil.runs.run import Run
from caprmil.synthetic import RareSignal, TwoSources
from caprmil.targets import Classification, Regression, Several, Survival, Target, Task
from caprmil.targets.recalibration import of_numbers as line
from caprmil.targets.recalibration import of_probabilities, of_survival
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from patient_cohort import patient_recipe, with_epochs, write_patients
from quick_scoring import quick_scoring

CLASSES = Classification(classes=("normal", "tumour"))


def two_classes(n: int, rng: np.random.Generator, *, effect: float = 1.0) -> tuple[Any, Any]:
    labels = rng.integers(2, size=n)
    p = 1 / (1 + np.exp(-(rng.normal(size=n) + effect * (2 * labels - 1))))
    return labels, np.stack([1 - p, p], axis=1)


def table_of(
    target: Target, truth: tuple[Any, Any], *, folds: int = 0, per_patient: int = 1, name: str = "s"
) -> Predictions:
    n = len(truth[0])
    return Predictions(
        slides=tuple(f"{name}{row}" for row in range(n)),
        target=target,
        labels=truth[0],
        answers=truth[1],
        patients=tuple(f"{name}p{row // per_patient}" for row in range(n)),
        folds=tuple(f"fold-{row * folds // n}" for row in range(n)) if folds else None,
    )


def every_fold(tables: list[Predictions]) -> Predictions:
    """The same slides, answered by the models of several folds."""
    return Predictions.concatenate(
        [replace(t, folds=(f"fold-{k}",) * len(t)) for k, t in enumerate(tables)]
    )


# Scores


def test_the_difference_is_that_of_two_independent_bootstraps_of_patients() -> None:
    rng = np.random.default_rng(0)
    inside = table_of(CLASSES, two_classes(80, rng), folds=2, per_patient=2)
    labels, one = two_classes(60, rng, effect=0.3)
    other = 0.7 * one + 0.15
    outside = every_fold(
        [table_of(CLASSES, (labels, p), per_patient=3, name="e") for p in (one, other)]
    )
    found = score_external(inside, outside, mean_over_models(outside), draws=150, seed=3)
    score = next(each for each in found if each.metric == "auc")

    def drawn(table: Predictions, seed: int) -> list[float]:
        patients = sorted(set(table.patients or ()))
        values = []
        for times in draw_patients(len(patients), 150, seed):
            often = dict(zip(patients, times.tolist(), strict=True))
            areas = []
            for part in table.by_fold().values():
                rows = [r for r, p in enumerate(part.patients or ()) for _ in range(often[p])]
                areas.append(roc_auc_score(part.truth[0][rows], part.answers[rows, 1]))
            values.append(float(np.mean(areas)))
        return values

    apart = np.array(drawn(outside, 4)) - np.array(drawn(inside, 3))
    low, high = np.quantile(apart, [0.025, 0.975])
    assert score.difference[1:] == pytest.approx((low, high))
    each = [roc_auc_score(p.truth[0], p.answers[:, 1]) for p in outside.by_fold().values()]
    assert score.external.value == pytest.approx(np.mean(each))
    assert score.together.value == pytest.approx(roc_auc_score(labels, (one + other)[:, 1]))


def test_the_interval_of_a_difference_holds_the_true_one() -> None:
    """Of 100 pairs of cohorts of the same kind, about 95 intervals hold 0."""
    rng, target, misses = np.random.default_rng(1), Regression(), 0
    for seed in range(100):
        sides = []
        for n, name in ((60, "s"), (40, "e")):
            labels = rng.normal(size=n)
            sides.append(
                table_of(target, (labels, (labels + rng.normal(size=n))[:, None]), name=name)
            )
        found = score_external(*sides, sides[1], draws=200, seed=seed)
        misses += next(each for each in found if each.metric == "mae").verdict != "not shown"
    assert misses <= 11  # more has a probability of 0.5 % if intervals are right


def test_metrics_that_are_biased_have_no_interval() -> None:
    rng = np.random.default_rng(2)
    sides = [table_of(CLASSES, two_classes(40, rng), name=name) for name in "se"]
    found = {each.metric: each for each in score_external(*sides, sides[1], draws=20)}
    assert found["ace"].verdict == "not known"
    assert np.isnan(found["ace"].external.low)


def test_a_cohort_of_one_class_has_no_auc_and_the_result_says_so() -> None:
    rng = np.random.default_rng(2)
    inside = table_of(CLASSES, two_classes(40, rng))
    outside = table_of(CLASSES, (np.zeros(8, dtype=int), two_classes(8, rng)[1]), name="e")
    auc = next(s for s in score_external(inside, outside, outside, draws=20) if s.metric == "auc")
    text = headline_sentence(auc, "slide")
    assert text.startswith("AUC has no value on the external slides")
    assert "nan" not in text


def test_two_patients_decide_nothing() -> None:
    """All draws that have an AUC are of the same two patients."""
    inside = table_of(CLASSES, two_classes(40, np.random.default_rng(2)))
    right = np.array([[0.9, 0.1], [0.1, 0.9]])
    outside = table_of(CLASSES, (np.array([0, 1]), right), name="e")
    auc = next(s for s in score_external(inside, outside, outside, draws=50) if s.metric == "auc")
    assert auc.external.value == 1
    assert auc.verdict == "not known"


# Recalibration


def test_slope_and_intercepts_have_the_least_penalised_log_loss() -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(3, size=25)
    logits = 2 * (rng.normal(size=(25, 3)) + np.eye(3)[labels])
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    def answers(numbers: Any) -> Any:
        found = np.exp(numbers[0] * np.log(p) + numbers[1:])
        return found / found.sum(axis=1, keepdims=True)

    def loss(numbers: Any) -> float:
        penalty = ((numbers - [1, 0, 0, 0]) ** 2).sum() / 2
        return float(25 * log_loss(labels, answers(numbers), labels=[0, 1, 2]) + penalty)

    best = minimize(loss, [1, 0, 0, 0], method="Nelder-Mead", options={"maxiter": 4000}).x
    found = of_probabilities(labels, p).apply(p)
    np.testing.assert_allclose(found, answers(best), atol=2e-3)


def test_on_many_slides_it_is_a_logistic_regression_of_the_logit() -> None:
    rng = np.random.default_rng(4)
    labels, p = two_classes(4000, rng)
    logit = np.log(p[:, 1] / p[:, 0])
    model = LogisticRegression(C=np.inf).fit(logit[:, None], labels)
    np.testing.assert_allclose(
        of_probabilities(labels, p).apply(p), model.predict_proba(logit[:, None]), atol=0.01
    )


def test_a_draw_of_one_class_does_not_run_away() -> None:
    _, p = two_classes(6, np.random.default_rng(5))
    found = of_probabilities(np.ones(6, dtype=int), p).apply(p)
    assert 0.001 < found.min() < found.max() < 0.999


def test_numbers_and_their_intervals_follow_the_least_squares_line() -> None:
    rng = np.random.default_rng(6)
    values = rng.normal(size=20)
    labels = 3 * values - 2 + rng.normal(size=20)
    answers = np.stack([values, values - 1, values + 1], axis=1)
    fitted = linregress(values, labels)
    found = line(labels, answers).apply(answers)
    np.testing.assert_allclose(found, fitted.slope * answers + fitted.intercept)
    assert (line(labels[:2], answers[:2]).apply(answers)[:, 2] > found[:, 0].min()).any()
    shifted = line(labels[:2], answers[:2]).apply(answers)[:, 0] - values
    np.testing.assert_allclose(shifted, shifted[0])  # two labels: a shift only


def test_after_recalibration_survival_expects_the_events_that_occur() -> None:
    """Hazards are four times as high here: exponential times, censored at 5."""
    rng = np.random.default_rng(7)
    risks, horizons = rng.normal(size=400) / 2, (1.0, 2.0, 4.0)
    times = rng.exponential(1 / (0.2 * np.exp(risks)))
    labels = np.stack([np.minimum(times, 5.0), (times < 5).astype(float)], axis=1)
    answers = np.c_[risks, np.exp(-np.exp(risks)[:, None] * 0.05 * np.array(horizons))]
    found = of_survival(labels, answers, horizons)
    again = found.apply(answers)
    np.testing.assert_array_equal(again[:, 0], risks)
    assert again[:, 3].mean() == pytest.approx((times > 4).mean(), abs=0.03)
    Survival(horizons=horizons).check_answers(again)


def test_the_order_of_slides_does_not_change() -> None:
    rng = np.random.default_rng(8)
    labels, p = two_classes(50, rng)
    wrong = of_probabilities(1 - labels, p).apply(p)  # the least slope
    assert roc_auc_score(labels, wrong[:, 1]) == pytest.approx(roc_auc_score(labels, p[:, 1]))


def test_each_of_several_targets_is_corrected_on_the_slides_that_have_its_label() -> None:
    target = Several(
        tasks={
            "grade": Task(settings={"classes": ["low", "high"]}),
            "size": Task(kind="regression"),
        }
    )
    rng = np.random.default_rng(9)
    grades, p = two_classes(30, rng)
    sizes = rng.normal(size=30)
    values = sizes[:, None] / 2 + 1
    labels = np.stack([np.where(np.arange(30) < 20, grades, -1), sizes], axis=1)
    answers = np.concatenate([p, values], axis=1)
    found = target.recalibrate(labels, answers)
    own = of_probabilities(grades[:20], p[:20]).apply(p)
    np.testing.assert_allclose(found.apply(answers)[:, :2], own)
    np.testing.assert_allclose(found.apply(answers)[:, 2], sizes, atol=1e-9)
    none = labels.copy()
    none[:, 1] = np.nan
    assert "size: unchanged" in target.recalibrate(none, answers).words


def test_a_target_without_labels_here_is_not_the_result_of_recalibration() -> None:
    rng = np.random.default_rng(9)
    target = Several(
        tasks={
            "grade": Task(settings={"classes": ["low", "high"]}),
            "type": Task(settings={"classes": ["a", "b"]}),
        }
    )
    labels, p = two_classes(30, rng)
    both = np.stack([np.full(30, -1), labels], axis=1)
    found = recalibrate(table_of(target, (both, np.concatenate([p, p], axis=1))), 6, draws=20)
    *_, last = found.sentences()
    assert last.startswith("type: Log-loss goes from")
    assert "nan" not in last


def test_no_patient_is_both_fitted_and_scored() -> None:
    table = table_of(CLASSES, two_classes(60, np.random.default_rng(10)), per_patient=3)
    owners = np.array(table.patients)
    draws = draw_slides(table, 10, seed=0)
    for draw in draws:
        assert len(draw.fitted) == 10
        assert not set(owners[draw.fitted]) & set(owners[draw.scored])
        assert len(draw.scored) == 60 - 12  # all others of the four patients are left out
    assert len({tuple(draw.fitted) for draw in draws}) > 1
    assert draws == draw_slides(table, 10, seed=0)
    assert draws != draw_slides(table, 10, seed=1)


def test_labels_of_scored_slides_do_not_enter_the_correction() -> None:
    table = table_of(CLASSES, two_classes(40, np.random.default_rng(11)))
    draw = draw_slides(table, 10, seed=0)[0]
    labels = table.truth[0].copy()
    labels[draw.scored] = 1 - labels[draw.scored]
    _, one, words = correct(table, draw)
    _, other, again = correct(replace(table, labels=labels), draw)
    assert words == again
    np.testing.assert_array_equal(one.answers, other.answers)
    labels = table.truth[0].copy()
    labels[draw.fitted] = 1 - labels[draw.fitted]
    changed, after, _ = correct(replace(table, labels=labels), draw)
    np.testing.assert_array_equal(changed.answers, table.answers[draw.scored])
    assert not np.allclose(after.answers, one.answers)


def test_overconfident_answers_are_better_after_recalibration() -> None:
    labels, p = two_classes(300, np.random.default_rng(12))
    logit = 4 * np.log(p[:, 1] / p[:, 0]) + 2
    sharp = 1 / (1 + np.exp(-logit))
    table = table_of(CLASSES, (labels, np.stack([1 - sharp, sharp], axis=1)))
    found = recalibrate(table, 40, draws=100)
    scores = {each.metric: each for each in found.scores}
    assert scores["log_loss"].change.high < 0
    assert scores["log_loss"].improved == scores["log_loss"].draws == recalibrating.REPEATS
    assert scores["auc"].change.value == pytest.approx(0)
    own = found.after
    assert scores["log_loss"].after.value == pytest.approx(log_loss(own.labels, own.answers[:, 1]))


@pytest.mark.parametrize("slides", [1, 21, 400])
def test_too_few_or_too_many_slides_for_recalibration_are_refused(slides: int) -> None:
    table = table_of(CLASSES, two_classes(40, np.random.default_rng(13)))
    with pytest.raises(CohortError, match="takes 2 to 20 of these 40 slides"):
        recalibrate(table, slides)


def test_three_labels_are_too_few_for_recalibration() -> None:
    labels, answers = two_classes(40, np.random.default_rng(13))
    with pytest.raises(CohortError, match="There are 3"):
        recalibrate(table_of(CLASSES, (labels[:3], answers[:3])), 2)


# Shifts


def shifts(seed: int, *, moved: float = 0.0, more: float = 0.0, rare: float = 0.5) -> list[Shift]:
    """Two cohorts: 40 training patients, and 20 patients with two slides each."""
    rng = np.random.default_rng(seed)
    one, other = (rng.normal(size=(n, 16)) for n in (40, 20))
    training, external = one, np.repeat(other, 2, axis=0)
    external = external + rng.normal(size=external.shape) / 2 + moved
    training = training + rng.normal(size=training.shape) / 2
    owners = np.repeat(np.arange(20), 2).astype(str)
    sides = Sides(training=tuple(np.arange(40).astype(str)), external=tuple(owners))
    patches = rng.lognormal(7, 1, size=40), rng.lognormal(7 + more, 1, size=40)
    classes = rng.integers(2, size=40), (rng.random(40) < rare).astype(int)
    quantities = [
        *of_features("features", training, external, sides),
        of_numbers("patches", *patches),
        of_shares("labels", *classes, ("a", "b")),
    ]
    return list(measure(quantities, sides))


@pytest.fixture(autouse=True)
def fewer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caprmil.evaluation.shift.SPLITS", 100)


@pytest.mark.slow
def test_cohorts_of_the_same_kind_have_no_shift() -> None:
    """At most 5 % of cohorts may be said to have any shift: of 30, more than 4 in 1.6 %."""
    alarms = [any(each.is_larger for each in shifts(seed)) for seed in range(30)]
    assert sum(alarms) <= 4


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"moved": 1.0}, {"features: mean", "features: classifier"}),
        ({"more": 2.0}, {"patches"}),
        ({"rare": 0.02}, {"labels"}),
    ],
)
def test_a_planted_shift_is_found_and_only_that(settings: Any, names: set[str]) -> None:
    found = {each.name for each in shifts(0, **settings) if each.is_larger}
    assert names <= found <= {*names, *(["features: novelty"] if "moved" in settings else [])}


def test_strange_slides_are_found_by_their_novelty() -> None:
    rng = np.random.default_rng(3)
    sides = Sides(
        training=tuple(f"t{n}" for n in range(60)), external=tuple(f"e{n}" for n in range(30))
    )
    training, external = rng.normal(size=(60, 8)), rng.normal(size=(30, 8))
    external *= 6 * rng.choice([-1, 1], size=(30, 1))  # the mean stays
    _, _, novelty = measure(of_features("f", training, external, sides), sides)
    assert novelty.is_larger
    assert novelty.value > 0.9


# Runs


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 20 slides of the kind that the tiny run was trained on, at two sites."""
    folder = tmp_path_factory.mktemp("outside")
    table = RareSignal(slides=20, width=64, patches=(40, 80), signal=0.3, stain=0.5).write(folder)
    frame = pd.read_csv(table)
    frame["slide"], frame["patient"] = "other_" + frame["slide"], "other_" + frame["patient"]
    frame["hospital"] = [("North", "South")[n // 2 % 2] for n in range(20)]
    frame.to_csv(table, index=False)
    for path in list((folder / "features").iterdir()):
        path.rename(path.with_name(f"other_{path.name}"))
    return table


def caprmil(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_numbers_that_are_known_of_few_training_slides_are_compared_where_they_are() -> None:
    """Most parts of the training patients have no value at all."""
    values = np.r_[1.0, np.full(5, np.nan)]
    sides = Sides(training=tuple("abcdef"), external=tuple("uvwxyz"))
    (found,) = measure([of_numbers("age", values, np.arange(6.0))], sides)
    assert found.corrected_p > 0.05


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    with quick_scoring():
        yield


@pytest.mark.usefixtures("quick")
def test_the_command_writes_a_page_and_tables_and_overwrites_nothing(
    tiny_run: Run, outside: Path, tmp_path: Path
) -> None:
    words = ("evaluate", tiny_run.folder, "--cohort", outside, "--features")
    words = (*words, outside.parent / "features", "--out", tmp_path / "found")
    output = caprmil(*words, "--recalibrate", 6)
    assert output.startswith("20 slides, 20 patients, 3 folds.")
    assert "Fitted to 6 slides, scored on the other 14" in output
    alone = pd.read_csv(outside).drop(columns="patient")
    alone.to_csv(outside.parent / "alone.csv", index=False)
    again = caprmil(*words[:3], outside.parent / "alone.csv", *words[4:6])
    assert "Note: No patient column: every slide counts as its own patient." in again
    facts = json.loads((tmp_path / "found" / "external.json").read_text())
    assert [site["site"] for site in facts["sites"]] == ["North", "South"]
    assert len(facts["recalibration"]["fitted_slides"]) == 6
    scores = pd.read_csv(tmp_path / "found" / "scores.csv").set_index("metric")
    answers = pd.read_csv(tmp_path / "found" / "predictions.csv")
    truth = answers["label"] == "tumour"
    each = [
        roc_auc_score(truth[own.index], own["prob_tumour"]) for _, own in answers.groupby("fold")
    ]
    assert scores.loc["auc", "external_value"] == pytest.approx(np.mean(each))
    mean = answers.groupby("slide").agg({"prob_tumour": "mean", "label": "first"})
    together = roc_auc_score(mean["label"] == "tumour", mean["prob_tumour"])
    assert scores.loc["auc", "together_value"] == pytest.approx(together)
    before = {path: path.read_bytes() for path in (tmp_path / "found").iterdir()}
    with pytest.raises(CaprmilError, match="exists"):
        caprmil(*words)
    assert before == {path: path.read_bytes() for path in (tmp_path / "found").iterdir()}


@pytest.mark.usefixtures("quick")
def test_the_column_of_the_label_is_that_of_the_run_also_if_it_was_recognised(
    tiny_run: Run, tiny_cohort: Path, outside: Path, tmp_path: Path
) -> None:
    """In training it was the only column left, and here there is one more: the hospital."""
    frame = pd.read_csv(tiny_cohort).rename(columns={"label": "outcome"})
    cohort, _ = load_cohort(frame, tiny_cohort.parent / "features", CohortConfig(scan=False))
    assert cohort.label == "outcome"
    folder = shutil.copytree(tiny_run.folder, tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | {"label": cohort.label}))
    frame = pd.read_csv(outside).rename(columns={"label": "outcome"})
    found = Run(folder).evaluate(frame, outside.parent / "features", device="cpu")
    assert found.labels is not None
    assert found.target.known(found.labels).all()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("combine", ["bag", "mean"])
def test_a_run_of_patients_is_validated_by_patient(combine: str, tmp_path: Path) -> None:
    home, away = (
        write_patients(tmp_path / "home", 12),
        write_patients(tmp_path / "away", 10, seed=3, prefix="q"),
    )
    recipe = with_epochs(patient_recipe(home, combine=combine), 1)
    run = cross_validate(recipe, tmp_path / "run", device="cpu", progress=False)
    found = validate_external(
        run, away, away.parent / "features", recalibrate_on=4, draws=20, device="cpu"
    )
    assert (found.unit, found.patients) == ("patient", 10)
    assert found.size() == "10 patients, 3 folds."
    assert found.recalibrated is not None
    assert found.recalibrated.scored == 6
    bags_are_of = "patient" if combine == "bag" else "slide"
    assert f"Patches per {bags_are_of}" in {shift.name for shift in found.shifts}
    assert found.unlike is not None
    rows = 10 if combine == "bag" else len(pd.read_csv(away))
    text = f"of {rows} {bags_are_of}s are unlike the training {bags_are_of}s"
    assert any(text in sentence for sentence in found.sentences())
    assert {site.site for site in found.sites} == {"A", "B", "C"}
    sentences = [each for each in found.sentences() if "share of" not in each.lower()]
    assert any("slide" in each for each in sentences) == (combine == "mean")


def test_a_run_that_is_not_finished_is_validated_by_the_folds_that_are_trained(
    tiny_run: Run, outside: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_run.folder, tmp_path / "run")
    (folder / "scores.json").unlink()
    (folder / "novelty.safetensors").unlink()
    shutil.rmtree(folder / "folds" / "fold-2")
    found = validate_external(
        Run(folder), outside, outside.parent / "features", draws=20, device="cpu"
    )
    tested = tiny_run.predictions.fold_scores()
    expected = np.mean([tested[fold]["auc"] for fold in ("fold-0", "fold-1")])
    assert found.folds == 2
    assert found.first.internal.value == pytest.approx(expected)
    assert any("keeps no mean features" in note for note in found.notes)
    assert {shift.name for shift in found.shifts} >= {"Patches per slide", "Labels"}


def test_a_run_without_its_slides_has_nothing_to_compare_with(
    tiny_run: Run, outside: Path, tmp_path: Path
) -> None:
    """As those of the hub."""
    folder = shutil.copytree(tiny_run.folder, tmp_path / "run")
    splits = json.loads((folder / "splits.json").read_text())
    for fold in splits["folds"]:
        fold |= {"train": [], "validation": [], "test": []}
    (folder / "splits.json").write_text(json.dumps(splits))
    (folder / "scores.json").unlink()
    with pytest.raises(RunError, match="no test slides to compare with"):
        validate_external(Run(folder), outside, outside.parent / "features", device="cpu")


@pytest.mark.slow
def test_each_source_of_features_has_its_own_shift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stain in the coarse patches only, of 16 slides of 8 patients."""
    with quick_scoring():
        home = TwoSources(slides=24, patches=16).write(tmp_path / "home")
        recipe = Recipe(
            cohort=str(home),
            features=(str(home.parent / "fine"), str(home.parent / "coarse")),
            model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
            splits=SplitConfig(folds=2),
            train=TrainConfig(epochs=1, warmup_epochs=0),
            loggers={},
        )
        run = cross_validate(recipe, tmp_path / "run", device="cpu", progress=False)
    away = TwoSources(slides=16, patches=16, seed=5).write(tmp_path / "away")
    away.write_text(away.read_text().replace("patient_", "other_").replace("slide_", "new_"))
    for path in list(away.parent.glob("*/*.h5")):
        bag = bags.read(path)
        moved = bag.features + 2.0 * (path.parent.name == "coarse")
        kept = {name: getattr(bag.info, name) for name in ("encoder", "mpp", "patch_px", "step")}
        kept |= {"patch_level0": bag.info.patch_level0, "slide_mpp": bag.info.slide_mpp}
        new = path.with_name(path.name.replace("slide_", "new_"))
        bags.write(new, moved, bag.coords, dtype="float32", **kept)
        path.unlink()
    monkeypatch.setattr("caprmil.evaluation.shift.SPLITS", 200)
    folders = [away.parent / "fine", away.parent / "coarse"]
    found = validate_external(run, away, folders, draws=20, device="cpu")
    larger = {shift.name for shift in found.shifts if shift.is_larger}
    assert "Features of coarse: mean" in larger
    assert not any("fine" in name or "Patches" in name for name in larger)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_a_desktop_and_a_phone(
    tiny_run: Run, outside: Path, chromium: Any, tmp_path: Path, width: int
) -> None:
    options: dict[str, Any] = {"recalibrate_on": 6, "draws": 20, "device": "cpu"}
    found = validate_external(tiny_run, outside, outside.parent / "features", **options)
    write_external(found, tmp_path / "found")
    problems: list[str] = []
    page = chromium.new_page(viewport={"width": width, "height": 900})
    page.on("console", lambda message: problems.append(message.text))
    page.goto(f"file://{tmp_path}/found/index.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    titles = page.locator("h2").all_inner_texts()
    expected = ["What was found", "Scores", "How the cohorts differ", "Recalibrated on 6 slides"]
    assert titles == [*expected, "Reliability", "Sites"]
    # The first number of the scores is seen without scrolling.
    box = page.locator(".estimates tbody td").first.bounding_box()
    assert box["x"] + box["width"] <= width
    assert problems == []
    page.close()
