"""Tables of an explanation: one row per patch as CSV or Parquet, and all arrays as HDF5.

patches.csv, patches.parquet: a row for each patch, in the order of the bag. Numbers count from 0.
    row             in the bag
    x, y            as in the bag, in the unit of explanation.json; absent without coordinates
    term-C          what the patch adds to output C, e.g. to the logit of class C; with `rest` they
                    sum to the output
    evidence-C      what it adds to contrast C, e.g. to the logit of class C minus the mean of the
                    others
    sampled-influence-C, influence-C, integrated-gradients-C
                    how much contrast C depends on the patch: the map that is shown first, and
                    others if they were asked for
    attention, ...  every other layer by its key: token-M, entropy, head-H-token-M, ...
    region          the number of the region that the patch is in, from 1, as in explanation.json;
                    empty if it is in none, absent if regions were not measured
scores.h5: the same as arrays (coords, evidence, rest, logits, the answer as probabilities or
    predicted, attention, assignments, ...), with attributes for classes (or contrasts), model,
    fold, method, slide and version.
"""

import csv
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CaprmilError, plural
from caprmil.explain.explanation import Explanation
from caprmil.explain.marked_regions import RegionEffects
from caprmil.io.atomic import atomic_write
from caprmil.io.output_stream import create_hdf5

CHUNK = 4096  # patches written at once
REGION = "region"  # the one column with empty cells


def patch_columns(
    explanation: Explanation, regions: RegionEffects | None = None
) -> dict[str, NDArray[Any]]:
    """Return the columns of the table of patches, by name. The region 0 is none."""
    found: dict[str, NDArray[Any]] = {"row": np.arange(len(explanation))}
    if explanation.coords is not None:
        found |= {"x": explanation.coords[:, 0], "y": explanation.coords[:, 1]}
    found |= {
        f"term-{number}": explanation.evidence[:, number]
        for number in range(explanation.evidence.shape[1])
    }
    found |= {layer.key: layer.values for layer in explanation.layers()}
    return found | ({} if regions is None else {REGION: regions.numbers(len(explanation))})


def write_csv(
    explanation: Explanation, path: str | Path, *, regions: RegionEffects | None = None
) -> Path:
    """Write the table of patches. Nine digits restore every float32 exactly."""
    table = patch_columns(explanation, regions)
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(table)
        for start in range(0, len(explanation), CHUNK):
            rows = slice(start, start + CHUNK)
            parts = [_cells(name, values[rows]) for name, values in table.items()]
            writer.writerows(zip(*parts, strict=True))
    return Path(path)


def _cells(name: str, values: NDArray[Any]) -> list[str]:
    show: Callable[[Any], str] = str if values.dtype.kind in "iu" else "{:.9g}".format
    if name == REGION:
        return [str(value or "") for value in values.tolist()]
    return [show(value) for value in values.tolist()]


def write_parquet(
    explanation: Explanation, path: str | Path, *, regions: RegionEffects | None = None
) -> Path:
    """Write the table of patches as Parquet, with what the evidence is for in its metadata."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise CaprmilError(
            "Writing Parquet needs pyarrow, which is not installed. "
            'Install it with: pip install "caprmil[parquet]"'
        ) from None
    columns = patch_columns(explanation, regions)
    empty = {name: values == 0 if name == REGION else None for name, values in columns.items()}
    table = pa.table({name: pa.array(v, mask=empty[name]) for name, v in columns.items()})
    texts = {
        name: json.dumps(value) if isinstance(value, list) else str(value)
        for name, value in _metadata(explanation).items()
    }
    table = table.replace_schema_metadata(texts)
    with atomic_write(path) as partial:
        pq.write_table(table, partial)
    return Path(path)


def write_hdf5(explanation: Explanation, path: str | Path) -> Path:
    """Write all arrays of an explanation as HDF5."""
    arrays = {
        "coords": explanation.coords,
        "evidence": explanation.evidence,
        "rest": explanation.rest,
        "logits": explanation.logits,
        explanation.target.answer_name: explanation.answer,
        **{name.replace(" ", "_"): values for name, values in explanation.maps.items()},
        "attention": explanation.attention,
        "class_attention": explanation.class_attention,
        "scores": explanation.scores,
        "spread": explanation.spread,
        "assignments": explanation.assignments,
        "before_context": None if explanation.before is None else explanation.before.points,
        "after_context": None if explanation.after is None else explanation.after.points,
    }
    with atomic_write(path) as partial, create_hdf5(partial) as (file, _):
        for name, values in arrays.items():
            if values is not None:
                file.create_dataset(name, data=values)
        file.attrs.update(_metadata(explanation))
    return Path(path)


def _metadata(explanation: Explanation) -> dict[str, Any]:
    info = explanation.info
    found = {
        "slide": explanation.slide,
        plural(explanation.target.contrast_name): list(explanation.names),
        "model": explanation.model,
        "fold": explanation.fold,
        "method": explanation.method,
        "first_map": explanation.first,
        "caprmil": version("caprmil"),
        "unit": info.unit,
        "patch_level0": info.patch_level0,
        "encoder": info.encoder,
        "mpp": info.mpp,
    }
    return {name: value for name, value in found.items() if value is not None}
