"""The estimator of survival times."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil.estimators.given_labels import as_survival
from caprmil.estimators.mil_estimator import MILEstimator
from caprmil.models import MILModel
from caprmil.targets import (
    Survival,
)
from caprmil.training.given_bags import (
    Bags,
    as_samples,
)


class MILSurvival(MILEstimator):
    """Predicts the risk of an event per bag, as scikit-survival's models do for rows.

    >>> model = MILSurvival("caprmil", epochs=10).fit(bags, np.stack([times, events], axis=1))
    >>> model.predict(bags), model.predict_survival(bags), model.score(bags, labels)

    Labels are (n, 2), time and event, or a structured array of scikit-survival. The settings are
    those of `MILClassifier`; the others are those of the survival target.

    Fitted, besides those of `MILClassifier`: `horizons_`, the times of `predict_survival`.
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
        loss: Literal["cox", "discrete"] = "cox",
        risk_set: Literal["memory", "batch"] = "memory",
        intervals: int = 4,
        horizons: Sequence[float] = (),
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
        self.risk_set = risk_set
        self.intervals = intervals
        self.horizons = horizons
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device
        self.fusion = fusion
        self.categorical = categorical

    def fit(self, X: Bags, y: Any) -> "MILSurvival":
        """Train a new model on these bags, with a time and an event per bag."""
        samples, rows = as_samples(X), as_survival(y)
        target = Survival(
            loss=self.loss,
            risk_set=self.risk_set,
            intervals=self.intervals,
            horizons=tuple(map(float, self.horizons)),
        ).with_horizons(rows.tolist())
        self._fit(X, samples, rows, target)
        self.horizons_ = np.array(target.horizons)
        return self

    def predict(self, X: Bags) -> NDArray[np.float64]:
        """Return the risk of each bag: a log hazard, relative to the median bag of the training."""
        return self._answers(X)[:, 0]

    def predict_survival(self, X: Bags) -> NDArray[np.float64]:
        """Return the probability of no event until each of `horizons_`, one row per bag."""
        return self._answers(X)[:, 1:]

    def score(self, X: Bags, y: Any) -> float:
        """Return Harrell's C-index of the risks."""
        rows, answers = as_survival(y), self._answers(X)
        return self.target_.headline_metric.function(rows, answers)
