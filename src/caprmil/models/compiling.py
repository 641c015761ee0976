"""The forward pass of a model, compiled by torch.compile."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from caprmil.errors import RecipeError, RunError
from caprmil.models.base import MILModel, Output

COMPILERS = ("g++", "clang++", "cl")  # one of them, or what CXX names


def compiled(model: MILModel) -> Callable[..., Output]:
    """Return the forward pass of a model, compiled at its first calls for bags of any size.

    It is a function and not a module, so that weights keep their names in a checkpoint.
    """
    from torch._dynamo.exc import TorchDynamoException

    find_compiler()
    forward = torch.compile(model.forward, dynamic=True)

    def run(*arguments: Any, **keywords: Any) -> Output:
        try:
            return forward(*arguments, **keywords)
        except TorchDynamoException as problem:
            reason = str(problem).strip().partition("\n")[0][:200]
            raise RunError(
                f"torch could not compile {type(model).__name__} ({reason}). "
                "Set train.compile = false."
            ) from problem

    return run


def find_compiler() -> str:
    """Return the C++ compiler that torch will use, or raise if there is none."""
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    found = next(filter(None, map(shutil.which, wanted)), None)
    if found is None:
        raise RecipeError(
            f"train.compile = true needs a C++ compiler, and there is no {' or '.join(wanted)} "
            "here. Install one (e.g. apt install g++), or set train.compile = false."
        )
    return found
