"""A folder belongs to one synthetic cohort, which cohort.json in it names."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from caprmil.errors import CohortError
from caprmil.io.atomic import write_text


def claim_folder(folder: Path, cohort: Any) -> None:
    """Say which cohort a folder holds; refuse one that holds another."""
    path, text = folder / "cohort.json", json.dumps(asdict(cohort), indent=2) + "\n"
    if not path.exists():
        write_text(path, text)
    elif path.read_text() != text:
        raise CohortError(f"{folder} holds another cohort. Choose another folder.")
