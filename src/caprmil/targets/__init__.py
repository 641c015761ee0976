"""Targets: what is predicted for a slide. A target is one file and one line in the registry."""

from caprmil.targets.classification import Classification
from caprmil.targets.kinds import TARGETS, find_target, register_target
from caprmil.targets.metric import METRICS, Metric, find_metric, register_metric
from caprmil.targets.multilabel import Multilabel
from caprmil.targets.ordinal import Ordinal
from caprmil.targets.regression import Regression
from caprmil.targets.several import Several, Task
from caprmil.targets.survival import Survival
from caprmil.targets.target import Contrast, Target

__all__ = [
    "METRICS",
    "TARGETS",
    "Classification",
    "Contrast",
    "Metric",
    "Multilabel",
    "Ordinal",
    "Regression",
    "Several",
    "Survival",
    "Target",
    "Task",
    "find_metric",
    "find_target",
    "register_metric",
    "register_target",
]
