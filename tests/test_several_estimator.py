"""The estimator of several targets: the interface of scikit-learn, with labels in a table."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils import get_tags

from caprmil import MILSeveral
from caprmil.errors import CohortError

TASKS = {
    "grade": "classification",
    "size": {"kind": "regression", "label": "size in mm", "weight": 0.5},
    "genes": {"kind": "multilabel", "labels": ["EGFR", "KRAS"]},
    "follow-up": "survival",
}


def bags_and_labels(n: int, seed: int) -> tuple[list[Any], pd.DataFrame]:
    """Bags whose mean features are behind every label; each label is sometimes missing."""
    rng = np.random.default_rng(seed)
    causes = rng.normal(size=(n, 4))
    bags = [rng.normal(size=(12, 6)) + np.r_[own, 0, 0] for own in causes]
    labels = pd.DataFrame(
        {
            "grade": np.where(causes[:, 0] > 0, "high", "low"),
            "size in mm": 30 + 10 * causes[:, 1],
            "EGFR": (causes[:, 2] > 0).astype(float),
            "KRAS": np.where(causes[:, 3] > 0, "mut", "wt"),
            "months": np.exp(3 - causes[:, 0]),
            "event": 1,
        }
    )
    for number, column in enumerate(["grade", "size in mm", "EGFR", "KRAS"]):
        labels.loc[number::11, column] = None
    return bags, labels


@pytest.fixture(scope="module")
def estimator() -> MILSeveral:
    model = MILSeveral(TASKS, "mean", epochs=12, lr=2e-2, device="cpu", batch_size=4)
    return model.fit(*bags_and_labels(60, seed=0))


def test_the_estimator_predicts_every_target_in_the_columns_of_its_labels(
    estimator: MILSeveral,
) -> None:
    bags, labels = bags_and_labels(60, seed=1)
    found, numbers = estimator.predict(bags), estimator.predict_table(bags)
    assert [*found] == ["grade", "size in mm", "EGFR", "KRAS", "follow-up"]
    known = labels["grade"].notna()
    assert (found["grade"] == labels["grade"])[known].mean() > 0.8
    assert set(found["grade"]) == {"high", "low"}
    right = found["size in mm"] - labels["size in mm"]
    assert right.std() < 0.7 * labels["size in mm"].std()
    assert set(found["EGFR"]) == {0, 1}
    np.testing.assert_array_equal(found["EGFR"] > 0, numbers["genes.EGFR.positive"] > 0.5)
    np.testing.assert_array_equal(found["size in mm"], numbers["size.predicted"])
    chosen = np.where(numbers["grade.prob_high"] > 0.5, "high", "low")
    np.testing.assert_array_equal(found["grade"], chosen)
    assert spearmanr(found["follow-up"], labels["months"]).statistic < -0.5
    assert 0.3 < estimator.score(bags, labels) <= 1


def test_the_model_has_the_outputs_of_all_targets_and_reads_their_columns(
    estimator: MILSeveral,
) -> None:
    assert estimator.model_.n_outputs == 2 + 1 + 2 + 1
    assert estimator.label_columns_ == ("grade", "size in mm", "EGFR", "KRAS", "months", "event")


def test_the_estimator_follows_scikit_learn(estimator: MILSeveral) -> None:
    copied = clone(estimator)
    assert copied.get_params() == estimator.get_params()
    assert copied.tasks == TASKS
    assert not hasattr(copied, "model_")
    tags = get_tags(estimator)
    assert tags.target_tags.multi_output
    assert not tags.input_tags.two_d_array
    bags, labels = bags_and_labels(24, seed=2)
    scores = cross_val_score(copied.set_params(epochs=2), bags, labels, cv=2)
    assert np.isfinite(scores).all()
    with pytest.raises(NotFittedError):
        clone(estimator).predict(bags)


def test_tables_of_labels_that_cannot_be_used_are_named() -> None:
    bags, labels = bags_and_labels(12, seed=0)
    model = MILSeveral(TASKS, "mean", epochs=1, device="cpu")
    with pytest.raises(CohortError, match="must be a DataFrame"):
        model.fit(bags, labels.to_numpy())
    with pytest.raises(CohortError, match=r"No slide has a label of size \(column size in mm\)"):
        model.fit(bags, labels.drop(columns="size in mm"))
    with pytest.raises(CohortError, match="tasks names no target"):
        MILSeveral().fit(bags, labels)
    with pytest.raises(CohortError, match="12 bags but 11 labels"):
        model.fit(bags, labels.iloc[1:])
