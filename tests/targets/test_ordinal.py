"""Ordinal grades: probabilities, loss and metrics against naive loops and scikit-learn."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, cohen_kappa_score, mean_absolute_error

from caprmil.errors import CohortError, RecipeError
from caprmil.estimators import MILClassifier
from caprmil.evaluation.comparison import compare
from caprmil.evaluation.predictions import Predictions
from caprmil.io.findings import Findings
from caprmil.report.grade_parts import GradeParts
from caprmil.synthetic import GradedBags
from caprmil.targets import Classification, Ordinal
from caprmil.training.recipe import ModelConfig

GRADES = Ordinal(classes=("0", "1", "2", "3"))
numbers = st.floats(-30, 30)


def drawn(n: int, seed: int, grades: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and probabilities that follow them in part."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(grades, size=n)
    logits = rng.normal(size=(n, grades)) + 1.5 * np.eye(grades)[labels]
    return labels, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


# Probabilities and loss


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5))
def test_probabilities_are_products_of_steps_and_fall_with_the_grade(
    rows: list[tuple[float, float, float]],
) -> None:
    outputs = torch.tensor(rows, dtype=torch.float64)
    found = GRADES.answer(outputs).numpy()
    for row, answer in zip(rows, found, strict=True):
        steps = [1 / (1 + np.exp(-value)) for value in row]
        at_least = [float(np.prod(steps[:grade])) for grade in range(4)]
        above = [*at_least[1:], 0.0]
        np.testing.assert_allclose(answer, np.subtract(at_least, above), atol=1e-12)
    GRADES.check_answers(found)
    above = GRADES.followed(found)
    assert (np.diff(above, axis=1) <= 1e-15).all()
    np.testing.assert_allclose(GRADES.followed(torch.from_numpy(found)).numpy(), above)


def test_the_loss_is_the_cross_entropy_of_the_steps_that_a_grade_answers() -> None:
    outputs, grades = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3, 0])
    total = torch.tensor(0.0, dtype=torch.float64)
    for row, grade in zip(outputs, grades.tolist(), strict=True):
        for step in range(3):
            if grade >= step:  # step k is asked only of bags that have reached grade k
                truth = torch.tensor(float(grade > step), dtype=torch.float64)
                total += F.binary_cross_entropy_with_logits(row[step], truth)
    found = GRADES.criterion([0, 1, 2, 3])(outputs, grades)
    torch.testing.assert_close(found, total / 6)
    own = GRADES.answer(outputs)[torch.arange(6), grades]
    torch.testing.assert_close(found, -own.log().mean())


def test_the_loss_is_finite_and_has_gradients_at_extreme_outputs() -> None:
    outputs = torch.tensor([[200.0, -200.0, 200.0]], requires_grad=True)
    loss = GRADES.criterion([0])(outputs, torch.tensor([3]))
    loss.backward()
    assert outputs.grad is not None
    assert torch.isfinite(loss)
    assert torch.isfinite(outputs.grad).all()
    assert outputs.grad[0, 1] < 0


def test_balanced_weights_multiply_the_loss_of_a_bag_by_the_rarity_of_its_grade() -> None:
    labels = [0, 0, 0, 1, 2, 3]
    balanced = replace(GRADES, class_weights="balanced").criterion(labels)
    plain, outputs = GRADES.criterion(labels), torch.randn(1, 3)
    for grade, times in ((0, 3), (1, 1)):
        one = torch.tensor([grade])
        expected = plain(outputs, one) * 6 / 4 / times
        torch.testing.assert_close(balanced(outputs, one), expected)


def test_a_model_has_an_output_for_each_step_and_models_of_classes_are_refused() -> None:
    assert ModelConfig(name="mean").build(8, GRADES).n_outputs == 3
    with pytest.raises(RecipeError, match="clam needs classes, and the target ordinal has none"):
        ModelConfig(name="clam").build(8, GRADES)


# Evidence


def test_a_contrast_is_linear_and_is_the_log_odds_of_its_step() -> None:
    outputs = torch.randn(5, 3, dtype=torch.float64)
    other = torch.randn(5, 3, dtype=torch.float64)
    answers = GRADES.answer(outputs).numpy()
    for step, contrast in enumerate(GRADES.contrasts):
        assert contrast.name == f"a grade above {step}"
        joined = contrast.of(2 * outputs - other)
        torch.testing.assert_close(joined, 2 * contrast.of(outputs) - contrast.of(other))
        above, equal = answers[:, step + 1 :].sum(axis=1), answers[:, step]
        np.testing.assert_allclose(contrast.of(outputs), np.log(above / equal))


def test_evidence_is_shown_for_the_step_to_the_predicted_grade() -> None:
    for grade, (step, sign) in enumerate([(0, -1), (0, 1), (1, 1), (2, 1)]):
        answer = GRADES.as_answers(np.array([grade]))[0]
        assert (GRADES.contrast_of(answer), GRADES.sign_of(answer)) == (step, sign)


# Labels


def read(cells: list[str], **options: tuple[str, ...]) -> tuple[Ordinal, list[int], Findings]:
    found = Findings()
    table = {f"s{n}": cell for n, cell in enumerate(cells)}
    target, labels = Ordinal(**options).read(table, "isup", found, required=True)
    return target, list(labels.values()), found


def test_numbers_are_in_their_order() -> None:
    target, labels, found = read(["10", "9", "2", "10"])
    assert target.classes == ("2", "9", "10")
    assert labels == [2, 1, 0, 2]
    assert found.problems == []


def test_words_need_their_order() -> None:
    _, _, found = read(["low", "high", "medium"])
    assert "The order of the grades in column isup is not known: high, low, medium." in (
        problem := "\n".join(found.problems)
    )
    assert '[target] classes = ["high", "low", "medium"], in the right order' in problem
    target, labels, found = read(["low", "high", "medium"], classes=("low", "medium", "high"))
    assert (labels, found.problems) == ([0, 2, 1], [])
    assert target.columns == ("prob_low", "prob_medium", "prob_high")


# Metrics

REFERENCES = {
    "kappa": lambda y, p: cohen_kappa_score(y, p, weights="quadratic", labels=range(4)),
    "grade_mae": mean_absolute_error,
    "adjacent_accuracy": lambda y, p: np.mean([abs(a - b) < 2 for a, b in zip(y, p, strict=True)]),
    "accuracy": accuracy_score,
}


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=20, deadline=None)
@given(n=st.integers(8, 60), seed=st.integers(0, 10**6))
def test_a_metric_is_that_of_another_library(name: str, n: int, seed: int) -> None:
    labels, answers = drawn(n, seed)
    expected = REFERENCES[name](labels, answers.argmax(axis=1))
    assert GRADES.metrics[name].function(labels, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["grade_mae", "adjacent_accuracy"])
def test_draws_scored_together_equal_draws_scored_one_by_one(name: str) -> None:
    labels, answers = drawn(12, 3)
    metric = GRADES.metrics[name]
    weights = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=30).astype(float)
    weights[0] = 0
    plain = replace(metric, weighted=None).draws(labels, answers, weights)
    np.testing.assert_allclose(metric.draws(labels, answers, weights), plain, atol=1e-12)


def test_three_grades_have_no_metric_of_two_classes() -> None:
    assert "ece_positive" not in Ordinal(classes=("a", "b", "c")).metrics
    assert "ece_positive" in Ordinal(classes=("a", "b")).metrics


# Comparison


def table(target: Classification, labels: np.ndarray, answers: np.ndarray) -> Predictions:
    names = tuple(f"s{n:03d}" for n in range(len(labels)))
    return Predictions(slides=names, target=target, answers=answers, labels=labels, patients=names)


def test_grades_are_compared_with_classes_in_the_order_of_the_grades() -> None:
    """Sorted as words, the classes are high, low, medium, which is another kappa."""
    words = ("low", "medium", "high")
    labels, answers = drawn(60, 1, grades=3)
    _, others = drawn(60, 2, grades=3)
    order = [2, 0, 1]  # of high, low, medium among the grades
    classes = Classification(classes=("high", "low", "medium"))
    tables = {
        "classes": table(classes, np.argsort(order)[labels], others[:, order]),
        "grades": table(Ordinal(classes=words), labels, answers),
    }
    found = compare(tables, draws=50)
    differences = {d.metric: d for d in found.differences}
    assert {"kappa", "accuracy", "grade_mae", "adjacent_accuracy"} <= set(differences)
    for name in ("kappa", "grade_mae"):
        values = [REFERENCES[name](labels, p.argmax(axis=1)) for p in (others, answers)]
        assert differences[name].of_first.mean == pytest.approx(values[0])
        assert differences[name].of_second.mean == pytest.approx(values[1])
    assert "The metrics are those of ordinal, also for the tables of classification." in found.notes


# Known truth

COHORT = GradedBags(slides=300, patches=30, width=4, seed=3)
MARGIN = 0.05  # of quadratic kappa, below the oracle


@pytest.fixture(scope="module")
def graded() -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Bags, grades, and the grades that an oracle predicts."""
    bags = [COHORT.bag(number) for number in range(COHORT.slides)]
    best = np.array([COHORT.oracle(int(bag.planted.sum())).argmax() for bag in bags])
    return [bag.features for bag in bags], np.array([bag.grade for bag in bags]), best


def grader(**changes: object) -> MILClassifier:
    options: dict[str, Any] = {"epochs": 12, "lr": 1e-2, "warmup_epochs": 0, "batch_size": 8}
    options |= {"device": "cpu", "settings": {"dim": 8}, "grades": [0, 1, 2, 3]}
    return MILClassifier("mean", **options | changes)


def kappa(labels: np.ndarray, predicted: np.ndarray) -> float:
    return float(cohen_kappa_score(labels, predicted, weights="quadratic"))


def test_the_oracle_of_the_generated_grades_is_the_best_guess_of_many_draws() -> None:
    small = GradedBags(patches=5, grades=3)
    rng = np.random.default_rng(0)
    shares = rng.random(200_000)
    planted = rng.binomial(5, shares)
    for count in range(6):
        grades = (3 * shares[planted == count]).astype(int)
        expected = np.bincount(grades, minlength=3) / len(grades)
        np.testing.assert_allclose(small.oracle(count), expected, atol=0.01)


@pytest.mark.slow
def test_generated_grades_are_learnt_nearly_as_well_as_by_the_oracle(
    graded: tuple[list[np.ndarray], np.ndarray, np.ndarray],
) -> None:
    bags, grades, best = graded
    predicted = grader().fit(bags[:150], grades[:150]).predict(bags[150:])
    assert kappa(grades[150:], best[150:]) > 0.9
    assert kappa(grades[150:], predicted) > kappa(grades[150:], best[150:]) - MARGIN


def test_permuted_grades_are_predicted_by_chance(
    graded: tuple[list[np.ndarray], np.ndarray, np.ndarray],
) -> None:
    bags, grades, _ = graded
    mixed = np.random.default_rng(0).permutation(grades)
    predicted = grader(epochs=4).fit(bags[:150], mixed[:150]).predict(bags[150:])
    assert abs(kappa(mixed[150:], predicted)) < 0.2


# Estimator and report


def test_the_estimator_takes_grades_in_words_from_low_to_high() -> None:
    bags = [np.full((3, 2), value, dtype=np.float32) for value in (0, 1, 2, 0, 1, 2)]
    words = ["benign", "mild", "severe"] * 2
    fitted = grader(epochs=1, grades=["benign", "mild", "severe", "worst"]).fit(bags, words)
    assert fitted.classes_.tolist() == ["benign", "mild", "severe", "worst"]
    assert isinstance(fitted.target_, Ordinal)
    assert fitted.predict_proba(bags).shape == (6, 4)
    with pytest.raises(CohortError, match="not among the grades: severe"):
        grader(grades=["benign", "mild"]).fit(bags, words)
    with pytest.raises(RecipeError, match="names one twice"):
        grader(grades=["benign", "benign"]).fit(bags, words)


def test_a_report_lists_mistakes_by_several_grades_first() -> None:
    answers = np.array([[0.9, 0.1, 0, 0], [0.4, 0.3, 0.2, 0.1], [0, 0, 0, 1.0]])
    predictions = table(GRADES, np.array([1, 3, 3]), answers)
    parts = GradeParts(SimpleNamespace(target=GRADES))  # type: ignore[arg-type]
    assert parts.worst(predictions, 5) == [1, 0]
    assert parts.mistake(predictions, 1).endswith("3 grades apart")
    assert parts.bar_order(answers[0]) == [0, 1, 2, 3]
