"""The synthetic tasks: the label depends on what each task states, and on nothing else."""

from itertools import pairwise

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from caprmil.synthetic.tasks import OUTLIER, PARTNER, SIGNAL, TASKS, TISSUE, Task, world

SMALL = {"rare": {"signal": 10}, "distractors": {"signal": 10}}


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param](patches=300, seed=7, **SMALL.get(request.param, {}))


def auc(task: Task, score: object, bags: int = 120) -> float:
    """Return the AUC of a score over bags."""
    found = [task.bag(number) for number in range(bags)]
    return roc_auc_score([label for _, label, _ in found], [score(bag) for bag, _, _ in found])


def test_a_bag_is_reproducible_and_differs_from_the_next(task: Task) -> None:
    (one, label, kinds), (again, same, _), (other, _, _) = task.bag(3), task.bag(3), task.bag(5)
    assert np.array_equal(one, again)
    assert label == same == 1
    assert not np.array_equal(one, other)
    assert one.shape == (300, 32)
    assert kinds.shape == (300,)
    assert one.dtype == np.float32


def test_the_oracle_separates_the_classes(task: Task) -> None:
    assert auc(task, task.oracle) > 0.95


def test_all_bags_have_the_same_number_of_patches(task: Task) -> None:
    assert {len(task.bag(number)[0]) for number in range(6)} == {300}


def test_rare_patches_are_only_in_positive_bags() -> None:
    task = TASKS["rare"](patches=200, signal=4)
    assert [(task.bag(n)[2] == SIGNAL).sum() for n in range(4)] == [0, 4, 0, 4]


def test_co_occurrence_adds_the_same_number_to_every_bag() -> None:
    task = TASKS["co-occurrence"](patches=300)
    kinds = [task.bag(number)[2] for number in range(40)]
    assert {int((each != TISSUE).sum()) for each in kinds} == {100}
    both = [(each == SIGNAL).any() and (each == PARTNER).any() for each in kinds]
    assert both == [False, True] * 20


def test_no_single_kind_decides_co_occurrence() -> None:
    task = TASKS["co-occurrence"](patches=300, seed=7)
    for kind in (SIGNAL, PARTNER):
        amount = auc(task, lambda bag, kind=kind: task.presence(bag, kind, 50))
        assert 0.35 < amount < 0.65


def test_a_linear_model_of_the_mean_solves_proportion_but_not_co_occurrence() -> None:
    found = {}
    for name in ("proportion", "co-occurrence"):
        task = TASKS[name](patches=300, seed=7)
        bags = [task.bag(number) for number in range(400)]
        means = np.stack([bag.mean(axis=0) for bag, _, _ in bags])
        labels = np.array([label for _, label, _ in bags])
        model = LogisticRegression(max_iter=1000).fit(means[:200], labels[:200])
        found[name] = roc_auc_score(labels[200:], model.decision_function(means[200:]))
    assert found["proportion"] > 0.85
    assert found["co-occurrence"] < 0.65


def test_distractors_have_the_largest_norm_and_are_in_both_classes() -> None:
    features, _, kinds = TASKS["distractors"](patches=400).bag(2)
    length = np.linalg.norm(features, axis=1)
    assert (kinds == OUTLIER).sum() > 10
    assert np.median(length[kinds == OUTLIER]) > length[kinds == TISSUE].max()


def test_a_batch_effect_hides_the_signal_along_its_direction() -> None:
    plain, shifted = TASKS["rare"](patches=300, signal=50), TASKS["batch-effect"](patches=300)
    direction = world(0, 32).directions[SIGNAL]

    def highest(bag: np.ndarray) -> float:
        return float(np.quantile(bag @ direction, 0.95))

    assert auc(plain, highest) > auc(shifted, highest) + 0.05


def test_other_seeds_have_other_directions() -> None:
    for one, other in pairwise(range(3)):
        assert abs(world(one, 32).directions[1] @ world(other, 32).directions[1]) < 0.9
    directions = world(0, 32).directions
    np.testing.assert_allclose(directions @ directions.T, np.eye(32), atol=1e-5)
