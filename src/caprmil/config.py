"""TOML to frozen dataclasses, strictly; changes from the command line; the digest of settings."""

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from caprmil.errors import RecipeError, suggest
from caprmil.io.paths import as_path

Settings = TypeVar("Settings")

REST = {"rest": True}
"""Metadata of the one field that takes all keys of a table which are not fields themselves."""


def load(
    path: str | os.PathLike[str], *, into: type[Settings], changes: Iterable[str] = ()
) -> Settings:
    """Read a TOML file into a dataclass, with changes such as `train.epochs=5` made on the way."""
    path = as_path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise RecipeError(f"{path} is not a TOML file: {problem}.") from None
    except OSError as problem:
        raise RecipeError(f"{path} cannot be read: {problem.strerror}.") from None
    return parse(table, into=into, name=path.name, changes=changes)


def parse(
    table: Mapping[str, Any],
    *,
    into: type[Settings],
    name: str = "recipe",
    changes: Iterable[str] = (),
) -> Settings:
    """Turn a table into a dataclass: a key or a value that does not fit is a RecipeError."""
    table = dict(table)
    for change in changes:
        table = _changed(table, change)
    return _build(into, table, name)


def dump(settings: Any) -> str:
    """Return settings as TOML, whole: what `load` would turn into the same settings."""
    return tomli_w.dumps(_plain(settings))


def digest(settings: Any) -> str:
    """Return a short name of the settings: equal settings, equal digest."""
    text = json.dumps(_plain(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: Any, new: Any) -> list[str]:
    """Return one line for each setting that differs, e.g. `train.epochs: 30 -> 5`."""
    before, after = _flat(_plain(old)), _flat(_plain(new))
    return [
        f"{key}: {before.get(key, 'not set')} -> {after.get(key, 'not set')}"
        for key in sorted(before | after)
        if before.get(key) != after.get(key)
    ]


def _changed(table: dict[str, Any], change: str) -> dict[str, Any]:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"A change reads KEY=VALUE, e.g. train.epochs=5, not '{change}'.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word, such as model.pool=gated
    head, *rest = key.strip().split(".", 1)
    if not rest:
        return {**table, head: value}
    inner = table.get(head, {})
    if not isinstance(inner, dict):
        raise RecipeError(f"'{key}' cannot be changed: {head} is a value, not a table.")
    return {**table, head: _changed(inner, f"{rest[0]}={text}")}


def _build(kind: type[Settings], table: Mapping[str, Any], where: str) -> Settings:
    types = get_type_hints(kind)
    named = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    rest = next((name for name, field in named.items() if field.metadata.get("rest")), None)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in named and key != rest:
            values[key] = _convert(types[key], value, f"{where}: {key}")
        elif rest:
            values.setdefault(rest, {})[key] = value
        else:
            raise RecipeError(
                f"There is no setting in {where} called '{key}'.{suggest(key, named)}"
            )
    for name, field in named.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise RecipeError(f"{where} must say '{name}'.")
    try:
        return kind(**values)
    except RecipeError as problem:
        raise RecipeError(f"{where}: {problem}") from None


def _convert(kind: Any, value: Any, where: str) -> Any:
    """Return the value as the field's type has it, or say what it must be."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise RecipeError(f"{where} is a table of settings, not {value!r}.")
        return _build(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for choice in arguments:
            if choice is not NoneType:
                return _convert(choice, value, where)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is kind:  # not isinstance: True is no whole number
        return value
    wanted = " or ".join(map(repr, arguments)) if origin is Literal else _name(kind)
    raise RecipeError(f"{where} must be {wanted}, not {value!r}.")


def _name(kind: Any) -> str:
    known = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if get_origin(kind) is tuple:
        return "a list"
    return known.get(kind, "a table")


def _plain(settings: Any) -> dict[str, Any]:
    """Return nested tables without what is not set, and with the rest in its place."""
    return {key: value for key, value in _tables(settings).items() if value is not None}


def _tables(settings: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.metadata.get("rest"):
            table |= value
        elif is_dataclass(value):
            table[field.name] = _plain(value)
        else:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    return table


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
