"""Estimators: the interface of scikit-learn for bags."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score, cross_validate
from sklearn.utils import get_tags

from caprmil.errors import BagError, CohortError, RecipeError, UnknownNameError
from caprmil.estimators import MILClassifier, MILRegressor, MILSurvival
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


def with_age(seed: int = 0) -> tuple[list[Any], NDArray[Any]]:
    """Return bags with an age, which the label depends on, and a ward, which says nothing."""
    rng = np.random.default_rng(seed)
    found, _ = planted(24, seed=seed)
    ages = rng.normal(60, 10, size=24)
    labels = np.where(ages > 60, "old", "young")
    covariates = [
        {"age": None if n == 3 else age, "ward": "AB"[n % 2]} for n, age in enumerate(ages)
    ]
    return list(zip(found, covariates, strict=True)), labels


@pytest.fixture(scope="module")
def reader() -> MILClassifier:
    """A classifier that is fitted on bags with covariates."""
    return quick(epochs=20, lr=3e-2, batch_size=4, fusion={"dim": 8}).fit(*with_age())


def test_a_covariate_is_learnt_and_standardised_by_the_bags_of_fit(reader: MILClassifier) -> None:
    assert reader.score(*with_age(seed=1)) > 0.85
    ages = [own["age"] for _, own in with_age()[0] if own["age"] is not None]
    (age, ward) = reader.columns_
    assert (age.mean, age.std) == pytest.approx((np.mean(ages), np.std(ages)))
    assert ward.shares == {"A": 0.5, "B": 0.5}
    bag = with_age()[0][0][0]
    young, old = reader.predict([(bag, {"age": age, "ward": "A"}) for age in (20.0, np.int64(95))])
    assert (young, old) == ("young", "old")
    series = pd.Series({"age": 20.0, "ward": "Z"})  # a ward that no bag of fit has
    assert reader.predict([(bag, series)]) == ["young"]


def test_scikit_learn_divides_bags_with_their_covariates() -> None:
    pairs, labels = with_age()
    classifier = quick(epochs=10, lr=3e-2, batch_size=4, fusion={"how": "film", "dim": 8})
    assert cross_val_score(classifier, pairs, labels, cv=2).mean() > 0.6
    assert clone(classifier).get_params()["fusion"] == {"how": "film", "dim": 8}
    codes = [(bag, {"ward": n % 3}) for n, (bag, _) in enumerate(pairs)]
    fitted = MILRegressor("mean", epochs=2, categorical=["ward"]).fit(codes, np.arange(24.0))
    assert fitted.columns_[0].kind == "category"
    assert fitted.predict(codes[:2]).shape == (2,)


def test_film_learns_a_covariate_that_turns_what_patches_mean_and_sums_do_not() -> None:
    def turned(n: int, seed: int) -> tuple[list[Any], list[bool]]:
        rng = np.random.default_rng(seed)
        signs = rng.choice([-1, 1], size=(n, 2))
        found = [rng.normal(size=(8, WIDTH)) + 2 * own * np.eye(WIDTH)[0] for own, _ in signs]
        markers = [{"marker": own + 0.1 * rng.normal()} for _, own in signs]
        return list(zip(found, markers, strict=True)), (signs.prod(axis=1) > 0).tolist()

    scores = {}
    for how in ("film", "concatenation", "late"):
        classifier = quick(settings={"dim": 16}, epochs=10, lr=2e-2, batch_size=8)
        classifier.set_params(fusion={"how": how, "dim": 8}).fit(*turned(64, seed=0))
        scores[how] = classifier.score(*turned(100, seed=1))
    assert scores["film"] > 0.9
    assert max(scores["concatenation"], scores["late"]) < 0.7


def test_covariates_that_cannot_be_used_are_named(
    fitted: MILClassifier, reader: MILClassifier
) -> None:
    pairs, labels = with_age()
    bag, own = pairs[0]
    with pytest.raises(CohortError, match="fitted without covariates"):
        fitted.predict(pairs)
    with pytest.raises(CohortError, match="reads covariates \\(age, ward\\)"):
        reader.predict([bag])
    with pytest.raises(CohortError, match="Bag 0 has the covariates age; the model was fitted on"):
        reader.predict([(bag, {"age": 3})])
    with pytest.raises(CohortError, match="bag 0: age is 'old', not a number"):
        reader.predict([(bag, {**own, "age": "old"})])
    with pytest.raises(CohortError, match="Only 1 of 2 bags"):
        reader.predict([(bag, own), bag])
    with pytest.raises(CohortError, match="column 'ward' is 'A' for all slides"):
        quick().fit([(each, {"ward": "A"}) for each, _ in pairs], labels)
    with pytest.raises(RecipeError, match="there are none"):
        quick(fusion={"how": "late"}).fit(*planted())
    with pytest.raises(RecipeError, match="no setting called 'hwo'"):
        quick(fusion={"hwo": "late"}).fit(pairs, labels)


def test_bags_are_x_and_a_series_of_bags_is_indexed_by_its_rows() -> None:
    found, labels = planted()
    rows = np.random.default_rng(0).permutation(len(found)) + 100
    series, y = pd.Series(found, index=rows), pd.Series(labels, index=rows)
    expected = quick().fit(found, labels).predict_proba(found)
    np.testing.assert_array_equal(quick().fit(X=series, y=y).predict_proba(X=series), expected)
    scores = cross_val_score(quick(), series, y, cv=2)
    np.testing.assert_array_equal(scores, cross_val_score(quick(), found, labels, cv=2))


def test_a_series_of_paths_is_bags(tmp_path: Path) -> None:
    found, labels = planted(4)
    paths = [bags.write(tmp_path / f"{n}.h5", bag, dtype="float32") for n, bag in enumerate(found)]
    table = pd.DataFrame({"path": map(str, paths), "label": labels})
    answers = quick().fit(table["path"], table["label"]).predict_proba(table["path"])
    np.testing.assert_array_equal(answers, quick().fit(found, labels).predict_proba(found))


@pytest.mark.parametrize("kind", [MILClassifier, MILRegressor, MILSurvival])
def test_the_tags_say_that_rows_are_not_expected(kind: Any) -> None:
    tags = get_tags(kind())
    assert not tags.input_tags.two_d_array
    assert tags.target_tags.required
    expected = {MILClassifier: "classifier", MILRegressor: "regressor"}
    assert tags.estimator_type == expected.get(kind)


def test_a_bag_of_weight_zero_is_as_if_it_were_not_there() -> None:
    found, labels = planted()
    weights = np.where(np.arange(16) < 10, 3.0, 0.0)
    weighted = quick("abmil").fit(found, labels, sample_weight=weights)
    expected = quick("abmil").fit(found[:10], labels[:10]).predict_proba(found)
    np.testing.assert_array_equal(weighted.predict_proba(found), expected)


def test_a_weight_moves_the_answers_towards_its_bags() -> None:
    found, labels = planted()
    ill = labels == "ill"
    plain = quick(epochs=3).fit(found, labels).predict_proba(found)[:, 1].mean()
    heavy = quick(epochs=3).fit(found, labels, np.where(ill, 9.0, 1.0)).predict_proba(found)
    assert heavy[:, 1].mean() > plain + 0.02


def test_the_loss_of_a_step_is_multiplied_by_the_weight_of_its_bag() -> None:
    from caprmil.features.batches import Batch
    from caprmil.targets import Classification
    from caprmil.training.module import MILModule
    from caprmil.training.train_config import TrainConfig

    target = Classification(classes=("0", "1"))
    model = MeanMIL(WIDTH, 2).eval()
    batch = Batch(("bag 0",), torch.randn(1, 3, WIDTH), None, None, torch.tensor([1]))
    losses = [
        MILModule(model, target, TrainConfig(), 0, weights=weights).training_step(batch, 0)
        for weights in (None, {"bag 0": 2.5})
    ]
    torch.testing.assert_close(losses[1], 2.5 * losses[0])


def test_weights_reach_every_fold_of_a_cross_validation() -> None:
    found, labels = planted()
    weights = np.where(labels == "ill", 9.0, 1.0)
    options: dict[str, Any] = {"cv": 2, "params": {"sample_weight": weights}}
    scored = cross_validate(quick(epochs=1), found, labels, return_estimator=True, **options)
    assert len(scored["estimator"]) == 2


@pytest.mark.parametrize(
    ("weights", "changes", "words"),
    [
        ([1.0], {}, "one number per bag"),
        ([0.0] * 16, {}, "not all of them 0"),
        ([-1.0] * 16, {}, "0 or more"),
        ([1.0] * 16, {"batch_size": 2}, "Set batch_size=1"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights: Any, changes: Any, words: str) -> None:
    with pytest.raises((CohortError, RecipeError), match=words):
        quick(**changes).fit(*planted(), sample_weight=weights)
