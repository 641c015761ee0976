"""The tasks of the hard benchmark: what each asks is really what decides."""

from itertools import pairwise

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from caprmil.synthetic.tasks import LOUD, PARTNER, SIGNAL, TASKS, TISSUE, Task, world

SMALL = {"rare": {"signal": 10}, "distractors": {"signal": 10}}


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param](patches=300, seed=7, **SMALL.get(request.param, {}))


def areas(task: Task, score: object, bags: int = 120) -> float:
    """Return the area of a score of features, over bags."""
    found = [task.bag(number) for number in range(bags)]
    return roc_auc_score([label for _, label, _ in found], [score(bag) for bag, _, _ in found])


def test_a_bag_is_the_same_every_time_and_unlike_the_next(task: Task) -> None:
    (one, label, kinds), (again, same, _), (other, _, _) = task.bag(3), task.bag(3), task.bag(5)
    assert np.array_equal(one, again)
    assert label == same == 1
    assert not np.array_equal(one, other)
    assert one.shape == (300, 32)
    assert kinds.shape == (300,)
    assert one.dtype == np.float32


def test_who_knows_the_world_can_tell(task: Task) -> None:
    assert areas(task, task.oracle) > 0.95


def test_the_number_of_patches_says_nothing(task: Task) -> None:
    assert {len(task.bag(number)[0]) for number in range(6)} == {300}


def test_rare_patches_are_in_positive_bags_alone() -> None:
    task = TASKS["rare"](patches=200, signal=4)
    assert [(task.bag(n)[2] == SIGNAL).sum() for n in range(4)] == [0, 4, 0, 4]


def test_co_occurrence_has_the_same_number_planted_in_every_bag() -> None:
    task = TASKS["co-occurrence"](patches=300)
    kinds = [task.bag(number)[2] for number in range(40)]
    assert {int((each != TISSUE).sum()) for each in kinds} == {100}
    both = [(each == SIGNAL).any() and (each == PARTNER).any() for each in kinds]
    assert both == [False, True] * 20


def test_no_single_kind_decides_co_occurrence() -> None:
    task = TASKS["co-occurrence"](patches=300, seed=7)
    for kind in (SIGNAL, PARTNER):
        amount = areas(task, lambda bag, kind=kind: task.presence(bag, kind, 50))
        assert 0.35 < amount < 0.65


def test_a_linear_reading_of_the_mean_suffices_for_proportion_and_not_for_co_occurrence() -> None:
    found = {}
    for name in ("proportion", "co-occurrence"):
        task = TASKS[name](patches=300, seed=7)
        bags = [task.bag(number) for number in range(400)]
        means = np.stack([bag.mean(axis=0) for bag, _, _ in bags])
        labels = np.array([label for _, label, _ in bags])
        reader = LogisticRegression(max_iter=1000).fit(means[:200], labels[:200])
        found[name] = roc_auc_score(labels[200:], reader.decision_function(means[200:]))
    assert found["proportion"] > 0.85
    assert found["co-occurrence"] < 0.65


def test_distractors_are_louder_than_anything_and_in_both_classes() -> None:
    features, _, kinds = TASKS["distractors"](patches=400).bag(2)
    length = np.linalg.norm(features, axis=1)
    assert (kinds == LOUD).sum() > 10
    assert np.median(length[kinds == LOUD]) > length[kinds == TISSUE].max()


def test_a_batch_effect_hides_the_signal_from_all_who_know_one_world_only() -> None:
    plain, shifted = TASKS["rare"](patches=300, signal=50), TASKS["batch-effect"](patches=300)
    along = world(0, 32).directions[SIGNAL]

    def highest(bag: np.ndarray) -> float:
        return float(np.quantile(bag @ along, 0.95))

    assert areas(plain, highest) > areas(shifted, highest) + 0.05


def test_worlds_of_other_seeds_have_other_directions() -> None:
    for one, other in pairwise(range(3)):
        assert abs(world(one, 32).directions[1] @ world(other, 32).directions[1]) < 0.9
    directions = world(0, 32).directions
    np.testing.assert_allclose(directions @ directions.T, np.eye(32), atol=1e-5)
