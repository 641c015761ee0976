"""Comparison: DeLong's figures, calibrated p values, and errors for tables that differ."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.errors import CaprmilError, CohortError, UnknownNameError
from caprmil.evaluation.comparison import compare, compare_with_baselines
from caprmil.evaluation.differences import Comparison, Difference
from caprmil.evaluation.predictions import Predictions
from caprmil.runs.run import Run
from caprmil.targets import Classification
from caprmil.targets.classification_metrics import ace_floor
from caprmil.targets.metric import METRICS, mean_and_spread

pytestmark = pytest.mark.slow

SCORES = METRICS["classification"]


def answers(
    skills: tuple[float, ...] = (1.0, 1.0),
    *,
    n: int = 120,
    folds: int = 3,
    slides: int = 1,
    classes: int = 2,
    seed: int = 0,
) -> dict[str, Predictions]:
    """Return predictions of models of known skill. Each patient has `slides` slides.

    A score is skill x label + an effect of the patient + an effect of the slide, which all models
    share, + noise. Its variance is 1 without the label. Half of it is the effect of the patient.
    """
    rng = np.random.default_rng(seed)
    patients = np.arange(n) // slides
    labels = np.resize(np.arange(classes), n // slides + 1)[patients]
    shared = rng.normal(size=(n, classes)) * np.sqrt(0.25)
    tables = {}
    for name, skill in zip("ABCDEF", skills, strict=False):
        patient_effect = rng.normal(size=(n, classes))[patients] * np.sqrt(0.5)
        noise = rng.normal(size=(n, classes)) * np.sqrt(0.25)
        scores = skill * np.eye(classes)[labels] + shared + patient_effect + noise
        if classes == 2:
            scores[:, 0] = 0
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        tables[name] = Predictions(
            slides=tuple(f"s{k}" for k in range(n)),
            target=Classification(classes=("a", "b", "c")[:classes]),
            answers=odds / odds.sum(axis=1, keepdims=True),
            labels=labels,
            patients=tuple(f"p{p}" for p in patients),
            folds=tuple(f"fold-{p % folds}" for p in patients // classes),
        )
    return tables


def pair(*args: Any, names: tuple[str, ...] = ("auc",), **options: Any) -> Difference:
    (found,) = compare(answers(*args, **options), names=names).differences
    return found


def plain_delong(labels: np.ndarray, one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the difference of two AUCs and its variance, by DeLong's double loop."""

    def placements(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positives, negatives = scores[labels == 1], scores[labels == 0]
        wins = np.array([[(h > m) + 0.5 * (h == m) for m in negatives] for h in positives])
        return wins.mean(axis=1), wins.mean(axis=0)

    of_positives, of_negatives = zip(*(placements(scores) for scores in (one, other)), strict=True)
    weights = np.array([1, -1])
    spread = np.cov(of_positives) / len(of_positives[0]) + np.cov(of_negatives) / len(
        of_negatives[0]
    )
    return of_positives[0].mean() - of_positives[1].mean(), float(weights @ spread @ weights)


# DeLong


@pytest.mark.parametrize("steps", [None, 7])
def test_one_fold_with_a_slide_per_patient_gives_delongs_test(steps: int | None) -> None:
    tables = answers((1.0, 0.6), folds=1)
    if steps:  # ties
        tables = {n: replace(t, answers=coarse(t, steps)) for n, t in tables.items()}
    one, other = (table.answers[:, 1] for table in tables.values())
    difference, variance = plain_delong(np.asarray(tables["A"].labels), one, other)
    (found,) = compare(tables, names=["auc"]).differences
    margin = norm.ppf(0.975) * np.sqrt(variance)
    assert found.difference == pytest.approx(difference)
    assert found.interval == pytest.approx((difference - margin, difference + margin))
    assert found.p == pytest.approx(2 * norm.sf(abs(difference) / np.sqrt(variance)))


def test_the_variance_of_clustered_slides_is_that_of_obuchowski() -> None:
    tables = answers((1.0, 0.6), folds=1, slides=4)  # all slides of a patient have the same class
    labels, patients = np.asarray(tables["A"].labels), np.asarray(tables["A"].patients)
    variance, scores = 0.0, [table.answers[:, 1] for table in tables.values()]
    for code in (0, 1):
        own, others = labels == code, labels != code
        above = [(s[own][:, None] > s[others]).mean(axis=1) * (2 * code - 1) for s in scores]
        apart = above[0] - above[1]
        sums = [
            (apart - apart.mean())[patients[own] == patient].sum() for patient in set(patients[own])
        ]
        variance += len(sums) / (len(sums) - 1) * np.square(sums).sum() / own.sum() ** 2
    (found,) = compare(tables, names=["auc"]).differences
    width = 2 * norm.ppf(0.975) * np.sqrt(variance)
    assert found.interval.high - found.interval.low == pytest.approx(width)


def coarse(table: Predictions, steps: int) -> np.ndarray:
    second = np.rint(table.answers[:, 1] * steps) / steps
    return np.stack([1 - second, second], axis=1)


def test_the_variances_of_folds_with_different_patients_are_added() -> None:
    tables = answers((1.0, 0.6), folds=3)
    apart = []
    for fold in tables["A"].by_fold():
        parts = [table.by_fold()[fold] for table in tables.values()]
        scores = [part.answers[:, 1] for part in parts]
        apart.append(plain_delong(np.asarray(parts[0].labels), *scores))
    (found,) = compare(tables, names=["auc"]).differences
    differences, variances = np.array(apart).T
    assert found.difference == pytest.approx(differences.mean())
    width = 2 * norm.ppf(0.975) * np.sqrt(variances.sum()) / 3
    assert found.interval.high - found.interval.low == pytest.approx(width)


def test_values_are_the_means_of_metrics_over_folds() -> None:
    tables = answers(classes=3)
    found = compare(tables, draws=5)
    assert {d.metric for d in found.differences} == set(SCORES) - {"ece_positive"}
    for d in found.differences:
        folds = [scores[d.metric] for scores in tables["B"].fold_scores().values()]
        assert d.of_second == pytest.approx(mean_and_spread(folds))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_interval_of_the_auc_covers_the_true_difference(classes: int) -> None:
    true_difference = norm.cdf(1.2 / np.sqrt(2)) - norm.cdf(
        0.6 / np.sqrt(2)
    )  # two normal distributions
    if classes > 2:
        true_difference = pair((1.2, 0.6), classes=classes, n=60_000, folds=1, seed=1).difference
    found = [pair((1.2, 0.6), classes=classes, seed=seed).interval for seed in range(250)]
    assert 0.91 <= np.mean([low <= true_difference <= high for low, high in found]) <= 0.985


@pytest.mark.parametrize("slides", [1, 3])
def test_equal_models_differ_significantly_in_one_of_twenty_tests(slides: int) -> None:
    false = np.mean([pair(slides=slides, seed=seed).p < 0.05 for seed in range(300)])
    assert 0.02 <= false <= 0.085


def test_ignoring_patients_with_several_slides_gives_too_many_false_positives() -> None:
    def compare_without_patients(seed: int) -> Comparison:
        tables = answers(slides=3, seed=seed).items()
        return compare({n: replace(t, patients=None) for n, t in tables}, names=["auc"])

    assert (
        np.mean([compare_without_patients(seed).differences[0].p < 0.05 for seed in range(100)])
        > 0.1
    )
    assert "No patients are named" in compare_without_patients(0).notes[0]


def test_a_real_difference_is_found_in_every_metric_that_shows_it() -> None:
    found = compare(answers((2.5, 0.5), n=300), draws=500)
    verdicts = {d.metric: (d.verdict, d.better) for d in found.differences}
    for metric in ("auc", "accuracy", "balanced_accuracy", "f1", "kappa", "brier"):
        assert verdicts[metric] == ("real", "A")


# No variance


def test_the_same_answers_have_a_difference_of_zero() -> None:
    one = answers()["A"]
    for d in compare({"one": one, "again": one}, draws=50).differences:
        assert (d.difference, d.interval, d.p, d.verdict) == (0, (0, 0), 1, "not shown")


def perfect_answers(labels: np.ndarray) -> np.ndarray:
    return np.eye(2)[labels] * 0.8 + 0.1


@pytest.mark.parametrize(("n", "verdict"), [(4, "not shown"), (40, "real")])
def test_without_any_variance_p_is_that_of_a_sign_test(n: int, verdict: str) -> None:
    table = answers(n=n, folds=1)["A"]
    labels = np.asarray(table.labels)
    right, uniform = (
        replace(table, answers=p) for p in (perfect_answers(labels), np.full((n, 2), 0.5))
    )
    (found,) = compare({"right": right, "blank": uniform}, names=["auc"]).differences
    assert (found.difference, found.p, found.verdict) == (0.5, 2.0 ** (1 - n), verdict)
    assert np.isnan(found.interval).all()


@pytest.mark.parametrize("slides", [1, 3])
def test_p_is_unknown_if_a_fold_has_one_patient_of_a_class(slides: int) -> None:
    tables = answers((9, -9), folds=1, slides=slides)
    patients = {f"p{number}" for number in (0, 1, 2, 4, 6, 8)}  # only patient 1 has class b
    keep = [at for at, patient in enumerate(tables["A"].patients or ()) if patient in patients]
    tables = {name: table.take(keep) for name, table in tables.items()}
    found = compare(tables, names=["auc"])
    assert found.differences[0].verdict == "not known"
    assert any("one patient with b" in note for note in found.notes)
    assert "too few slides" in found.differences[0].sentence()


def test_the_auc_of_slides_of_one_class_is_nan() -> None:
    tables = {n: t.take(range(0, 120, 2)) for n, t in answers((1.0, 0.5)).items()}
    (found,) = compare(tables, names=["auc"]).differences
    assert (found.verdict, found.better) == ("not known", None)
    assert np.isnan([*found.interval, found.p]).all()


def test_a_fold_of_one_class_is_left_out_of_the_auc() -> None:
    tables = answers((1.0, 0.5), folds=2)
    labels = np.asarray(tables["A"].labels)
    keep = [k for k, fold in enumerate(tables["A"].folds or ()) if fold == "fold-0" or labels[k]]
    (found,) = compare({n: t.take(keep) for n, t in tables.items()}, names=["auc"]).differences
    only = {n: t.by_fold()["fold-0"] for n, t in tables.items()}
    assert found.of_first.counted == 1
    assert found.p == pytest.approx(compare(only, names=["auc"]).differences[0].p)


# The bootstrap


def test_every_metric_but_the_auc_is_bootstrapped() -> None:
    tested = {name for name, metric in SCORES.items() if metric.weighted and not metric.influence}
    assert tested == set(SCORES) - {"auc"}


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("metric", sorted(set(SCORES) - {"auc"}))
@pytest.mark.parametrize("steps", [6, 1000])
def test_a_draw_is_the_metric_on_repeated_slides(metric: str, classes: int, steps: int) -> None:
    if metric == "ece_positive" and classes > 2:
        pytest.skip("for two classes only")
    rng = np.random.default_rng(steps)
    labels = rng.integers(classes, size=37)
    probabilities = rng.multinomial(steps, rng.dirichlet([0.5] * classes, 37)) / steps
    weights = rng.poisson(1, size=(30, 37)).astype(float)
    weights[0] = 0
    expected = [np.nan]
    for row in weights[1:].astype(int):
        again = np.repeat(np.arange(37), row)
        expected.append(SCORES[metric].function(labels[again], probabilities[again]))
    found = SCORES[metric].draws(labels, probabilities, weights)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_bootstrap_has_one_false_positive_in_twenty_tests() -> None:
    names = ("balanced_accuracy", "brier")
    tables = [answers(slides=2, seed=seed) for seed in range(150)]
    found = [compare(t, names=names, draws=300).differences for t in tables]
    for at in range(len(names)):
        assert 0.01 <= np.mean([differences[at].p < 0.05 for differences in found]) <= 0.1


def test_two_thousand_draws_of_six_models_take_seconds() -> None:
    import time

    tables = answers((1, 1, 1, 1, 1, 1), n=300, folds=5)
    start = time.process_time()
    assert len(compare(tables, draws=2000).differences) == 15 * 9
    assert time.process_time() - start < 15


# Several comparisons


def test_p_is_corrected_by_holms_method_for_each_metric() -> None:
    found = compare(answers((1.5, 1.2, 0.8)), names=["auc", "brier"], draws=100).differences
    for metric in ("auc", "brier"):
        own = sorted((d for d in found if d.metric == metric), key=lambda d: d.p)
        raw = [d.p for d in own]
        by_hand = [3 * raw[0], max(3 * raw[0], 2 * raw[1])]
        by_hand.append(max(by_hand[1], raw[2]))
        assert [d.corrected_p for d in own] == pytest.approx(np.minimum(by_hand, 1))


def test_with_a_reference_only_comparisons_with_it_are_made() -> None:
    found = compare(answers((1, 1, 1)), against=["B"], names=["auc"]).differences
    assert [(d.first, d.second) for d in found] == [("A", "B"), ("C", "B")]


def test_wrong_names_and_single_tables_are_refused() -> None:
    tables = answers()
    with pytest.raises(UnknownNameError, match="'auk'"):
        compare(tables, names=["auk"])
    with pytest.raises(UnknownNameError, match="table called 'D'"):
        compare(tables, against=["D"])
    with pytest.raises(CohortError, match="nothing to compare"):
        compare({"A": tables["A"]})


# Alignment


def flip(table: Predictions) -> Predictions:
    """Return the same answers with rows and classes in reverse order, and other names of folds."""
    reversed_table = table.take(range(len(table) - 1, -1, -1))
    return replace(
        reversed_table,
        target=Classification(classes=reversed_table.target.classes[::-1]),
        answers=reversed_table.answers[:, ::-1],
        labels=len(reversed_table.target.classes) - 1 - np.asarray(reversed_table.labels),
        folds=tuple(f"{name}b" for name in reversed_table.folds or ()),
    )


def test_order_of_rows_and_classes_and_names_of_folds_do_not_matter() -> None:
    tables = answers((1.0, 0.5), classes=3)
    expected = compare(tables, draws=20)
    found = compare({**tables, "B": flip(tables["B"])}, draws=20)
    for one, other in zip(expected.differences, found.differences, strict=True):
        if one.metric != "kappa":  # kappa depends on the order of classes
            assert one.of_second == pytest.approx(other.of_second)
            assert one.p == pytest.approx(other.p)


def test_other_labels_and_other_patients_are_refused_by_name() -> None:
    tables = answers()
    labels = np.asarray(tables["B"].labels).copy()
    labels[3] = 1 - labels[3]
    with pytest.raises(CohortError, match="other labels for 1 slide: s3"):
        compare({**tables, "B": replace(tables["B"], labels=labels)})
    other_patients = tuple(f"q{k}" for k in range(120))
    with pytest.raises(CohortError, match="other patients for 120 slides"):
        compare({**tables, "B": replace(tables["B"], patients=other_patients)})


def test_other_slides_and_other_classes_are_refused() -> None:
    tables = answers()
    with pytest.raises(CohortError, match=r"not tested on the same slides.*these 2: s118, s119"):
        compare({**tables, "B": tables["B"].take(range(118))})
    with pytest.raises(CohortError, match="the answers prob_a, prob_b, and B has prob_x, prob_y"):
        compare({**tables, "B": replace(tables["B"], target=Classification(classes=("x", "y")))})


def test_other_folds_of_the_same_slides_are_pooled_with_a_note() -> None:
    tables = answers((1.0, 0.5))
    other = replace(tables["B"], folds=tuple(f"fold-{k % 4}" for k in range(120)))
    found = compare({**tables, "B": other}, names=["auc"])
    assert found.differences[0].of_first.mean == pytest.approx(tables["A"].scores()["auc"])
    assert any("are pooled" in note for note in found.notes)
    assert "all slides pooled" in found.size()


def test_folds_that_only_one_table_has_are_left_out_with_a_note() -> None:
    tables = answers((1.0, 0.5))
    two = [k for k, fold in enumerate(tables["B"].folds or ()) if fold != "fold-2"]
    found = compare({**tables, "B": tables["B"].take(two)}, names=["auc"])
    assert found.folds == ("fold-0", "fold-1")
    assert any("fold-2 of A is left out" in note for note in found.notes)


# Output


def test_a_calibration_error_is_shown_with_its_floor() -> None:
    tables = answers()
    found = compare(tables, names=["ace"], draws=20)
    parts = tables["A"].by_fold().values()
    floor = np.mean([ace_floor(part.answers)[0] for part in parts])
    assert f"(floor {floor:.3f})" in found.as_rows()[0]["first's"]
    assert "too high on few slides" in found.as_markdown()


def test_calibrated_models_do_not_differ_in_calibration_whatever_their_floors() -> None:
    """The truth is known: both are calibrated, and only the less confident one reads higher."""
    found = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        chance = rng.beta(0.2, 0.2, 150)
        labels = (rng.random(150) < chance).astype(int)
        second = {"confident": chance, "unconfident": rng.uniform(0.49, 0.51, 150)}
        tables = {
            name: Predictions(
                slides=tuple(f"s{k}" for k in range(150)),
                target=Classification(classes=("a", "b")),
                answers=np.stack([1 - p, p], axis=1),
                labels=labels,
            )
            for name, p in second.items()
        }
        found += compare(tables, names=["ace"], draws=300).differences
    assert sum(d.corrected_p < 0.05 for d in found) > 3  # the test alone would be misled
    assert sum(d.verdict == "real" for d in found) <= 1
    misled = next(d for d in found if d.corrected_p < 0.05 and d.verdict != "real")
    assert "no difference in ace is shown" in misled.sentence()
    assert "within the floors" in misled.sentence()


def test_a_model_that_is_not_calibrated_is_worse_than_one_that_is() -> None:
    rng = np.random.default_rng(0)
    chance = rng.beta(2, 2, 300)
    labels = (rng.random(300) < chance).astype(int)
    tables = {
        name: Predictions(
            slides=tuple(f"s{k}" for k in range(300)),
            target=Classification(classes=("a", "b")),
            answers=np.stack([1 - p, p], axis=1),
            labels=labels,
        )
        for name, p in {"right": chance, "sure": (chance > 0.5) * 0.98 + 0.01}.items()
    }
    (found,) = compare(tables, names=["ace"], draws=300).differences
    assert found.better == "right"


def test_the_interval_of_a_calibration_error_is_centred_on_the_difference() -> None:
    rng = np.random.default_rng(0)
    second = {
        "confident": rng.beta(0.3, 0.3, 60),
        "unconfident": rng.beta(30, 30, 60),
    }  # with unequal floors
    labels = (rng.random(60) < second["confident"]).astype(int)
    tables = {
        name: Predictions(
            slides=tuple(f"s{k}" for k in range(60)),
            target=Classification(classes=("a", "b")),
            answers=np.stack([1 - p, p], axis=1),
            labels=labels,
        )
        for name, p in second.items()
    }
    for found in compare(tables, names=["ace", "ece"]).differences:
        low, high = found.interval
        assert (low + high) / 2 == pytest.approx(found.difference, abs=0.15 * (high - low))


def test_the_csv_has_every_number_in_full_precision(tmp_path: Path) -> None:
    found = compare(answers((1.5, 0.5)), draws=50)
    with found.write(tmp_path / "c.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["p"]) for row in rows] == [d.p for d in found.differences]
    assert [row["verdict"] for row in rows] == [d.verdict for d in found.differences]
    assert found.as_markdown().count("\n| A | B |") == len(rows) == 9


def test_the_better_model_is_named_first_and_a_lower_error_is_better() -> None:
    found: Comparison = compare(answers((0.2, 3.0), n=300), names=["auc", "brier"], draws=200)
    for sentence in found.sentences():
        assert sentence.startswith("B is better than A in ")


def test_a_baseline_that_is_not_beaten_is_named() -> None:
    tables = answers((1.0, 1.0, 0.0), n=300)
    compared = compare_with_baselines(
        "model", tables["A"], {"count": tables["B"], "site": tables["C"]}
    )
    (warning,) = compared.warnings()
    assert warning.startswith("model does not beat 'count' (p = ")


# The command


def command(*words: object) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_single_run_is_compared_with_its_baselines(tiny_run: Run) -> None:
    assert set(tiny_run.baselines) == {"patch count", "mean feature"}
    output = command(tiny_run.folder)
    assert "beats every baseline" in output or "does not beat" in output


def test_runs_and_tables_are_compared_and_written(tiny_run: Run, tmp_path: Path) -> None:
    table = tiny_run.baselines["patch count"].write(tmp_path / "other.csv")
    output = command(tiny_run.folder, table, "--against", table, "--out", tmp_path / "out")
    assert "24 slides of 24 patients, mean over 3 folds." in output
    assert (tmp_path / "out" / "comparison.csv").read_text().count("\nrun,other.csv,") == 9
    assert "# run and its baselines" in (tmp_path / "out" / "comparison.md").read_text()
    with pytest.raises(CaprmilError, match="already exists"):
        command(tiny_run.folder, table, "--out", tmp_path / "out")


def test_a_single_table_and_a_table_given_twice_are_refused(tiny_run: Run) -> None:
    table = tiny_run.folder / "predictions.csv"
    with pytest.raises(CohortError, match="has no baselines"):
        command(table)
    with pytest.raises(CohortError, match="named twice"):
        command(table, table)
