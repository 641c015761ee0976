"""Estimators: models with scikit-learn's interface, for bags in memory or in files."""

from caprmil.estimators.mil_classifier import MILClassifier, MILMultilabelClassifier
from caprmil.estimators.mil_regressor import MILRegressor
from caprmil.estimators.mil_several import MILSeveral
from caprmil.estimators.mil_survival import MILSurvival

__all__ = ["MILClassifier", "MILMultilabelClassifier", "MILRegressor", "MILSeveral", "MILSurvival"]
