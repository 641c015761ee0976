"""The models by name. To add one: write its file, add its line to MODELS."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from caprmil.errors import RecipeError, UnknownNameError, suggest
from caprmil.models.abmil import ABMIL
from caprmil.models.base import MILModel
from caprmil.models.bayesmil import BayesMIL
from caprmil.models.caprmil import CAPRMIL
from caprmil.models.clam import CLAM
from caprmil.models.dgrmil import DGRMIL
from caprmil.models.dsmil import DSMIL
from caprmil.models.dtfd import DTFDMIL
from caprmil.models.mean import MeanMIL
from caprmil.models.pooling import POOLS
from caprmil.models.sgpmil import SGPMIL
from caprmil.models.transmil import TransMIL

MODELS: dict[str, type[MILModel]] = {
    "caprmil": CAPRMIL,
    "mean": MeanMIL,
    "abmil": ABMIL,
    "clam": CLAM,
    "dsmil": DSMIL,
    "dtfd": DTFDMIL,
    "transmil": TransMIL,
    "dgrmil": DGRMIL,
    "bayesmil": BayesMIL,
    "sgpmil": SGPMIL,
}

Built = TypeVar("Built", bound=nn.Module)


def list_models() -> list[str]:
    """Return every name that `create` takes, apart from combinations such as caprmil+abmil."""
    return sorted(MODELS)


def create(name: str, in_dim: int, n_outputs: int, **settings: Any) -> MILModel:
    """Build a model by its name. `caprmil+NAME` puts the context stack before a pool or a model.

    >>> create("caprmil", in_dim=1024, n_outputs=2, tokens=4)
    >>> create("caprmil+abmil", in_dim=1024, n_outputs=2)
    """
    name, plus, pool = name.partition("+")
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    if plus:
        if name != "caprmil":
            raise RecipeError(f"Only caprmil can stand before another model, not {name}.")
        settings = {"pool": pool, **settings}
    return build(MODELS[name], name, (in_dim, n_outputs), settings)


def build_pool(pool: str | dict[str, Any] | nn.Module, dim: int, n_outputs: int) -> nn.Module:
    """Return the pool or model of that name, of a width of `dim`; objects pass through.

    "mean" is the pool: to put the Mean model behind, pass `MeanMIL(dim, n_outputs)`.
    """
    if isinstance(pool, MILModel) and (pool.in_dim, pool.n_outputs) != (dim, n_outputs):
        raise ValueError(
            f"The model behind the context stack was made for {pool.in_dim} features and "
            f"{pool.n_outputs} classes; it will see {dim} and {n_outputs}."
        )
    if isinstance(pool, nn.Module):
        return pool
    if not isinstance(pool, str | dict):
        raise RecipeError(f"pool is a name, a table with a name, or a module, not {pool!r}.")
    settings = {"name": pool} if isinstance(pool, str) else dict(pool)
    if "object" in settings:
        raise RecipeError(
            f"This model was saved with a pool of its maker's own, {settings['object']}. "
            "Pass it: pool=..."
        )
    name = settings.pop("name", None)
    if name in POOLS:
        return build(POOLS[name], name, (dim,), settings)
    if name in MODELS:
        return create(name, dim, n_outputs, **settings)
    raise UnknownNameError("pool or model", str(name), {*POOLS, *MODELS})


def build(
    kind: Callable[..., Built], name: str, sizes: tuple[int, ...], settings: dict[str, Any]
) -> Built:
    """Call a constructor; a setting that it does not have is an error of the recipe."""
    known = [
        key
        for key, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for key in settings:
        if key not in known:
            raise RecipeError(f"{name} has no setting called '{key}'.{suggest(key, known)}")
    return kind(*sizes, **settings)
