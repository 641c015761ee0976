"""The targets by kind. To add one: write its file, add its line to TARGETS."""

from caprmil.errors import UnknownNameError
from caprmil.targets.base import Target
from caprmil.targets.classification import Classification
from caprmil.targets.regression import Regression

TARGETS: dict[str, type[Target]] = {
    "classification": Classification,
    "regression": Regression,
}


def find_target(kind: str) -> type[Target]:
    """Return the target of that kind."""
    if kind not in TARGETS:
        raise UnknownNameError("target", kind, TARGETS)
    return TARGETS[kind]
