"""Settings: TOML and `--set` changes into frozen dataclasses, and back into TOML or a digest.

Reading is strict: an unknown key or a value of the wrong type is a RecipeError.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from caprmil.errors import CaprmilError, RecipeError, RunError, suggest
from caprmil.io.json_files import read_json
from caprmil.io.paths import as_path

Settings = TypeVar("Settings")

REST = {"rest": True}
"""Metadata of the one field that takes all keys of a table that are not fields of the dataclass."""

LATER = {"later": True}
"""Metadata of a field that older settings do not have. At its default it is left out of tables, so
that settings which do not use it keep their digest."""

KIND = "kind"
MOST_DOTS = 2000  # in a TOML file of one line


def by_kind(find: Callable[[str], type]) -> dict[str, Any]:
    """Return the metadata of a field whose type is chosen by the key `kind` of its table.

    `find` maps a kind to its dataclass, and raises UnknownNameError for an unknown kind. Each of
    these dataclasses has its kind as a class attribute `kind`. The field's default gives the
    default kind.
    """
    return {"registry": find}


def load(
    path: str | os.PathLike[str], *, into: type[Settings], changes: Iterable[str] = ()
) -> Settings:
    """Return a TOML file as a dataclass, after changes such as `train.epochs=5`."""
    return parse(load_table(path), into=into, name=as_path(path).name, changes=changes)


def load_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a TOML file as nested tables."""
    path = as_path(path)
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe {path}.") from None
    except (ValueError, RecursionError) as problem:
        raise RecipeError(f"{path} is not a TOML file: {problem}.") from None
    except OSError as problem:
        raise RecipeError(f"{path} cannot be read: {problem.strerror}.") from None


def load_json(path: Path, *, into: type[Settings], advice: str) -> Settings:
    """Return a JSON file of a run as a dataclass. `advice` says what to do if it is damaged."""
    try:
        return parse(read_json(path, advice=advice), into=into, name=path.name)
    except RecipeError as problem:
        raise RunError(f"{path} is damaged ({str(problem).rstrip('.')}). {advice}") from None


def parse(
    table: Mapping[str, Any],
    *,
    into: type[Settings],
    name: str = "recipe",
    changes: Iterable[str] = (),
) -> Settings:
    """Return a table as a dataclass, after changes such as `train.epochs=5`."""
    return _build(into, change(table, changes), name)


def change(table: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Return a table after changes such as `train.epochs=5`."""
    table = dict(table)
    for each in changes:
        table = _changed(table, each)
    return table


def dump(settings: Any) -> str:
    """Return all settings as TOML. `load` turns it into equal settings."""
    return tomli_w.dumps(as_table(settings))


def digest(settings: Any) -> str:
    """Return a short hash. Equal settings have equal digests."""
    text = json.dumps(as_table(settings), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: Any, new: Any) -> list[str]:
    """Return one line for each setting that differs, e.g. `train.epochs: 30 -> 5`."""
    before, after = _flat(as_table(old)), _flat(as_table(new))
    return [
        f"{key}: {before.get(key, 'not set')} -> {after.get(key, 'not set')}"
        for key in sorted(before | after)
        if before.get(key) != after.get(key)
    ]


def _changed(table: dict[str, Any], change: str) -> dict[str, Any]:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"A change has the form KEY=VALUE, e.g. train.epochs=5, not '{change}'.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a bare word, such as model.pool=gated
    head, *rest = key.strip().split(".", 1)
    if not rest:
        return {**table, head: value}
    inner = table.get(head, {})
    if not isinstance(inner, dict):
        raise RecipeError(f"'{key}' cannot be changed: {head} is not a table.")
    return {**table, head: _changed(inner, f"{rest[0]}={text}")}


def _build(into: type[Settings], table: Mapping[str, Any], where: str) -> Settings:
    """Return a table as a dataclass. `where` names the table in errors."""
    types = get_type_hints(into)
    known = {field.name: field for field in fields(into)}  # type: ignore[arg-type]
    rest = next((name for name, field in known.items() if field.metadata.get("rest")), None)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in known and "registry" in known[key].metadata:
            values[key] = _build_by_kind(known[key], value, f"{where}: {key}")
        elif key in known and key != rest:
            values[key] = _convert(types[key], value, f"{where}: {key}")
        elif rest:
            values.setdefault(rest, {})[key] = value
        else:
            near = _suggest_inner(key, into) or suggest(key, known)
            raise RecipeError(f"{where} has no setting called '{key}'.{near}")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise RecipeError(f"{where} has no '{name}', which is required.")
    try:
        return into(**values)
    except RecipeError as problem:
        raise RecipeError(f"{where}: {problem}") from None


def _suggest_inner(key: str, into: type) -> str:
    """Return ' Did you mean ...?' with the settings of that name, or nearly so, in inner tables."""
    owners: dict[str, list[str]] = {}
    types = get_type_hints(into)
    for field in fields(into):
        for inner in _inner_names(field, types[field.name]):
            owners.setdefault(inner, []).append(f"'{field.name}.{inner}'")
    near = get_close_matches(key, {*owners, *types}, n=1, cutoff=0.8)
    return f" Did you mean {' or '.join(owners[near[0]])}?" if near and near[0] in owners else ""


def _inner_names(field: Field[Any], kind: Any) -> list[str]:
    """Return the settings in the table of a field; none if it has no table of fixed settings."""
    of_kind = "registry" in field.metadata
    if of_kind and field.default_factory is not MISSING:
        kind = type(field.default_factory())
    tables = [each for each in (kind, *get_args(kind)) if is_dataclass(each)]
    names = [own.name for each in tables for own in fields(each) if not own.metadata.get("rest")]
    return [KIND, *names] if of_kind else names


def _build_by_kind(field: Field[Any], value: Any, where: str) -> Any:
    """Return a table as the dataclass that its key `kind` chooses."""
    table = dict(_check_table(value, where))
    kind = table.pop(KIND, _default_kind(field))
    if kind is None:
        raise RecipeError(f"{where} has no '{KIND}', which is required.")
    if not isinstance(kind, str):
        raise RecipeError(f"{where}: {KIND} must be text, not {kind!r}.")
    try:
        into = field.metadata["registry"](kind)
    except CaprmilError as problem:
        raise RecipeError(f"{where}: {problem}") from None
    return _build(into, table, f"{where} ({kind})")


def _default_kind(field: Field[Any]) -> str | None:
    if field.default_factory is not MISSING:
        return str(field.default_factory().kind)
    return None if field.default is MISSING else str(field.default.kind)


def _check_table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecipeError(f"{where} must be a table of settings, not {value!r}.")
    return value


def _convert(into: Any, value: Any, where: str) -> Any:
    """Return a value as the type of its field. A value that does not fit is a RecipeError."""
    if is_dataclass(into) and isinstance(into, type):
        return _build(into, _check_table(value, where), where)
    origin, arguments = get_origin(into), get_args(into)
    if into is Any:
        return value
    if type(value) is int and abs(value) >= 2**63:
        raise RecipeError(f"{where} is too large.")
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:  # in JSON; TOML has no None
            return None
        choices = [choice for choice in arguments if choice is not NoneType]
        lists = [choice for choice in choices if get_origin(choice) is tuple]
        return _convert((lists if isinstance(value, list) and lists else choices)[0], value, where)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(arguments[1], item, f"{where}: {key}") for key, item in value.items()}
    if into is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is into:  # isinstance would accept True as an integer
        return value
    wanted = " or ".join(map(repr, arguments)) if origin is Literal else _name(into)
    raise RecipeError(f"{where} must be {wanted}, not {value!r}.")


def _name(into: Any) -> str:
    known = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if get_origin(into) is tuple:
        return "a list"
    return known.get(into, "a table")


def as_table(settings: Any) -> dict[str, Any]:
    """Return settings as nested tables, without those that are None."""
    table: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.metadata.get("later") and value == field.default:
            continue
        if field.metadata.get("rest"):
            table |= value
        elif is_dataclass(value):
            kind = {KIND: value.kind} if "registry" in field.metadata else {}  # type: ignore[union-attr]
            table[field.name] = kind | as_table(value)
        elif isinstance(value, dict):
            table[field.name] = {k: as_table(v) if is_dataclass(v) else v for k, v in value.items()}
        else:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    return {key: value for key, value in table.items() if value is not None}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def read_toml(text: str) -> dict[str, Any]:
    """Return a TOML text as a table; raise ValueError if it is not one.

    The time that tomllib takes grows with the square of the parts of a dotted key.
    """
    if sum(line.count(".") ** 2 for line in text.splitlines()) > MOST_DOTS**2:
        raise ValueError(f"its lines have too many dots, as many as one of {MOST_DOTS:,}")
    return tomllib.loads(text)
