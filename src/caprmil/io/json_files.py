"""JSON files: settings, scores and records of a run."""

import json
import math
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


def read_json(path: Path) -> dict[str, Any]:
    """Return the table in a JSON file of a run."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise RunError(f"{path} is damaged ({problem}). Restore it from a copy.") from problem
    if not isinstance(table, dict):
        raise RunError(f"{path} is damaged: it has no table. Restore it from a copy.")
    return table
