"""The targets by kind. To add one, write its file and its line in TARGETS, or register it."""

from collections.abc import Callable
from typing import TypeVar

from caprmil.errors import UnknownNameError
from caprmil.targets.classification import Classification
from caprmil.targets.multilabel import Multilabel
from caprmil.targets.ordinal import Ordinal
from caprmil.targets.regression import Regression
from caprmil.targets.several import Several
from caprmil.targets.survival import Survival
from caprmil.targets.target import Target

TARGETS: dict[str, type[Target]] = {
    "classification": Classification,
    "regression": Regression,
    "ordinal": Ordinal,
    "survival": Survival,
    "several": Several,
    "multilabel": Multilabel,
}

AnyTarget = TypeVar("AnyTarget", bound=Target)


def register_target(kind: str) -> Callable[[type[AnyTarget]], type[AnyTarget]]:
    """Return a decorator that adds a target of another package to TARGETS, and sets its kind.

    >>> @register_target("mine")
    ... @dataclass(frozen=True, kw_only=True)
    ... class MyTarget(Target): ...
    """

    def register(target: type[AnyTarget]) -> type[AnyTarget]:
        known = TARGETS.get(kind)
        path = (target.__module__, target.__qualname__)
        if known is not None and (known.__module__, known.__qualname__) != path:
            raise ValueError(f"There is already a target called '{kind}'.")
        target.kind = kind
        TARGETS[kind] = target
        return target

    return register


def find_target(kind: str) -> type[Target]:
    """Return the target of that kind."""
    if kind not in TARGETS:
        raise UnknownNameError("target", kind, TARGETS)
    return TARGETS[kind]
