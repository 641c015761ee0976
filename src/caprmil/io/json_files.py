"""JSON files: settings, scores and records of a run."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caprmil.errors import RunError


def as_json(table: Mapping[str, Any]) -> str:
    """Return a table as JSON text. NaN becomes null, which any program can read."""
    return json.dumps(_plain(table), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def read_json(path: Path, *, advice: str = "Restore it from a copy.") -> dict[str, Any]:
    """Return the table in a JSON file of a run. `advice` says what to do if it is damaged."""
    try:
        table = parse_json(path.read_bytes())
    except OSError as problem:
        raise RunError(
            f"{path} is missing or cannot be read ({problem.strerror or problem}). {advice}"
        ) from problem
    except ValueError as problem:
        raise RunError(f"{path} is damaged ({problem}). {advice}") from problem
    if not isinstance(table, dict):
        raise RunError(f"{path} is damaged (it has no table). {advice}")
    return table


def parse_json(text: bytes) -> Any:
    """Return the content of a JSON text in UTF-8; raise ValueError if it is not one of ours.

    `as_json` writes neither NaN nor infinity, nor text that is not Unicode.
    """
    found = text.decode("utf-8")
    try:
        value = json.loads(found, parse_constant=_refuse, parse_float=_number, parse_int=_integer)
    except RecursionError:
        raise ValueError("too many brackets in each other") from None
    if re.search(r"\\u[dD][89a-fA-F]", found):  # half of a pair, which no file or screen can hold
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _integer(text: str) -> int:
    if len(text) > 19:
        raise ValueError(f"{text[:19]}... is too large")
    return int(text)
