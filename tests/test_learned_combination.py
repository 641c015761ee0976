"""The learned combination of slides: fitted as a naive loop would, without test patients."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.metrics import log_loss

from caprmil.cohort.folds import SplitConfig
from caprmil.errors import RecipeError, RunError
from caprmil.evaluation.learned_combination import (
    SPREAD,
    LearnedCombination,
    fit_combination,
)
from caprmil.evaluation.patient_answers import combine_slides
from caprmil.evaluation.predictions import Predictions
from caprmil.features.batches import Sample
from caprmil.runs.inference import predict_samples
from caprmil.runs.patient_inputs import group_bags
from caprmil.runs.run import COMBINATION, Run
from caprmil.targets import Classification, Regression, Task, find_target
from caprmil.training.cross_validation import cross_validate
from patient_cohort import patient_recipe, with_epochs, write_patients
from quick_scoring import quick_scoring

CLASSES = Classification(classes=("no", "yes"))


def answers_of_slides(patients: int, seed: int) -> Predictions:
    """Answers of a model that sees a signal, which one slide of each positive patient has."""
    rng = np.random.default_rng(seed)
    chances, names, labels = [], [], []
    for patient in range(patients):
        positive, n = patient % 2, int(rng.integers(1, 6))
        own = rng.normal(-1, 0.7, size=n)
        if positive:
            own[0] += 2
        chances += (1 / (1 + np.exp(-own))).tolist()
        names += [f"p{patient}"] * n
        labels += [positive] * n
    values = np.array(chances)
    return Predictions(
        slides=tuple(f"s{n}" for n in range(len(values))),
        target=CLASSES,
        answers=np.stack([1 - values, values], axis=1),
        labels=np.array(labels),
        patients=tuple(names),
        folds=("fold-0",) * len(values),
    )


def loss_by_hand(table: Predictions, slopes: NDArray[np.float64]) -> float:
    """The loss of patients with a softmax over slides, patient by patient."""
    assert table.patients is not None
    assert table.labels is not None
    spread, truth, found = table.answers.std(axis=0), [], []
    for name in dict.fromkeys(table.patients):
        own = [row for row, other in enumerate(table.patients) if other == name]
        weights = [np.exp(sum(slopes * table.answers[row] / spread)) for row in own]
        pairs = zip(weights, own, strict=True)
        found.append(sum(w * table.answers[row] for w, row in pairs) / sum(weights))
        truth.append(table.labels[own[0]])
    return log_loss(truth, np.array(found)) + sum(slopes**2) / (2 * SPREAD**2 * len(found))


def test_slopes_minimise_the_loss_of_patients_as_a_naive_search_finds_it() -> None:
    table = answers_of_slides(20, seed=0)
    found = fit_combination(table, "validation")
    naive = minimize(lambda s: loss_by_hand(table, s), np.zeros(2), method="Nelder-Mead")
    slopes = np.array([*found.slopes.values()])
    assert loss_by_hand(table, slopes) == pytest.approx(naive.fun, abs=1e-5)
    np.testing.assert_allclose(slopes, naive.x, atol=0.02)
    penalty = sum(slopes**2) / (2 * SPREAD**2 * 20)
    assert found.loss == pytest.approx(loss_by_hand(table, slopes) - penalty)
    assert found.loss_of_mean == pytest.approx(loss_by_hand(table, np.zeros(2)))


def test_new_patients_with_the_signal_in_one_slide_have_a_lower_loss_than_by_the_mean() -> None:
    learned = {"fold-0": fit_combination(answers_of_slides(40, seed=1), "validation")}
    new = answers_of_slides(200, seed=2)
    losses = {}
    for how in ("learned", "mean"):
        found = combine_slides(new, how, learned=learned)  # type: ignore[arg-type]
        losses[how] = log_loss(found.labels, found.answers)
    assert losses["learned"] < losses["mean"] - 0.02
    assert learned["fold-0"].slopes["prob_yes"] > 0.5


def test_slides_that_say_nothing_keep_about_the_mean_and_one_slide_is_its_own_answer() -> None:
    table = answers_of_slides(20, seed=3)
    assert table.labels is not None
    rng = np.random.default_rng(0)
    by_patient = {name: int(rng.integers(2)) for name in dict.fromkeys(table.patients or ())}
    shuffled = replace(table, labels=np.array([by_patient[p] for p in table.patients or ()]))
    found = fit_combination(shuffled, "validation")
    assert all(abs(slope) < 1.5 for slope in found.slopes.values())
    assert found.combine(table.answers[:1]) == pytest.approx(table.answers[0])
    alone = replace(table, patients=table.slides)
    assert set(fit_combination(alone, "train").slopes.values()) == {0.0}
    assert fit_combination(alone, "train").patients == 0


@pytest.mark.parametrize("how", ["mean", "learned"])
def test_a_mean_of_certain_answers_is_certain_and_no_more(how: str) -> None:
    learned = LearnedCombination(
        slopes={"a": 1.0},
        spreads=(0.3,),
        fitted_on="validation",
        patients=2,
        loss=0.0,
        loss_of_mean=0.0,
    )
    target = find_target("multilabel")(labels=("a",))
    for slides in range(1, 60):
        answers = np.ones((slides, 1))
        found = learned.combine(answers) if how == "learned" else target.combine(answers, how)
        assert found.tolist() == [1.0]


def test_numbers_are_combined_too() -> None:
    table = answers_of_slides(20, seed=0)
    assert table.labels is not None
    assert table.patients is not None
    # The value of a patient is the highest of its slides.
    values = table.answers[:, 1] * 10
    highest = {
        p: max(v for v, q in zip(values, table.patients, strict=True) if q == p)
        for p in table.patients
    }
    truth = np.array([highest[p] for p in table.patients])
    numbers = replace(
        table, target=Regression(mean=0.0, std=1.0), answers=values[:, None], labels=truth
    )
    found = fit_combination(numbers, "validation", fitted=Regression(mean=0.0, std=2.5))
    assert found.loss < found.loss_of_mean / 2
    # In other units, errors and their scale are larger, and the weights the same.
    larger = replace(numbers, answers=numbers.answers * 1000, labels=truth * 1000)
    again = fit_combination(larger, "validation", fitted=Regression(mean=0.0, std=2500.0))
    assert again.slopes == pytest.approx(found.slopes, abs=1e-3)
    assert again.loss == pytest.approx(found.loss * 1e6, rel=1e-3)


def test_answers_that_are_equal_up_to_rounding_do_not_decide() -> None:
    slides = answers_of_slides(20, 0)
    first = 0.3 + 1e-16 * (np.arange(len(slides)) % 2)
    answers = np.stack([first, 1 - first], axis=1)
    assert 0 < answers.std(axis=0).max() < 1e-15
    found = fit_combination(replace(slides, answers=answers), "validation")
    assert found.spreads == (1.0,) * answers.shape[1]


@pytest.mark.parametrize(
    ("spread", "slope"), [(1e-300, 1.0), (0.0, 1.0), (float("inf"), 1.0), (1.0, 1e7)]
)
def test_a_combination_that_gives_no_weights_is_an_error(spread: float, slope: float) -> None:
    losses: dict[str, Any] = {"loss": 0.0, "loss_of_mean": 0.0, "patients": 3}
    with pytest.raises(RecipeError):
        LearnedCombination(slopes={"a": slope}, spreads=(spread,), fitted_on="validation", **losses)


def test_each_label_and_each_target_learns_its_own_weights_as_if_it_were_alone() -> None:
    first, second = answers_of_slides(20, seed=0), answers_of_slides(20, seed=0)
    assert first.labels is not None
    assert first.patients is not None
    flipped = 1 - first.labels  # of the other label, the lowest answer counts
    labels = find_target("multilabel")(labels=("mut", "wild"))
    both = replace(
        first,
        target=labels,
        answers=np.stack([first.answers[:, 1], second.answers[:, 0]], axis=1),
        labels=np.stack([first.labels, flipped], axis=1),
    )
    found = fit_combination(both, "validation")
    alone = [fit_combination(both.part(name), "validation") for name in labels.parts]
    assert found.groups == (1, 1)
    assert found.slopes["mut.positive"] > 0 > found.slopes["wild.positive"]
    for number, own in enumerate(alone):
        assert [*found.slopes.values()][number] == pytest.approx(next(iter(own.slopes.values())))
    rows = [row for row, name in enumerate(first.patients) if name == "p1"]
    weights = found.weights(both.answers[rows])
    np.testing.assert_allclose(weights.sum(axis=0), 1)
    for number, own in enumerate(alone):
        slope = next(iter(own.slopes.values())) / own.spreads[0]
        by_hand = np.exp(slope * both.answers[rows, number])
        np.testing.assert_allclose(weights[:, number], by_hand / by_hand.sum())
    answer = combine_slides(both, "learned", learned={"fold-0": found})
    by_hand = (weights * both.answers[rows]).sum(axis=0)
    np.testing.assert_allclose(answer.answers[list(answer.slides).index("p1")], by_hand)


def test_a_target_of_several_numbers_has_one_weight_for_all_of_them() -> None:
    table = answers_of_slides(20, seed=0)
    assert table.labels is not None
    tasks = {"grade": Task(settings={"classes": ["no", "yes"]}), "size": Task(kind="regression")}
    several = find_target("several")(tasks=tasks)
    both = replace(
        table,
        target=several,
        answers=np.concatenate([table.answers, table.answers[:, :1]], axis=1),
        labels=np.stack([table.labels, table.answers[:, 0]], axis=1),
    )
    found = fit_combination(both, "validation")
    assert found.groups == (2, 1)
    weights = found.weights(both.answers[:5])
    np.testing.assert_array_equal(weights[:, 0], weights[:, 1])
    assert not np.allclose(weights[:, 0], weights[:, 2])
    alone = fit_combination(table, "validation")
    np.testing.assert_allclose(weights[:, 0], alone.weights(table.answers[:5])[:, 0])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run whose combination of slides is learned."""
    folder = tmp_path_factory.mktemp("learned")
    recipe = with_epochs(patient_recipe(write_patients(folder), combine="learned"), 2)
    recipe = replace(recipe, splits=SplitConfig(folds=2, validation=0.25))
    with quick_scoring():
        yield cross_validate(recipe, folder / "run", device="cpu", progress=False)


def slides_answered(run: Run, part: str) -> Predictions:
    """The answers of the first fold for the slides of one of its parts."""
    fold = run.splits[0]
    slides = getattr(fold, part)
    samples = [Sample(slide, Path(run.paths[slide])) for slide in slides]
    return Predictions(
        slides=slides,
        target=run.target,
        answers=predict_samples(run.trained(fold.name), samples),
        labels=run.target.as_labels(run.target.parse_label(run.labels[s]) for s in slides),
        patients=tuple(run.patients[slide] for slide in slides),
        folds=(fold.name,) * len(slides),
    )


@pytest.mark.slow
def test_a_run_learns_from_validation_patients_alone_and_answers_test_patients(run: Run) -> None:
    fold = run.splits[0]
    owners = {
        part: {run.patients[s] for s in getattr(fold, part)} for part in ("validation", "test")
    }
    assert not owners["validation"] & owners["test"]
    saved = run.combinations([fold.name])[fold.name]
    again = fit_combination(slides_answered(run, "validation"), "validation")
    assert saved.slopes == pytest.approx(again.slopes, abs=1e-2)
    assert saved.fitted_on == "validation"

    tested = slides_answered(run, "test")
    for name in owners["test"]:
        rows = [row for row, own in enumerate(tested.patients or ()) if own == name]
        answer = saved.combine(tested.answers[rows])
        row = run.predictions.slides.index(name)
        np.testing.assert_allclose(answer, run.predictions.answers[row], atol=1e-5)


@pytest.mark.slow
def test_a_learned_combination_predicts_evaluates_and_is_reported(run: Run, tmp_path: Path) -> None:
    fold = run.splits[0]
    names = {run.patients[s] for s in fold.test}
    paths = {slide: Path(path) for slide, path in run.paths.items() if run.patients[slide] in names}
    grouped, patients = group_bags(run, paths)
    found = run.predict(
        grouped, patients=patients, device="cpu"
    )  # only this fold has not seen them
    assert set(found.slides) == names
    assert "unlike_training" in found.extra
    for name, answer in zip(found.slides, found.answers, strict=True):
        row = run.predictions.slides.index(name)
        np.testing.assert_allclose(answer, run.predictions.answers[row], atol=1e-5)

    new = write_patients(tmp_path, patients=4, seed=1, prefix="q")
    scored = run.evaluate(new, tmp_path / "features", device="cpu")
    bags = {path.stem: path for path in sorted((tmp_path / "features").glob("*.h5"))}
    owners = {name: name.partition("_")[0] for name in bags}
    answers = run.predict(bags, patients=owners, device="cpu")
    for name, answer in zip(answers.slides, answers.answers, strict=True):
        own = [row for row, other in enumerate(scored.slides) if other == name]
        assert len(own) == 2  # one for each fold
        np.testing.assert_allclose(answer, scored.answers[own].mean(axis=0), atol=1e-5)

    text = (run.folder / "scores.md").read_text()
    assert "Combination of slides" in text
    assert "mean of slides" in text
    assert "mean of slides" in run.baselines

    damaged = tmp_path / "damaged"
    shutil.copytree(run.folder, damaged)
    (damaged / "folds" / fold.name / COMBINATION).write_text("{}")
    with pytest.raises(RunError, match=r"combination\.json"):
        Run(damaged).predict(grouped, patients=patients, device="cpu")
