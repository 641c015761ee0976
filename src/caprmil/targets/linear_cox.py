"""A linear model of the log hazard, with a ridge penalty."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.base import BaseEstimator

from caprmil.targets.kaplan_meier import cumulative_hazard
from caprmil.targets.partial_likelihood import partial_likelihood, risk_sets

Values = NDArray[np.float64]


def fit_cox(features: Values, times: Values, events: NDArray[np.bool_], strength: float) -> Values:
    """Return the coefficients of a linear log hazard, with a ridge penalty of 1 / strength."""
    sets = risk_sets(times, events)

    def loss(weights: Values) -> tuple[float, Values]:
        value, slopes = partial_likelihood(features @ weights, sets, gradient=True)
        return (
            strength * value + 0.5 * float(weights @ weights),
            strength * (features.T @ slopes) + weights,
        )

    start = np.zeros(features.shape[1])
    if not events.any():
        return start
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 1000})
    return np.asarray(found.x, dtype=np.float64)


class LinearCox(BaseEstimator):  # type: ignore[misc]
    """A linear log hazard, with scikit-learn's interface. Labels are (n, 2): time and event.

    It predicts answers: the risk relative to the median of the training rows, and the survival at
    horizons.
    """

    def __init__(self, strength: float, horizons: Sequence[float]) -> None:
        self.strength, self.horizons = strength, horizons

    def fit(self, features: Values, labels: Values) -> "LinearCox":
        """Fit the coefficients, and the baseline hazard."""
        times, events = labels[:, 0], labels[:, 1] > 0
        self.coef_ = fit_cox(features, times, events, self.strength)
        risks = features @ self.coef_
        self.center_ = float(np.median(risks))
        self.hazard_ = cumulative_hazard(times, events, self.horizons, risks - self.center_)
        return self

    def predict(self, features: Values) -> Values:
        """Return the risk and the survival at horizons of each row."""
        risks = features @ self.coef_ - self.center_
        survival = np.exp(-self.hazard_ * np.exp(np.clip(risks, -50, 50))[:, None])
        return np.concatenate([risks[:, None], survival], axis=1)
