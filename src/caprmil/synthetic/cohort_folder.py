"""The folder of a synthetic cohort: bags, the table of labels, and its settings in cohort.json."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError
from caprmil.features import bags
from caprmil.features.description import GENERATED
from caprmil.io.atomic import write_text

PATCH = 224  # pixels


def claim_folder(folder: Path, cohort: Any) -> None:
    """Write cohort.json, or raise CohortError if the folder has another cohort."""
    path, text = folder / "cohort.json", json.dumps(asdict(cohort), indent=2) + "\n"
    if not path.exists():
        write_text(path, text)
    elif path.read_text(encoding="utf-8") != text:
        raise CohortError(f"{folder} has another cohort. Choose another folder.")


def square_grid(n: int) -> NDArray[np.int64]:
    """Return coordinates of n patches that are placed side by side, as nearly a square."""
    side, places = int(np.ceil(np.sqrt(n))), np.arange(n)
    return PATCH * np.stack([places % side, places // side], axis=1)


def write_bag(
    path: Path, features: NDArray[Any], coords: NDArray[Any], *, mpp: float = 1.0
) -> None:
    """Write a bag of a slide with 1 um per pixel, from patches at a scale."""
    side = PATCH * mpp
    bags.write(
        path,
        features,
        coords,
        encoder=GENERATED,
        mpp=mpp,
        scale_rule="exact",
        patch_px=PATCH,
        patch_level0=side,
        step=side,
    )


def write_cohort(
    folder: str | Path,
    cohort: Any,
    table: Sequence[Sequence[object]],
    bag: Callable[[int], tuple[NDArray[Any], NDArray[Any]]],
    *,
    features: str = "features",
    progress: Any = None,
) -> Path:
    """Write the bags and the table of a cohort into a folder, and return the table's path.

    The first row of the table is the header, and its first column the slide. `bag` returns features
    and coordinates of the slide with a number; `features` is the folder of bags. Existing bags of
    the same cohort are kept.
    """
    folder = Path(folder)
    claim_folder(folder, cohort)
    for number, (slide, *_) in enumerate(table[1:]):
        path = folder / features / f"{slide}.h5"
        if not path.exists():
            write_bag(path, *bag(number))
        if progress:
            progress(number + 1, len(table) - 1)
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    path = folder / "labels.csv"
    if path.exists() and path.read_text(encoding="utf-8") == text.getvalue():
        return path
    return write_text(path, text.getvalue())
