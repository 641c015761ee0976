"""GeoJSON of an explanation for QuPath: patches, top patches and regions with measurements."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError
from caprmil.explain.explanation import TOP, Explanation, Layer, top_patches
from caprmil.explain.marked_regions import MeasuredRegion, RegionEffects
from caprmil.explain.patch_boxes import PatchBoxes, why_no_boxes
from caprmil.explain.region_outlines import area_mm2, outline
from caprmil.explain.removal import answer_words, show_answer
from caprmil.figures.style import BLUE, VERMILLION
from caprmil.figures.token_maps import colour_of
from caprmil.io.atomic import atomic_write


def write_geojson(
    explanation: Explanation,
    boxes: PatchBoxes | None,
    path: str | Path,
    *,
    top: int = TOP,
    heads: bool = False,
) -> Path:
    """Write patches for QuPath, in level-0 pixels: all as detections, top patches as annotations.

    The class of a detection is the token that the patch is assigned to or, without tokens, the
    contrast that it is evidence for. `heads` adds the assignments in each head. `top` is the number
    of annotations of each gallery.
    """
    boxes = _required(boxes, explanation)
    layers = [layer for layer in explanation.layers() if heads or "head-" not in layer.key]
    return _write(_features(explanation, boxes, layers, top), path)


def write_region_geojson(
    effects: RegionEffects,
    explanation: Explanation,
    boxes: PatchBoxes | None,
    path: str | Path,
    *,
    mpp: float | None = None,
) -> Path:
    """Write regions for QuPath as annotations: the union of their patches, and their effect.

    `mpp` is that of level 0, for areas.
    """
    boxes = _required(boxes, explanation)
    regions = (
        _region_feature(effects, region, explanation, boxes, mpp) for region in effects.regions
    )
    return _write(regions, path)


def _required(boxes: PatchBoxes | None, explanation: Explanation) -> PatchBoxes:
    if boxes is None:
        why = why_no_boxes(explanation.info, explanation.coords)
        raise BagError(
            f"The bag of {explanation.slide or 'this slide'} {why}, so QuPath cannot show its "
            "patches."
        )
    return boxes


def _write(features: Iterable[dict[str, Any]], path: str | Path) -> Path:
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as stream:
        stream.write('{"type": "FeatureCollection", "features": [')
        separator = "\n"
        for feature in features:
            stream.write(separator + json.dumps(feature, ensure_ascii=False, allow_nan=False))
            separator = ",\n"
        stream.write("\n]}\n")
    return Path(path)


def _region_feature(
    effects: RegionEffects,
    region: MeasuredRegion,
    explanation: Explanation,
    boxes: PatchBoxes,
    mpp: float | None,
) -> dict[str, Any]:
    of, target = effects.of, explanation.target
    contrast = target.contrasts[of]
    words, colour = (
        (contrast.positive, VERMILLION) if region.sign > 0 else (contrast.negative, BLUE)
    )
    polygons = outline(boxes, region.rows)
    rings = [[ring.round(2).tolist() for ring in polygon] for polygon in polygons]
    answer = answer_words(target.number_name, contrast.name)
    before, after = float(effects.answer[of]), float(region.answer[of])
    change = " to ".join(show_answer(target.number_name, value) for value in (before, after))
    title = f"{answer[0].upper()}{answer[1:]}"
    measured: dict[str, float] = {
        f"{title}: effect of the region": before - after,
        f"{title}: with all patches": before,
        f"{title}: without the region": after,
        f"{title}: without as many random patches": float(region.random[of]),
        "Patches": len(region.rows),
        "Share of the map": region.share,
    }
    if mpp is not None:
        measured["Area mm^2"] = area_mm2(polygons, mpp)
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": rings[0]}
        if len(rings) == 1
        else {"type": "MultiPolygon", "coordinates": rings},
        "properties": {
            "objectType": "annotation",
            "name": f"Region {region.number}, {words}: {answer} {change} without it",
            "classification": _class(f"Region {words}", colour),
            "isLocked": True,
            "measurements": _finite(measured),
        },
    }


def _features(
    explanation: Explanation, boxes: PatchBoxes, layers: Sequence[Layer], top: int
) -> Iterator[dict[str, Any]]:
    """Yield the top patches, then all patches."""
    for name, colour, layer, rows in galleries(explanation, top):
        for rank, row in enumerate(rows.tolist(), 1):
            shown = {"classification": _class(name, colour), "name": f"{name}, {rank}"}
            measured = {layer.title: layer.values[row]}
            yield _feature("annotation", boxes, row, {**shown, "isLocked": True}, measured)
    classes, numbers = _classes(explanation)
    for row in range(len(explanation)):
        measured = {layer.title: layer.values[row] for layer in layers}
        shown = {"classification": classes[numbers[row]]}
        yield _feature("detection", boxes, row, shown, measured)


def galleries(
    explanation: Explanation, top: int = TOP
) -> Iterator[tuple[str, str, Layer, NDArray[np.int64]]]:
    """Yield name, colour, layer and rows of each gallery: for, against, and of each token."""
    layers = {layer.key: layer for layer in explanation.layers()}
    contrast = explanation.target.contrasts[explanation.predicted]
    first = layers[explanation.first_layer]
    for words, colour, sign in ((contrast.positive, VERMILLION, 1), (contrast.negative, BLUE, -1)):
        rows = top_patches(sign * first.values, top)
        rows = rows[sign * first.values[rows] > 0]
        yield f"Most {words}", colour, first, rows
    if explanation.assignments is None:
        return
    blocks, _, _, tokens = explanation.assignments.shape
    prefix = f"block-{blocks - 1}-" if blocks > 1 else ""
    for token in range(tokens):
        layer = layers[f"{prefix}token-{token}"]
        name, colour = f"Top of token {token + 1}", colour_of(token)
        yield name, colour, layer, top_patches(layer.values, top)


def _classes(explanation: Explanation) -> tuple[list[dict[str, Any]], list[int]]:
    """Return QuPath's classes of detections, and the number of each patch's class."""
    if explanation.assignments is not None:
        weights = explanation.assignments[-1].mean(axis=0)
        names = [f"Token {n + 1}" for n in range(weights.shape[1])]
        numbers = weights.argmax(axis=1)
    elif len(explanation.names) == 1:  # the sign says what a patch is evidence for
        (contrast,) = explanation.target.contrasts
        names = [
            f"{words[0].upper()}{words[1:]}" for words in (contrast.positive, contrast.negative)
        ]
        numbers = (explanation.evidence_for(0) < 0).astype(np.int64)
    else:
        names = [f"For {name}" for name in explanation.names]
        numbers = explanation.evidence.argmax(axis=1)
    classes = [_class(name, colour_of(n)) for n, name in enumerate(names)]
    return classes, numbers.tolist()


def _class(name: str, colour: str) -> dict[str, Any]:
    return {"name": name, "color": [int(colour[start : start + 2], 16) for start in (1, 3, 5)]}


def _feature(
    kind: str, boxes: PatchBoxes, row: int, properties: dict[str, Any], measured: dict[str, Any]
) -> dict[str, Any]:
    left, top = (round(float(edge), 2) for edge in boxes.corners[row])
    right, bottom = (round(edge + boxes.side, 2) for edge in (left, top))
    corners = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [corners]},
        "properties": {
            "objectType": kind,
            **properties,
            # An object since QuPath 0.4. Earlier versions ignore it.
            "measurements": _finite(measured),
        },
    }


def _finite(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return measurements with six digits, without those that are NaN or infinite."""
    numbers = {name: float(f"{value:.6g}") for name, value in measured.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
