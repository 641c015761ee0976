"""Estimators of classes, grades and several labels."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin

from caprmil.errors import CohortError
from caprmil.estimators.given_labels import as_classes, in_grade_order
from caprmil.estimators.mil_estimator import MILEstimator
from caprmil.models import MILModel
from caprmil.targets import (
    Classification,
    Multilabel,
    Ordinal,
)
from caprmil.training.given_bags import (
    Bags,
    as_samples,
)


class MILClassifier(ClassifierMixin, MILEstimator):  # type: ignore[misc]
    """Classifies bags, as scikit-learn's classifiers classify rows.

    >>> classifier = MILClassifier("caprmil", epochs=10).fit(bags, labels)
    >>> cross_val_score(MILClassifier("abmil"), bags, labels, cv=5)

    `model` is a name for `caprmil.models.create`, with its `settings`; or a model, of which a copy
    is trained, starting from its weights. The other settings are those of TrainConfig. The warm-up
    takes at most half of the epochs. `validation` is the share of the bags that is held out, by
    class, for early stopping and the best epoch; 0 trains on all of them. `grades` are the classes
    from low to high, if they have an order that the model is to use: an ordinal target.

    `X` is a sequence of bags: arrays, tensors, bags, paths of feature files, or a pandas Series of
    them. `sample_weight` multiplies the loss of each bag in training, divided by the mean weight; a
    bag of weight 0 is left out.

    Bags may be pairs with covariates: `(bag, {"age": 63, "sex": "f"})`. `fusion` is how they are
    read, with the settings of [fusion], and `categorical` are those with numbers that are names.

    Fitted: `classes_`, `n_features_in_`, `model_`, and `history_`, one row of numbers per epoch.
    """

    def __init__(
        self,
        model: str | MILModel = "caprmil",
        *,
        settings: dict[str, Any] | None = None,
        epochs: int = 30,
        lr: float = 2e-4,
        weight_decay: float = 1e-5,
        warmup_epochs: int = 6,
        batch_size: int = 1,
        class_weights: Literal["none", "balanced"] = "none",
        grades: Sequence[Any] | None = None,
        clip: float = 0.0,
        validation: float = 0.0,
        patience: int = 20,
        seed: int = 0,
        device: str = "auto",
        fusion: dict[str, Any] | None = None,
        categorical: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.settings = settings
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.batch_size = batch_size
        self.class_weights = class_weights
        self.grades = grades
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device
        self.fusion = fusion
        self.categorical = categorical

    def fit(
        self, X: Bags, y: Iterable[Any], sample_weight: Iterable[float] | None = None
    ) -> "MILClassifier":
        """Train a new model on these bags, with one label per bag."""
        samples = as_samples(X)
        classes, numbers = as_classes(y)
        if self.grades is not None:
            classes, numbers = in_grade_order(classes, numbers, self.grades)
        kind = Classification if self.grades is None else Ordinal
        names = tuple(map(str, range(len(classes))))
        target = kind(classes=names, class_weights=self.class_weights)
        self._fit(X, samples, numbers, target, sample_weight)
        self.classes_ = classes
        return self

    def predict_proba(self, X: Bags) -> NDArray[np.float64]:
        """Return the probability of each class of `classes_`, one row per bag."""
        return self._answers(X)

    def predict(self, X: Bags) -> NDArray[Any]:
        """Return the most probable class of each bag, as it was passed to `fit`."""
        chosen = self.predict_proba(X).argmax(axis=1)
        predicted: NDArray[Any] = self.classes_[chosen]
        return predicted


class MILMultilabelClassifier(ClassifierMixin, MILEstimator):  # type: ignore[misc]
    """Predicts several labels of bags, each of which is positive or negative by itself.

    >>> classifier = MILMultilabelClassifier("caprmil", epochs=10).fit(bags, table)

    Labels are a table of bags x labels with 1, 0, or NaN where one is missing. The settings are
    those of `MILClassifier`; `positive_weights` is that of the multilabel target.

    Fitted: `labels_`, the names of the columns, and what `MILClassifier` has, without `classes_`.
    """

    def __init__(
        self,
        model: str | MILModel = "caprmil",
        *,
        settings: dict[str, Any] | None = None,
        epochs: int = 30,
        lr: float = 2e-4,
        weight_decay: float = 1e-5,
        warmup_epochs: int = 6,
        batch_size: int = 1,
        positive_weights: Literal["none", "balanced"] = "none",
        clip: float = 0.0,
        validation: float = 0.0,
        patience: int = 20,
        seed: int = 0,
        device: str = "auto",
        fusion: dict[str, Any] | None = None,
        categorical: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.settings = settings
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.batch_size = batch_size
        self.positive_weights = positive_weights
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device
        self.fusion = fusion
        self.categorical = categorical

    def fit(
        self, X: Bags, y: Any, sample_weight: Iterable[float] | None = None
    ) -> "MILMultilabelClassifier":
        """Train a new model on these bags, with a row of labels for each."""
        samples = as_samples(X)
        try:
            numbers = np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError) as problem:
            raise CohortError(f"Labels must be 1, 0 or NaN ({problem}).") from problem
        if numbers.ndim != 2 or not numbers.shape[1]:
            raise CohortError(
                f"Labels must be a table of bags x labels, not of shape {numbers.shape}."
            )
        if not np.isin(numbers[~np.isnan(numbers)], (0, 1)).all():
            raise CohortError("Labels must be 1, 0, or NaN where one is missing.")
        if len(empty := np.flatnonzero(np.isnan(numbers).all(axis=1))):
            raise CohortError(f"Bag {empty[0]} has no label. Leave it out.")
        names = tuple(map(str, getattr(y, "columns", range(numbers.shape[1]))))
        target = Multilabel(labels=names, positive_weights=self.positive_weights)
        known = np.where(np.isnan(numbers), -1, numbers)
        self._fit(X, samples, known, target, sample_weight)
        self.labels_ = names
        return self

    def predict_proba(self, X: Bags) -> NDArray[np.float64]:
        """Return the probability of each label, one row per bag."""
        return self._answers(X)

    def predict(self, X: Bags) -> NDArray[np.int64]:
        """Return 1 for each label with a probability above 0.5, one row per bag."""
        return (self.predict_proba(X) > 0.5).astype(np.int64)
