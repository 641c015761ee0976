"""Prediction sets: their coverage against the nominal level, and thresholds against naive loops."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.cohort.folds import Fold, SplitConfig
from caprmil.errors import CohortError, RecipeError, RunError
from caprmil.evaluation.guarantees import (
    CoverageRow,
    combined_sets,
    guaranteed,
    measure_each,
    measure_guarantees,
    selective_risk,
    threshold,
    thresholds,
    wilson,
)
from caprmil.evaluation.novelty import Reference, make_reference, nearest
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bags
from caprmil.report.run_page import run_report
from caprmil.runs.conformal_sets import mean_feature, read_guarantees
from caprmil.runs.run import Run
from caprmil.synthetic import GradedBags
from caprmil.targets import (
    Classification,
    Ordinal,
    Regression,
    Several,
    Survival,
    Target,
    Task,
)
from caprmil.targets.conformal import IntervalSets
from caprmil.targets.multilabel import BinaryLabel
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import CohortConfig, ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from quick_scoring import quick_scoring

CLASSES = Classification(classes=("a", "b", "c"))
GRADES = Ordinal(classes=("0", "1", "2", "3"))


# Thresholds


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.floats(-5, 5), min_size=1, max_size=60),
    coverage=st.sampled_from([0.5, 0.8, 0.9, 0.95]),
)
def test_with_one_slide_each_the_threshold_is_the_order_statistic_of_the_textbook(
    scores: list[float], coverage: float
) -> None:
    n = len(scores)
    rank = math.ceil((n + 1) * coverage - 1e-9)
    expected = sorted(scores)[rank - 1] if rank <= n else math.inf
    patients = [f"p{number}" for number in range(n)]
    assert threshold(np.array(scores), patients, coverage) == expected


@settings(max_examples=40, deadline=None)
@given(owners=st.lists(st.integers(0, 8), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_the_slides_of_a_patient_share_its_weight(owners: list[int], seed: int) -> None:
    scores = np.random.default_rng(seed).normal(size=len(owners))
    patients = len(set(owners))
    expected = math.inf
    for candidate in sorted(scores, reverse=True):
        held = 0.0
        for patient in set(owners):
            own = [s for s, owner in zip(scores, owners, strict=True) if owner == patient]
            held += np.mean([s <= candidate for s in own]) / (patients + 1)
        if held >= 0.8 - 1e-9:
            expected = candidate
    assert threshold(scores, [str(owner) for owner in owners], 0.8) == expected


# Sets


def probabilities(n: int, classes: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Labels, and overconfident probabilities."""
    labels = rng.integers(classes, size=n)
    logits = 2 * (rng.normal(size=(n, classes)) + 1.2 * np.eye(classes)[labels])
    return labels, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


@pytest.mark.parametrize("target", [CLASSES, GRADES], ids=["classes", "grades"])
def test_a_set_has_the_labels_whose_nonconformity_is_at_most_the_threshold(target: Any) -> None:
    n = len(target.classes)
    _, answers = probabilities(30, n, np.random.default_rng(0))
    for limit in (0.2, 0.6, 0.95, math.inf):
        sets = target.conformal.sets(answers, limit)
        for label in range(n):
            scores = target.conformal.nonconformity(np.full(30, label), answers)
            np.testing.assert_array_equal(sets[:, label], scores <= limit)


def test_sets_of_grades_have_no_gaps() -> None:
    answers = np.array([[0.4, 0.05, 0.35, 0.2], [0.1, 0.2, 0.3, 0.4]])
    found = GRADES.conformal.sets(answers, 0.8)
    assert found.tolist() == [[True, False, False, False], [False, True, True, True]]
    _, answers = probabilities(200, 4, np.random.default_rng(1))
    for row in GRADES.conformal.sets(answers, 0.9):
        assert np.abs(np.diff(row.astype(int))).sum() <= 2
        assert (np.diff(np.flatnonzero(row)) == 1).all()


def test_an_interval_is_widened_on_both_sides() -> None:
    plain, wide = np.array([[5.0]]), np.array([[5.0, 4.0, 7.0]])
    sets = IntervalSets()
    assert sets.sets(plain, 2).tolist() == [[3.0, 7.0]]
    assert sets.sets(wide, 2).tolist() == [[2.0, 9.0]]
    assert sets.sets(wide, -1).tolist() == [[5.0, 6.0]]
    assert np.isnan(sets.sets(wide, -2)).all()
    assert sets.nonconformity(np.array([9.0]), wide).tolist() == [2.0]
    assert sets.columns(sets.sets(wide, 2)) == {
        "interval_low": ("2.0",),
        "interval_high": ("9.0",),
        "abstain": ("no",),
    }


def test_the_models_abstain_where_an_interval_is_wider_than_the_limit_infinite_or_empty() -> None:
    answers = np.array([[5.0, 4.0, 7.0], [5.0, 0.0, 9.0]])
    for widest, limit, expected in (
        (None, 0.5, ["no", "no"]),
        (5.0, 0.5, ["no", "yes"]),
        (None, math.inf, ["yes", "yes"]),
        (None, -2.0, ["yes", "no"]),
    ):
        conformal = Regression(uncertainty="quantile", widest=widest).conformal
        assert list(conformal.columns(conformal.sets(answers, limit))["abstain"]) == expected
    with pytest.raises(RecipeError, match="widest is a width above 0"):
        Regression(widest=0.0)


def test_a_set_of_a_label_is_that_of_two_classes() -> None:
    rng = np.random.default_rng(3)
    p, labels = rng.random((50, 1)), rng.integers(2, size=50)
    two = Classification(classes=("0", "1")).conformal
    both = np.concatenate([1 - p, p], axis=1)
    own = BinaryLabel().conformal
    np.testing.assert_array_equal(own.nonconformity(labels, p), two.nonconformity(labels, both))
    for limit in (0.1, 0.5, 0.8):
        assert own.columns(own.sets(p, limit)) == two.columns(two.sets(both, limit))


def test_the_majority_of_classes_is_a_count() -> None:
    votes = [np.array([[1, 1, 0]], bool), np.array([[1, 0, 0]], bool), np.array([[0, 1, 0]], bool)]
    assert CLASSES.conformal.majority(votes).tolist() == [[True, True, False]]
    assert CLASSES.conformal.majority(votes[:2]).tolist() == [[True, False, False]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=6))
def test_the_majority_of_intervals_has_every_point_that_most_of_them_have(
    pairs: list[tuple[int, int]],
) -> None:
    votes = [np.array([[low, low + width]], dtype=float) for low, width in pairs]
    ((low, high),) = IntervalSets().majority(votes)
    grid = np.arange(-1, 30, 0.25)
    times = sum(((vote[0, 0] <= grid) & (grid <= vote[0, 1])).astype(int) for vote in votes)
    most = grid[times > len(votes) / 2]
    if len(most):
        assert (low, high) == (most.min(), most.max())
    else:
        assert low == min(v[0, 0] for v in votes)


# Coverage


def draw(target: Target, n: int, rng: np.random.Generator) -> tuple[Any, Any]:
    if isinstance(target, Classification):
        return probabilities(n, len(target.classes), rng)
    if isinstance(target, BinaryLabel):
        labels, answers = probabilities(n, 2, rng)
        return labels, answers[:, 1:]
    labels = rng.normal(size=n)
    value = labels + rng.normal(scale=0.5, size=n)
    if target.columns == ("predicted",):
        return labels, value[:, None]
    return labels, np.stack([value, value - 0.2, value + 0.3], axis=1)  # too narrow


@pytest.mark.parametrize(
    "target",
    [CLASSES, GRADES, Regression(), Regression(uncertainty="quantile"), BinaryLabel()],
    ids=["classes", "grades", "numbers", "intervals", "label"],
)
def test_new_slides_are_covered_as_promised(target: Target) -> None:
    """The mean coverage over 400 calibrations is the level, and at most 1 / (n + 1) above it."""
    rng, conformal = np.random.default_rng(0), target.conformal
    shares = []
    for _ in range(400):
        limit = threshold(conformal.nonconformity(*draw(target, 40, rng)), range(40), 0.8)  # type: ignore[arg-type]
        labels, answers = draw(target, 50, rng)
        shares.append(conformal.holds(conformal.sets(answers, limit), labels).mean())
    error = 4 * np.std(shares) / np.sqrt(len(shares))
    assert 0.8 - error < np.mean(shares) < 0.8 + 1 / 41 + error


def test_the_majority_of_five_models_covers_more_than_its_guarantee() -> None:
    """Models of one cohort that make partly the same errors, each calibrated on its own slides."""
    rng, shares = np.random.default_rng(0), []
    folds = [f"fold-{n}" for n in range(5)]
    for _ in range(150):
        skills = rng.uniform(0.3, 1.5, size=5)
        limits = {}
        for fold, skill in zip(folds, skills, strict=True):
            labels = rng.normal(size=30)
            answers = (labels + skill * rng.normal(size=30))[:, None]
            scores = IntervalSets().nonconformity(labels, answers)
            limits[fold] = threshold(scores, [str(n) for n in range(30)], 0.9)
        for _ in range(20):
            label, common = rng.normal(size=1), rng.normal()
            noise = (common + rng.normal(size=5)) / np.sqrt(2)
            own = {f: label + s * e for f, s, e in zip(folds, skills, noise, strict=True)}
            shares.append(IntervalSets().holds(combined_sets(Regression(), own, limits), label)[0])
    assert guaranteed(0.9, 5) == pytest.approx(1 - 0.5 / 3)
    assert np.mean(shares) > 0.87
    assert [guaranteed(0.9, n) for n in (1, 2)] == pytest.approx([0.9, 0.8])


def test_slides_of_one_patient_do_not_count_as_many() -> None:
    """A patient's error is shared by 20 slides. By slides, the coverage would be too low."""
    rng, conformal = np.random.default_rng(1), IntervalSets()
    by_patient, by_slide = [], []
    for _ in range(600):
        shifts = rng.normal(size=9)
        sizes = np.where(np.abs(shifts) < 0.5, 20, 1)
        owners = np.repeat(np.arange(9), sizes)
        labels = np.repeat(shifts, sizes)
        scores = conformal.nonconformity(labels, np.zeros((len(labels), 1)))
        new = abs(rng.normal())
        by_patient.append(new <= threshold(scores, owners.astype(str), 0.8))  # type: ignore[arg-type]
        slides = [str(n) for n in range(len(labels))]
        by_slide.append(new <= threshold(scores, slides, 0.8))
    assert np.mean(by_patient) > 0.77
    assert np.mean(by_slide) < 0.75


# Reports of coverage


def tables(n: int = 90) -> tuple[Predictions, dict[str, Predictions]]:
    rng = np.random.default_rng(3)

    def part(fold: str, prefix: str) -> Predictions:
        labels, answers = probabilities(n, 3, rng)
        names = tuple(f"{prefix}{fold}{number}" for number in range(n))
        return Predictions(
            slides=names,
            target=CLASSES,
            answers=answers,
            labels=labels,
            patients=tuple(f"{prefix}{fold}p{number // 2}" for number in range(n)),
            folds=(fold,) * n,
        )

    folds = ("one", "two")
    return Predictions.concatenate([part(fold, "t") for fold in folds]), {
        fold: part(fold, "v") for fold in folds
    }


def test_coverage_by_class_and_site_is_that_of_a_naive_loop() -> None:
    test, validation = tables()
    sites = {slide: f"s{number % 2}" for number, slide in enumerate(test.slides)}
    found = measure_guarantees(test, validation, coverage=0.8, sites=sites)
    limits = thresholds(validation, 0.8)
    labels, answers = test.truth
    hits, sizes = [], []
    for fold, label, answer in zip(test.folds or (), labels.tolist(), answers, strict=True):
        chosen = [c for c in range(3) if 1 - answer[c] <= limits[fold]]
        hits.append(label in chosen)
        sizes.append(len(chosen))
    rows = {row.group: row for row in found.rows}
    assert list(rows) == ["all slides", "a", "b", "c", "site s0", "site s1"]
    masks = {"all slides": labels >= 0, "b": labels == 1, "site s1": np.arange(180) % 2 == 1}
    for group, mask in masks.items():
        assert rows[group].covered == pytest.approx(np.array(hits)[mask].mean())
        assert rows[group].size == pytest.approx(np.array(sizes)[mask].mean())
        assert rows[group].abstained == pytest.approx((np.array(sizes)[mask] != 1).mean())
        assert rows[group].low < rows[group].covered < rows[group].high
    assert (rows["all slides"].slides, rows["all slides"].patients) == (180, 90)


def test_wilsons_interval_is_that_of_scipy() -> None:
    from scipy.stats import binomtest

    expected = binomtest(17, 20).proportion_ci(method="wilson")
    found = wilson(17 / 20, 20)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_the_risk_of_what_is_kept_is_that_of_a_naive_loop() -> None:
    test, _ = tables()
    labels, answers = test.truth
    for point in selective_risk(test):
        kept = sorted(range(180), key=lambda row: -answers[row].max())[: round(180 * point.kept)]
        expected = np.mean([answers[row].argmax() != labels[row] for row in kept])
        assert point.risk == pytest.approx(expected)
    assert point.kept == 1
    alone = measure_guarantees(test, {})  # the risk needs no sets
    assert (alone.rows, list(alone.risks)) == ((), list(selective_risk(test)))
    numbers = Regression()
    plain = Predictions(slides=("s",), target=numbers, answers=np.ones((1, 1)), labels=np.ones(1))
    assert list(selective_risk(plain)) == []


def test_what_cannot_be_promised_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"share between 0 and 1, such as 0\.9, not 90"):
        thresholds({}, 90)
    plain = Predictions(
        slides=("s",), target=Regression(), answers=np.ones((1, 1)), labels=np.ones(1)
    )
    with pytest.raises(CohortError, match=r"splits\.validation above 0"):
        measure_guarantees(plain, {})
    with pytest.raises(CohortError, match=r"for survival: .* censored .*\. Omit --coverage"):
        _ = Survival().conformal


MIXED = Several(
    tasks={
        "kind": Task(settings={"classes": ["a", "b", "c"]}),
        "genes": Task(kind="multilabel", settings={"labels": ["EGFR", "KRAS"]}),
        "death": Task(kind="survival"),
    }
)


def mixed(fold: str, prefix: str, rng: np.random.Generator, n: int = 60) -> Predictions:
    """Several targets, of which the second label is known on every other slide."""
    kinds, answers = probabilities(n, 3, rng)
    genes = [probabilities(n, 2, rng) for _ in range(2)]
    known = np.where(np.arange(n) % 2, genes[1][0], -1)
    times = np.stack([rng.exponential(size=n), np.ones(n)], axis=1)
    columns = [kinds, genes[0][0], known, *times.T]
    found = [answers, *(own[:, 1:] for _, own in genes), rng.normal(size=(n, 1))]
    return Predictions(
        slides=tuple(f"{prefix}{fold}{k}" for k in range(n)),
        target=MIXED,
        answers=np.concatenate(found, axis=1),
        labels=np.stack(columns, axis=1).astype(float),
        folds=(fold,) * n,
    )


def test_each_of_several_targets_has_the_sets_that_it_has_alone_and_survival_has_none() -> None:
    rng = np.random.default_rng(8)
    test, held = mixed("one", "t", rng), mixed("one", "v", rng)
    found = measure_each(test, {"one": held}, coverage=0.8)
    assert list(found) == ["kind", "genes.EGFR", "genes.KRAS"]
    for name, column in (("genes.EGFR", 0), ("genes.KRAS", 1)):
        alone = []
        for table in (test, held):
            own = table.part("genes")
            labels = np.asarray(own.labels)[:, column]
            rows = np.flatnonzero(labels >= 0)
            alone.append((labels[rows].astype(int), own.answers[rows, column]))
        (labels, p), (truth, q) = alone
        misfit = np.sort(np.abs(truth - q))
        limit = misfit[math.ceil((len(misfit) + 1) * 0.8) - 1]
        covered = np.abs(labels - p) <= limit + 1e-12
        assert found[name].rows[0].covered == pytest.approx(covered.mean())
        assert found[name].rows[0].slides == len(labels)
        assert found[name].risks[-1].risk == pytest.approx(((p > 0.5) != labels).mean())
    assert found["kind"] == measure_guarantees(
        test.part("kind"), {"one": held.part("kind")}, coverage=0.8
    )


def test_a_fold_whose_validation_part_has_no_label_of_a_target_has_sets_that_hold_all() -> None:
    rng = np.random.default_rng(9)
    test, held = mixed("one", "t", rng), mixed("one", "v", rng)
    bare = replace(held, labels=np.where([0, 0, 1, 0, 0], -1, held.labels))
    row = measure_each(test, {"one": bare}, coverage=0.8)["genes.KRAS"].rows[0]
    assert (row.covered, row.size, row.abstained) == (1, 2, 1)


def test_with_too_few_patients_a_set_holds_everything_and_a_note_says_so() -> None:
    test, validation = tables(4)
    found = measure_guarantees(test, validation, coverage=0.9)
    assert (found.rows[0].covered, found.rows[0].size) == (1, 3)
    assert "fewer than 9 patients" in found.notes[1]
    assert threshold(np.arange(9.0), [str(n) for n in range(9)], 0.9) == 8


# Novelty


def test_distances_are_those_of_a_naive_loop_and_reads_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    means = {f"s{n}": rng.normal(size=4).astype(np.float32) for n in range(12)}
    names = tuple(means)
    folds = [
        Fold(name="a", train=names[:8], validation=(), test=names[8:], seed=0),
        Fold(name="b", train=names[4:], validation=(), test=names[:4], seed=0),
    ]
    reference = make_reference(means, folds)
    assert reference is not None
    scale = np.std(list(means.values()), axis=0)
    held_out = []
    for fold in folds:
        for new in fold.test:
            apart = [np.sqrt(np.mean(((means[new] - means[t]) / scale) ** 2)) for t in fold.train]
            held_out.append(np.mean(sorted(apart)[:5]))
    np.testing.assert_allclose(reference.held_out, sorted(held_out), rtol=1e-5)
    reference.write(tmp_path / "n.safetensors")
    again = Reference.read(tmp_path / "n.safetensors", 4)
    far = means["s0"] + 50
    assert again.share_below(far) == 1
    assert again.distance(far) == reference.distance(far)
    with pytest.raises(RunError, match="its arrays do not fit the run"):
        Reference.read(tmp_path / "n.safetensors", 5)
    for number, held_out in enumerate((reference.held_out[::-1], reference.held_out - 9)):
        path = tmp_path / f"{number}.safetensors"
        replace(reference, held_out=np.ascontiguousarray(held_out)).write(path)
        with pytest.raises(RunError, match="numbers that cannot be used"):
            Reference.read(path, 4)
    (tmp_path / "n.safetensors").write_bytes(b"damaged")
    with pytest.raises(RunError, match=r"n\.safetensors is damaged"):
        Reference.read(tmp_path / "n.safetensors", 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("low", 50.0), ("low", -0.1), ("low", 0.95), ("high", 0.2), ("high", 1.5)],
        *[("size", -3.0), ("size", float("inf")), ("abstained", 7.0), ("abstained", -1.0)],
    ],
)
def test_a_coverage_that_cannot_have_been_measured_is_an_error(field: str, value: float) -> None:
    sound: dict[str, Any] = {"low": 0.8, "covered": 0.9, "high": 1.0, "size": 1.2}
    sound |= {"abstained": 0.1, "group": "all slides", "slides": 20, "patients": 20}
    CoverageRow(**sound)
    CoverageRow(**sound | {"size": None, "abstained": None})
    with pytest.raises(RecipeError):
        CoverageRow(**sound | {field: value})


def test_one_in_a_hundred_slides_of_the_same_kind_is_called_unlike() -> None:
    rng = np.random.default_rng(0)
    known, held, new = (rng.normal(size=(n, 6)).astype(np.float32) for n in (100, 400, 400))
    scale = np.ones(6, np.float32)
    reference = Reference(known, scale, np.sort(nearest(held, known, scale)))
    alarms = np.mean([reference.share_below(slide) > 0.99 for slide in new])
    assert alarms < 0.04
    assert np.mean([reference.share_below(slide + 4) > 0.99 for slide in new]) > 0.95
    one_by_one = [reference.distance(slide) for slide in new[:5]]
    assert one_by_one == pytest.approx(nearest(new[:5], known, scale).tolist(), rel=1e-12)


# A run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("graded")
    table = GradedBags(slides=60, patches=16, width=6).write(folder)
    recipe = Recipe(
        cohort=str(table),
        features=str(folder / "features"),
        target=Ordinal(),
        data=CohortConfig(label="grade"),
        model=ModelConfig(name="mean", settings={"dim": 8}),
        splits=SplitConfig(folds=2, validation=0.3),
        train=TrainConfig(epochs=4, warmup_epochs=0, lr=1e-2),
        loggers={},
    )
    with quick_scoring():
        return cross_validate(recipe, folder / "run", device="cpu", progress=False)


def caprmil(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_a_new_slide_gets_the_set_of_the_majority_and_a_strange_one_a_warning(
    run: Run, tmp_path: Path
) -> None:
    bag = GradedBags(slides=1, patches=16, width=6, seed=9).bag(0)
    for name, shift in (("usual", 0), ("strange", 30)):
        bags.write(tmp_path / f"{name}.h5", bag.features + np.float32(shift), encoder="synthetic")
    options = ("--force", "--device", "cpu", "--out", tmp_path / "new.csv", "--coverage", 0.8)
    output = caprmil("predict", run.folder, tmp_path, *options)
    assert "which guarantees 0.600" in output
    assert "1 slide unlike the training slides" in output
    found = Predictions.read(tmp_path / "new.csv", target=run.target)
    column = dict(zip(found.slides, found.extra["unlike_training"], strict=True))
    assert float(column["strange"]) == 1
    assert float(column["usual"]) <= 0.99
    answers = {
        fold.name: run.predict(
            {"usual": tmp_path / "usual.h5"}, fold=fold.name, force=True, device="cpu"
        ).answers[0]
        for fold in run.splits
    }
    sets = combined_sets(run.target, answers, thresholds(run.validation, 0.8))
    expected = " | ".join(np.array(run.target.titles)[sets[0]])
    row = found.slides.index("usual")
    assert found.extra["set"][row] == expected
    assert found.extra["abstain"][row] == ("no" if sets.sum() == 1 else "yes")


@pytest.mark.slow
def test_a_report_shows_coverage_by_grade_and_site_and_the_risk(run: Run) -> None:
    stored = read_guarantees(run.folder)[""]
    groups = [row.group for row in stored.rows]
    assert groups[:5] == ["all slides", "0", "1", "2", "3"]
    assert groups[5:] == ["site site_0", "site site_1", "site site_2"]
    assert "## Prediction sets" in (run.folder / "scores.md").read_text()
    page = run_report(run)
    assert "Prediction sets of 90" in page
    assert "MAE of grade of the test slides that are kept" in page


def test_the_mean_feature_is_the_same_in_memory_and_in_chunks(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    path = bags.write(tmp_path / "bag.h5", features, dtype="float32")
    expected = features.mean(axis=0)
    np.testing.assert_allclose(mean_feature(bags.read(path)), expected, rtol=1e-4)
    with bags.streaming(path, rows=7) as stream:
        np.testing.assert_allclose(mean_feature(stream), expected, rtol=1e-4)
