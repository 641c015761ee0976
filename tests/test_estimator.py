"""Estimators: the interface of scikit-learn for bags."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score

from caprmil.errors import BagError, CohortError, RecipeError, UnknownNameError
from caprmil.estimator import MILClassifier
from caprmil.features import bags
from caprmil.models import MeanMIL

WIDTH = 6


def planted(n: int = 16, *, seed: int = 0) -> tuple[list[NDArray[np.float32]], NDArray[Any]]:
    """Return bags of different lengths; every other one has a shifted patch and is positive."""
    rng = np.random.default_rng(seed)
    found = [rng.normal(size=(rng.integers(2, 7), WIDTH)).astype(np.float32) for _ in range(n)]
    for bag in found[1::2]:
        bag[0, 0] += 20
    return found, np.array(["healthy", "ill"] * (n // 2))


def quick(model: Any = "mean", **changes: Any) -> MILClassifier:
    return MILClassifier(model, **{"epochs": 2, "lr": 1e-2, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def fitted() -> MILClassifier:
    return quick(epochs=8).fit(*planted())


def test_a_planted_signal_is_learnt(fitted: MILClassifier) -> None:
    assert fitted.score(*planted(seed=1)) > 0.9


def test_predictions_are_the_labels_of_fit(fitted: MILClassifier) -> None:
    unseen, _ = planted(seed=1)
    probabilities = fitted.predict_proba(unseen)
    assert fitted.classes_.tolist() == ["healthy", "ill"]
    assert probabilities.shape == (16, 2)
    assert probabilities.sum(axis=1) == pytest.approx(1)
    assert (fitted.predict(unseen) == fitted.classes_[probabilities.argmax(axis=1)]).all()


@pytest.mark.parametrize("classes", [("a", "b"), (3, 7), (False, True)])
def test_labels_may_be_of_any_type(classes: tuple[Any, Any]) -> None:
    found, _ = planted(8)
    classifier = quick(epochs=1).fit(found, list(classes) * 4)
    assert classifier.classes_.tolist() == list(classes)
    assert set(classifier.predict(found).tolist()) <= set(classes)


def test_the_fitted_estimator_has_a_model_and_a_history(fitted: MILClassifier) -> None:
    assert fitted.n_features_in_ == WIDTH == fitted.model_.in_dim
    assert [row["epoch"] for row in fitted.history_] == list(range(8))
    assert not fitted.model_.training


def test_arrays_tensors_bags_and_files_give_the_same_result(
    fitted: MILClassifier, tmp_path: Path
) -> None:
    array = planted()[0][0]
    path = bags.write(tmp_path / "bag.h5", array, dtype="float32")
    kinds = [array, torch.from_numpy(array), bags.from_arrays(array), path, str(path)]
    answers = fitted.predict_proba(kinds)
    np.testing.assert_allclose(answers, answers[[0] * 5], rtol=1e-6)


def test_integers_are_features_too(fitted: MILClassifier) -> None:
    counts = np.arange(2 * WIDTH).reshape(2, WIDTH)
    answers = fitted.predict_proba([counts, counts.astype(np.float32)])
    np.testing.assert_array_equal(answers[0], answers[1])


def test_cross_validation_takes_bags_of_different_lengths() -> None:
    found, labels = planted()
    assert len(cross_val_score(quick(), found, labels, cv=2)) == 2
    answers = cross_val_predict(quick(), found, labels, cv=2, method="predict_proba")
    assert answers.shape == (16, 2)


def test_a_grid_search_reaches_training_and_model() -> None:
    grid = {"epochs": [1, 2], "settings": [{"dim": 8}]}
    search = GridSearchCV(quick(), grid, cv=2, scoring="roc_auc").fit(*planted())
    assert search.best_estimator_.model_.settings == {"dim": 8}


def test_parameters_are_kept_unchanged() -> None:
    settings = {"tokens": 2}
    classifier = quick("caprmil", settings=settings, warmup_epochs=6)
    copy = clone(classifier).set_params(epochs=1)
    assert classifier.get_params()["settings"] is settings
    assert (copy.epochs, copy.warmup_epochs, copy.settings) == (1, 6, settings)


def test_the_warm_up_is_at_most_half_of_a_short_training() -> None:
    classifier = quick(epochs=4, lr=1e-2).fit(*planted(8))
    rates = [row["lr"] for row in classifier.history_]
    assert max(rates) == rates[1] == rates[2] == pytest.approx(1e-2)


def test_the_seed_determines_the_result_and_the_global_random_state_is_restored() -> None:
    found, labels = planted(8)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = quick("caprmil").fit(found, labels).predict_proba(found)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again = quick("caprmil").fit(found, labels).predict_proba(found)
    other = quick("caprmil", seed=1).fit(found, labels).predict_proba(found)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_share_can_be_held_out_for_early_stopping() -> None:
    classifier = quick(validation=0.25, patience=1, epochs=50, lr=1.0).fit(*planted())
    assert "val_loss" in classifier.history_[0]
    assert len(classifier.history_) < 50


def test_a_given_model_is_copied_before_training() -> None:
    model = MeanMIL(WIDTH, 2)
    before = model.classify.weight.clone()
    classifier = quick(model).fit(*planted(8))
    assert torch.equal(model.classify.weight, before)
    assert not torch.equal(classifier.model_.classify.weight, before)


def test_predicting_before_fit_is_an_error() -> None:
    with pytest.raises(NotFittedError):
        quick().predict(planted()[0])


def test_another_width_is_refused(fitted: MILClassifier) -> None:
    other = np.zeros((3, WIDTH + 1))
    with pytest.raises(
        BagError, match=r"Bag 0 has patches of 7 features; the model was fitted on 6"
    ):
        fitted.predict([other])
    with pytest.raises(BagError, match="Bag 1 has patches of 7 features; the bags before it have"):
        quick().fit([np.zeros((3, WIDTH)), other], [0, 1])


@pytest.mark.parametrize(
    ("bag", "message"),
    [
        (np.zeros((0, WIDTH)), "Bag 1 cannot be used.*has no patches"),
        (np.zeros(WIDTH), r"Bag 1 cannot be used. It has shape \(6,\)"),
        (np.full((2, WIDTH), np.nan), "Bag 1 cannot be used.*NaN"),
    ],
)
def test_a_bag_that_cannot_be_used_is_named(bag: Any, message: str) -> None:
    with pytest.raises(BagError, match=message):
        quick().fit([np.zeros((3, WIDTH)), bag], [0, 1])


def test_one_bag_is_not_a_list_of_bags(fitted: MILClassifier) -> None:
    for bag in ("slide.h5", bags.from_arrays(np.zeros((3, WIDTH))), np.zeros((3, WIDTH))):
        with pytest.raises(BagError, match="list"):
            fitted.predict(bag)
    with pytest.raises(BagError, match="no bags"):
        fitted.predict([])


def test_invalid_labels_are_refused() -> None:
    found, labels = planted(8)
    with pytest.raises(CohortError, match="8 bags but 7 labels"):
        quick().fit(found, labels[1:])
    with pytest.raises(CohortError, match="at least two classes"):
        quick().fit(found, ["ill"] * 8)
    with pytest.raises(CohortError, match="sorted"):
        quick().fit(found, np.array([None, "a"] * 4, dtype=object))
    with pytest.raises(ValueError, match="continuous"):
        quick().fit(found, np.linspace(0, 1, 8))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"epochs": 0}, RecipeError),
        ({"class_weights": "rare"}, RecipeError),
        ({"validation": 1.0}, RecipeError),
        ({"validation": 0.01}, CohortError),
        ({"settings": {"dims": 3}}, RecipeError),
        ({"model": "caprmill"}, UnknownNameError),
        ({"model": MeanMIL(WIDTH, 3)}, BagError),
        ({"model": MeanMIL(WIDTH, 2), "settings": {"dim": 8}}, RecipeError),
    ],
)
def test_wrong_settings_are_an_error_in_fit(changes: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        quick(**changes).fit(*planted(8))
