"""Explanations and reports of patients whose slides are answered alone and combined."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from caprmil.cohort.folds import SplitConfig
from caprmil.explain import ExplainedSlide, explain_slide, locate_slide
from caprmil.explain.explanation_folder import write_explanation
from caprmil.features.bag_files import SlideBags
from caprmil.report import slide_report, write_run_report
from caprmil.runs.run import Run
from caprmil.training.cross_validation import cross_validate
from patient_cohort import patient_recipe, with_epochs, write_patients
from quick_scoring import quick_scoring

pytestmark = pytest.mark.slow

PATIENT = "p05"  # of three slides


@pytest.fixture(scope="module", params=["mean", "max", "learned"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    recipe = with_epochs(patient_recipe(write_patients(folder, 12), combine=request.param), 2)
    recipe = replace(recipe, splits=SplitConfig(folds=2, validation=0.25))
    with quick_scoring():
        return cross_validate(recipe, folder / "run", device="cpu", progress=False)


@pytest.fixture(scope="module")
def explained(run: Run) -> ExplainedSlide:
    return explain_slide(run, locate_slide(run, PATIENT))


def weights_by_hand(run: Run, answers: np.ndarray) -> np.ndarray:
    """The weight of each slide, from their answers (S, 2)."""
    if run.combine == "mean":
        return np.full(len(answers), 1 / len(answers))
    if run.combine == "max":
        return (answers[:, 1] == answers[:, 1].max()).astype(float)
    (fold,) = [fold.name for fold in run.splits if f"{PATIENT}_0" in fold.test]
    learned = run.combinations([fold])[fold]
    steep = np.array([*learned.slopes.values()]) / np.array(learned.spreads)
    weights = np.exp(answers @ steep)
    return weights / weights.sum()


def test_the_answer_of_a_patient_is_that_of_the_run_and_the_sum_of_its_slides(
    run: Run, explained: ExplainedSlide
) -> None:
    table, combination = run.predictions, explained.combination
    assert combination is not None
    expected = table.answers[table.slides.index(PATIENT)]
    np.testing.assert_allclose(explained.answer.mean, expected, atol=1e-6)
    assert explained.label == "tumour"

    alone = [explain_slide(run, locate_slide(run, name)) for name in combination.slides]
    answers = np.stack([each.answer.mean for each in alone])
    weights = weights_by_hand(run, answers)
    np.testing.assert_allclose(combination.answers, answers, atol=1e-6)
    np.testing.assert_allclose(combination.weights[:, 1], weights, atol=1e-6)
    np.testing.assert_allclose(combination.adds, weights[:, None] * answers, atol=1e-6)
    np.testing.assert_allclose(combination.adds.sum(axis=0), expected, atol=1e-6)


def test_the_evidence_of_a_patient_is_that_of_the_slides_times_their_weights(
    run: Run, explained: ExplainedSlide
) -> None:
    explanation, combination = explained.explanation, explained.combination
    assert combination is not None
    assert explanation.exact
    assert explanation.slide_of is not None
    weights = combination.weights[:, 1]
    logits = np.zeros(2)
    for number, name in enumerate(combination.slides):
        own = explain_slide(run, locate_slide(run, name), regions=False).explanation
        rows = explanation.slide_of == number
        evidence = weights[number] * own.evidence
        np.testing.assert_allclose(explanation.evidence[rows], evidence, atol=1e-6)
        attention = weights[number] * own.attention
        np.testing.assert_allclose(explanation.attention[rows], attention, atol=1e-6)
        np.testing.assert_allclose(explanation.assignments[:, :, rows], own.assignments, atol=1e-6)
        logits += weights[number] * own.logits
    np.testing.assert_allclose(explanation.logits, logits, atol=1e-5)
    assert explanation.gap < 1e-5
    assert explanation.attention.sum() == pytest.approx(1, abs=1e-5)


def test_the_folder_of_a_patient_lists_answers_and_weights_of_slides(
    run: Run, explained: ExplainedSlide, tmp_path: Path
) -> None:
    write_explanation(tmp_path, explained, run)
    combination = explained.combination
    assert combination is not None
    with (tmp_path / "slides.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["slide"] for row in rows] == list(combination.slides)
    adds = [float(row["adds-prob_tumour"]) for row in rows]
    assert sum(adds) == pytest.approx(explained.answer.mean[1], abs=1e-6)
    for row in rows:
        product = float(row["weight-prob_tumour"]) * float(row["answer-prob_tumour"])
        assert float(row["adds-prob_tumour"]) == pytest.approx(product, abs=1e-6)
        patches = pd.read_csv(tmp_path / "slides" / row["slide"] / "patches.csv")
        assert len(patches) == int(row["patches"])


def test_the_report_of_a_patient_shows_the_answer_and_the_weight_of_each_slide(
    run: Run, explained: ExplainedSlide
) -> None:
    text, combination = slide_report(run, explained), explained.combination
    assert combination is not None
    assert "Patient report" in text
    assert combination.in_words() in text
    listed = re.findall(
        r'<th scope="row">(p05_\d)</th><td>\d+</td><td>(\S+ \S+)</td><td data-value="(\S+?)"', text
    )
    assert [name for name, *_ in listed] == list(combination.slides)
    shown = [run.target.show(answer) for answer in combination.answers]
    assert [answer for _, answer, _ in listed] == shown
    weights = [float(weight) for *_, weight in listed]
    np.testing.assert_allclose(weights, combination.weights[:, 0])
    # A lead of the mean logit has no probability; that of the one slide that decides has one.
    assert ("corresponds to a probability" in text) == (run.combine == "max")


def test_a_new_patient_is_a_folder_of_bags_and_answered_as_in_predict(
    run: Run, tmp_path: Path
) -> None:
    write_patients(tmp_path, patients=3, seed=1, prefix="q")
    files = sorted((tmp_path / "features").glob("q02_*.h5"))
    folder = tmp_path / "q02"
    folder.mkdir()
    for path in files:
        path.rename(folder / path.name)
    bags = {path.stem: path for path in sorted(folder.glob("*.h5"))}
    expected = run.predict(bags, patients=dict.fromkeys(bags, "q02"), device="cpu")
    found = explain_slide(run, locate_slide(run, folder))
    assert isinstance(found.reference.bag, SlideBags)
    assert len(found.answer.by_fold) == 2
    np.testing.assert_allclose(found.answer.mean, expected.answers[0], atol=1e-6)
    assert found.unlike == pytest.approx(float(expected.extra["unlike_training"][0]), abs=1e-4)
    mean = np.mean([*found.answer.by_fold.values()], axis=0)
    np.testing.assert_allclose(mean, found.answer.mean)


def test_the_report_of_a_run_links_reports_of_patients(run: Run) -> None:
    index, written, missing = write_run_report(run, slides=1)
    assert not missing
    names = {path.stem for path in written}
    assert names
    assert names <= {*run.patients.values()}
    for name in names:
        assert f'href="slides/{name}.html"' in index.read_text()
