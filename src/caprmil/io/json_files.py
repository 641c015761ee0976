"""JSON files: settings, scores and records as text that any program reads."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def as_json(table: Mapping[str, Any]) -> str:
    """Return a table as the JSON files of a run have it; what is not known (NaN) is null."""
    return json.dumps(_plain(table), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table
