"""Exports of an explanation: a table, HDF5, and GeoJSON for QuPath. Any bag size is streamed.

patches.csv, patches.parquet: a row for each patch, in the order of the bag.
    row             of the bag, from 0
    x, y            as in the bag (its unit is in explanation.json); not there without coordinates
    term-C          what the patch adds to the logit of class C, from 0; with `rest` they sum to it
    evidence-C      what it adds to the lead of class C over the mean of the others
    attention, ...  every other layer by its key: token-M, entropy, head-H-token-M, ..., from 0
scores.h5: the same as arrays (coords, evidence, rest, logits, probabilities, attention,
    assignments, ...), with attributes for classes, model, fold, method, slide and version.
patches.geojson: patches as detections with layers as measurements, top patches as annotations.
"""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError, CaprmilError
from caprmil.explain.case import Squares, why_unplaced
from caprmil.explain.explanation import TOP, Explanation, Layer, top_patches
from caprmil.figures.style import BLUE, VERMILLION
from caprmil.figures.token_maps import colour_of
from caprmil.io.atomic import atomic_write

CHUNK = 4096  # patches written at once


def columns(told: Explanation) -> dict[str, NDArray[Any]]:
    """Return the columns of the table of patches, by name."""
    found: dict[str, NDArray[Any]] = {"row": np.arange(len(told))}
    if told.coords is not None:
        found |= {"x": told.coords[:, 0], "y": told.coords[:, 1]}
    found |= {f"term-{number}": told.evidence[:, number] for number in range(len(told.classes))}
    return found | {layer.key: layer.values for layer in told.layers()}


def write_csv(told: Explanation, path: str | Path) -> Path:
    """Write the table of patches. Nine digits: every float32 comes back as it was."""
    table = columns(told)
    with atomic_write(path) as passing, passing.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(table)
        for start in range(0, len(told), CHUNK):
            parts = [_words(values[start : start + CHUNK]) for values in table.values()]
            writer.writerows(zip(*parts, strict=True))
    return Path(path)


def _words(values: NDArray[Any]) -> list[str]:
    whole = values.dtype.kind in "iu"
    return [str(value) if whole else f"{value:.9g}" for value in values.tolist()]


def write_parquet(told: Explanation, path: str | Path) -> Path:
    """Write the table of patches as Parquet, with the classes in its metadata."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise CaprmilError(
            "Parquet is written by pyarrow, which is not installed. "
            'Install it with: pip install "caprmil[parquet]"'
        ) from None
    table = pa.table(columns(told))
    words = {name: str(value) for name, value in _facts(told).items() if name != "classes"}
    table = table.replace_schema_metadata({**words, "classes": json.dumps(told.classes)})
    with atomic_write(path) as passing:
        pq.write_table(table, passing)
    return Path(path)


def write_scores(told: Explanation, path: str | Path) -> Path:
    """Write all arrays of an explanation to HDF5, to be read with h5py alone."""
    arrays = {
        "coords": told.coords,
        "evidence": told.evidence,
        "rest": told.rest,
        "logits": told.logits,
        "probabilities": told.probabilities,
        "attention": told.attention,
        "class_attention": told.class_attention,
        "scores": told.scores,
        "spread": told.spread,
        "assignments": told.assignments,
        "before_context": None if told.before is None else told.before.points,
        "after_context": None if told.after is None else told.after.points,
    }
    with atomic_write(path) as passing, h5py.File(passing, "x") as file:
        for name, values in arrays.items():
            if values is not None:
                file.create_dataset(name, data=values)
        file.attrs.update(_facts(told))
    return Path(path)


def _facts(told: Explanation) -> dict[str, Any]:
    info = told.info
    known = {
        "slide": told.slide,
        "classes": list(told.classes),
        "model": told.model,
        "fold": told.fold,
        "method": told.method,
        "caprmil": version("caprmil"),
        "unit": info.unit,
        "patch_level0": info.patch_level0,
        "encoder": info.encoder,
        "mpp": info.mpp,
    }
    return {name: value for name, value in known.items() if value is not None}


def write_geojson(
    told: Explanation,
    squares: Squares | None,
    path: str | Path,
    *,
    top: int = TOP,
    heads: bool = False,
) -> Path:
    """Write patches for QuPath, in level-0 pixels: measurements to be mapped, top patches to visit.

    A patch is a detection, of the class of its token or, without tokens, of the answer that it
    speaks for. `heads` adds the weights on the tokens of each head. `top`: patches of a gallery.
    """
    if squares is None:
        why = why_unplaced(told.info, told.coords)
        raise BagError(
            f"The bag of {told.slide or 'this slide'} {why}: QuPath has no place for it."
        )
    layers = [layer for layer in told.layers() if heads or "head-" not in layer.key]
    with atomic_write(path) as passing, passing.open("w", encoding="utf-8") as stream:
        stream.write('{"type": "FeatureCollection", "features": [')
        between = "\n"
        for feature in _features(told, squares, layers, top):
            stream.write(between + json.dumps(feature, ensure_ascii=False, allow_nan=False))
            between = ",\n"
        stream.write("\n]}\n")
    return Path(path)


def _features(
    told: Explanation, squares: Squares, layers: Sequence[Layer], top: int
) -> Iterator[dict[str, Any]]:
    """Yield top patches, then all."""
    for name, colour, layer, rows in tops(told, top):
        for rank, row in enumerate(rows.tolist(), 1):
            said = {"classification": _class(name, colour), "name": f"{name}, {rank}"}
            measured = {layer.title: layer.values[row]}
            yield _feature("annotation", squares, row, {**said, "isLocked": True}, measured)
    kinds, of = _kinds(told)
    for row in range(len(told)):
        measured = {layer.title: layer.values[row] for layer in layers}
        yield _feature("detection", squares, row, {"classification": kinds[of[row]]}, measured)


def tops(told: Explanation, top: int = TOP) -> Iterator[tuple[str, str, Layer, NDArray[np.int64]]]:
    """Yield name, colour, layer and rows of each gallery: for, against, and of each token."""
    layers = {layer.key: layer for layer in told.layers()}
    answer, number = told.classes[told.predicted], told.predicted
    evidence = layers[f"evidence-{number}"]
    for word, colour, sign in (("for", VERMILLION, 1), ("against", BLUE, -1)):
        rows = top_patches(sign * evidence.values, top)
        rows = rows[sign * evidence.values[rows] > 0]
        yield f"Most {word} {answer}", colour, evidence, rows
    if told.assignments is None:
        return
    blocks, _, _, tokens = told.assignments.shape
    prefix = f"block-{blocks - 1}-" if blocks > 1 else ""
    for token in range(tokens):
        layer = layers[f"{prefix}token-{token}"]
        name, colour = f"Top of token {token + 1}", colour_of(token)
        yield name, colour, layer, top_patches(layer.values, top)


def _kinds(told: Explanation) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the classes of detections, and which of them each patch has."""
    if told.assignments is not None:
        weights = told.assignments[-1].mean(axis=0)
        names, of = [f"Token {n + 1}" for n in range(weights.shape[1])], weights.argmax(axis=1)
    else:
        names = [f"For {name}" for name in told.classes]
        of = told.evidence.argmax(axis=1)
    kinds = [_class(name, colour_of(n)) for n, name in enumerate(names)]
    return kinds, of.tolist()


def _class(name: str, colour: str) -> dict[str, Any]:
    return {"name": name, "color": [int(colour[place : place + 2], 16) for place in (1, 3, 5)]}


def _feature(
    kind: str, squares: Squares, row: int, said: dict[str, Any], measured: dict[str, Any]
) -> dict[str, Any]:
    left, top = (round(float(edge), 2) for edge in squares.corners[row])
    right, bottom = (round(edge + squares.side, 2) for edge in (left, top))
    corners = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
    numbers = {name: float(f"{value:.6g}") for name, value in measured.items()}
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [corners]},
        "properties": {
            "objectType": kind,
            **said,
            # QuPath since 0.4 keeps measurements as an object; earlier ones ignore them.
            "measurements": {name: n for name, n in numbers.items() if math.isfinite(n)},
        },
    }
