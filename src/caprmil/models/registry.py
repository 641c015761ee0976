"""The models by name. To add one, write its file and its line in MODELS, or register it."""

import inspect
from collections.abc import Callable, Mapping
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
from caprmil.models.fusion import FusedModel
from caprmil.models.mean import MeanMIL
from caprmil.models.no_image import NoImage
from caprmil.models.pooling import POOLS
from caprmil.models.sgpmil import SGPMIL
from caprmil.models.source_model import SourceModel
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

UNLISTED: dict[str, type[MILModel]] = {
    "fused": FusedModel,
    "none": NoImage,
    "sources": SourceModel,
}
"""Models that training makes from a recipe with covariates or several sources, by the names in
their config.json."""

Model = TypeVar("Model", bound=MILModel)
Built = TypeVar("Built", bound=nn.Module)


def register_model(name: str) -> Callable[[type[Model]], type[Model]]:
    """Return a decorator that adds a model class of another package to MODELS.

    >>> @register_model("mine")
    ... class MyMIL(MILModel): ...
    """

    def register(model: type[Model]) -> type[Model]:
        if not name.replace("_", "").isalnum():
            raise ValueError(f"The name of a model has letters, digits and _, not '{name}'.")
        known = {**POOLS, **UNLISTED, **MODELS}.get(name)
        if known is not None and _path(known) != _path(model):  # a notebook may define it again
            raise ValueError(f"There is already a model or pool called '{name}'.")
        MODELS[name] = model
        return model

    return register


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def list_models() -> list[str]:
    """Return the names of all models, without combinations such as caprmil+abmil."""
    return sorted(MODELS)


def needs_classes(name: str, settings: Mapping[str, Any] | None = None) -> bool:
    """Return whether a model of that name, or the model behind its context stack, needs classes."""
    name, _, behind = name.partition("+")
    pool = behind or (settings or {}).get("pool", "")
    pool = pool.get("name", "") if isinstance(pool, Mapping) else pool
    kinds = [MODELS.get(name), None if pool in POOLS else MODELS.get(str(pool))]
    return any(kind.needs_classes is True for kind in kinds if kind is not None)


def create(name: str, in_dim: int, n_outputs: int, **settings: Any) -> MILModel:
    """Return a new model by its name. `caprmil+NAME` puts the context stack before a pool or model.

    >>> create("caprmil", in_dim=1024, n_outputs=2, tokens=4)
    >>> create("caprmil+abmil", in_dim=1024, n_outputs=2)
    """
    name, plus, pool = name.partition("+")
    if name in UNLISTED and not plus:
        return build(UNLISTED[name], name, (in_dim, n_outputs), settings)
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    if plus:
        if name != "caprmil":
            raise RecipeError(f"Only caprmil combines with another model, not {name}.")
        settings = {"pool": pool, **settings}
    return build(MODELS[name], name, (in_dim, n_outputs), settings)


def build_pool(pool: str | dict[str, Any] | nn.Module, dim: int, n_outputs: int) -> nn.Module:
    """Return a new pool or model by its name, for patches of width `dim`; objects are returned.

    "mean" is the pool. For the Mean model, pass `MeanMIL(dim, n_outputs)`.
    """
    if isinstance(pool, MILModel) and (pool.in_dim, pool.n_outputs) != (dim, n_outputs):
        raise ValueError(
            f"The model behind the context stack was made for {pool.in_dim} features and "
            f"{pool.n_outputs} outputs; it gets {dim} and {n_outputs}."
        )
    if isinstance(pool, nn.Module):
        return pool
    if not isinstance(pool, str | dict):
        raise RecipeError(f"pool is a name, a table with a name, or a module, not {pool!r}.")
    settings = {"name": pool} if isinstance(pool, str) else dict(pool)
    if "object" in settings:
        raise RecipeError(
            f"This model was saved with a pool from outside the package, {settings['object']}. "
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
    """Call a constructor. A setting that it does not have is a `RecipeError`."""
    known = [
        key
        for key, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for key in settings:
        if key not in known:
            raise RecipeError(f"{name} has no setting called '{key}'.{suggest(key, known)}")
    return kind(*sizes, **settings)
