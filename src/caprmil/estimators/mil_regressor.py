"""The estimator of a number."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import RegressorMixin

from caprmil.errors import CohortError, RecipeError
from caprmil.estimators.mil_estimator import MILEstimator
from caprmil.models import MILModel
from caprmil.targets import (
    Regression,
)
from caprmil.training.given_bags import (
    Bags,
    as_samples,
)


class MILRegressor(RegressorMixin, MILEstimator):  # type: ignore[misc]
    """Predicts a number per bag, as scikit-learn's regressors do for rows.

    >>> regressor = MILRegressor("caprmil", epochs=10).fit(bags, values)

    The settings are those of `MILClassifier`; `loss`, `uncertainty` and `level` are
    those of the regression target.
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
        loss: Literal["l1", "l2", "huber"] = "huber",
        uncertainty: Literal["none", "gaussian", "quantile"] = "none",
        level: float = 0.9,
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
        self.loss = loss
        self.uncertainty = uncertainty
        self.level = level
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device
        self.fusion = fusion
        self.categorical = categorical

    def fit(
        self, X: Bags, y: Iterable[Any], sample_weight: Iterable[float] | None = None
    ) -> "MILRegressor":
        """Train a new model on these bags, with one number per bag."""
        samples = as_samples(X)
        try:
            numbers = np.asarray(list(y), dtype=np.float64)
        except (TypeError, ValueError) as problem:
            raise CohortError(f"Labels must be numbers ({problem}).") from problem
        if numbers.ndim != 1 or not np.isfinite(numbers).all():
            raise CohortError("Labels must be one finite number per bag.")
        target = Regression(loss=self.loss, uncertainty=self.uncertainty, level=self.level)
        self._fit(X, samples, numbers, target, sample_weight)
        return self

    def predict(self, X: Bags) -> NDArray[np.float64]:
        """Return the predicted number of each bag."""
        return self._answers(X)[:, 0]

    def predict_interval(self, X: Bags) -> NDArray[np.float64]:
        """Return the ends of the interval of each bag. It needs an uncertainty."""
        if self.uncertainty == "none":
            raise RecipeError('There are no intervals. Pass uncertainty="gaussian" or "quantile".')
        return self._answers(X)[:, 1:]
