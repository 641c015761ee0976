"""The folder of a synthetic cohort, whose settings are stored in cohort.json."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from caprmil.errors import CohortError
from caprmil.io.atomic import write_text


def claim_folder(folder: Path, cohort: Any) -> None:
    """Write cohort.json, or raise CohortError if the folder has another cohort."""
    path, text = folder / "cohort.json", json.dumps(asdict(cohort), indent=2) + "\n"
    if not path.exists():
        write_text(path, text)
    elif path.read_text(encoding="utf-8") != text:
        raise CohortError(f"{folder} has another cohort. Choose another folder.")
