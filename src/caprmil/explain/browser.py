"""Data for the browser: an explained slide as JSON and one block of bytes.

Report and viewer draw all maps from it, so that choosing a map needs no request. Shares are sent
as bytes, since 1/255 is finer than a colour; all other numbers as float32. For 20,000 patches with
8 heads of 4 tokens it is about a megabyte.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.explain.covariate_terms import shares
from caprmil.explain.explained_slide import ExplainedSlide
from caprmil.explain.explanation import TOP, Explanation, Layer, top_patches
from caprmil.explain.map_kinds import KINDS
from caprmil.explain.marked_regions import JointRemoval, RegionEffects
from caprmil.explain.patch_boxes import PatchBoxes, why_no_boxes
from caprmil.explain.region_outlines import area_mm2, outline
from caprmil.explain.slide_answer import Answer
from caprmil.explain.slide_shares import slide_shares
from caprmil.features.bag_files import SlideBags
from caprmil.runs.conformal_sets import is_unlike, warning
from caprmil.slides.slide import Slide
from caprmil.targets import Contrast, Target

MAX_CELLS = 4_000_000  # of a grid that is drawn with one pixel per patch
SCALE_PERCENTILE = 99.0  # where a colour scale ends, so that one outlier does not fade the rest


@dataclass(frozen=True, kw_only=True)
class BrowserData:
    """An explained slide for the browser. `facts` has the offset of each array in `data`."""

    facts: dict[str, Any]
    data: bytes


def pack(explained: ExplainedSlide, slide: Slide | None = None, *, top: int = TOP) -> BrowserData:
    """Return an explained slide for the browser, with the size of the slide if it is open."""
    explanation = explained.explanation
    placed = explained.patch_boxes(slide)
    boxes = layout(explained, slide)
    size = (slide.size if slide else explanation.info.slide_size) if placed else None
    arrays: list[NDArray[Any]] = [boxes.corners.astype(np.float32).T]
    layers, start = [], arrays[0].nbytes
    for layer in explanation.layers():
        values = _compact(layer)
        layers.append(_describe(layer, start, values, top))
        arrays.append(values)
        start += values.nbytes + -values.nbytes % 4  # a float32 starts at a multiple of 4
    facts: dict[str, Any] = {
        "slide": explained.name,
        "label": explained.label,
        "contrasts": [_contrast(contrast) for contrast in explanation.target.contrasts],
        "first_contrast": explanation.predicted,
        "output": explanation.target.output_name,
        "patches": len(explanation),
        "side": boxes.side,
        "size": [float(v) for v in (size or boxes.corners.max(axis=0) + boxes.side)],
        "mpp": explained.mpp(slide),
        "grid": _grid(boxes),
        "pixels": slide is not None and placed is not None,
        "placed": placed is not None,
        "unplaced": None if placed else _why_no_positions(explanation),
        "layers": layers,
        "first_layer": explanation.first_layer,
        "maps": [
            {
                "key": kind.key,
                "name": kind.name,
                "meanings": [kind.meaning_of(c) for c in explanation.target.contrasts],
                "faithfulness": _faithfulness(explained, kind.name),
            }
            for kind in (KINDS[name] for name in explanation.map_names)
        ],
        "tokens": _tokens(explanation),
        "slides": _slides(explanation, boxes),
        "part": explanation.info.part_name,
        "unit": "patient" if isinstance(explained.reference.bag, SlideBags) else "slide",
        "model": _model(explanation),
        "answer": _answer(explained.answer),
        "caution": _caution(explained),
        "modalities": _modalities(explanation),
    }
    if explained.regions is not None:
        mpp = explained.mpp(slide) if placed else None
        facts["regions"] = describe_regions(explained.regions, boxes, mpp)
    return BrowserData(facts=facts, data=b"".join(_padded(array) for array in arrays))


def layout(explained: ExplainedSlide, slide: Slide | None = None) -> PatchBoxes:
    """Return where patches are shown: on the slide or, if that is not known, on their grid."""
    cells = explained.explanation.cells.astype(np.float64)
    return explained.patch_boxes(slide) or PatchBoxes(corners=cells, side=1.0)


def describe_regions(
    effects: RegionEffects, boxes: PatchBoxes, mpp: float | None
) -> dict[str, Any]:
    """Return regions with their outlines; `mpp` is None if boxes are not on the slide."""

    def without(removal: JointRemoval) -> dict[str, Any]:
        return {
            "patches": len(removal.rows),
            "answer": removal.answer.tolist(),
            "random": removal.random.tolist(),
        }

    found = []
    for region in effects.regions:
        polygons = outline(boxes, region.rows)
        corners = boxes.corners[region.rows]
        start, end = corners.min(axis=0), corners.max(axis=0) + boxes.side
        found.append(
            {
                "number": region.number,
                "sign": region.sign,
                "share": region.share,
                **without(region),
                "rows": row_ranges(region.rows),
                "area": None if mpp is None else area_mm2(polygons, mpp),
                "box": [*start.tolist(), *(end - start).tolist()],
                "rings": [ring.round(2).tolist() for polygon in polygons for ring in polygon],
            }
        )
    return {
        "answer": effects.answer.tolist(),
        "contrast": effects.of,
        "map": effects.map,
        "found": found,
        "together": {str(sign): without(removal) for sign, removal in effects.together.items()},
        "reason": effects.reason,
    }


def row_ranges(rows: NDArray[np.int64]) -> list[list[int]]:
    """Return rows in order as ranges: the first row of each, and the one after its last."""
    breaks = np.flatnonzero(np.diff(rows) > 1) + 1
    return [[int(part[0]), int(part[-1]) + 1] for part in np.split(rows, breaks)]


def _why_no_positions(explanation: Explanation) -> str:
    """Return why patches are not shown at their position on the slide, and how they are shown."""
    has_grid = explanation.coords is not None and explanation.info.step is not None
    shown = (
        "on their grid"
        if has_grid
        else "row by row in a square, so that neighbours have no meaning"
    )
    return (
        f"The bag {why_no_boxes(explanation.info, explanation.coords)}: patches are shown {shown}."
    )


def _compact(layer: Layer) -> NDArray[Any]:
    if layer.kind == "share":
        return np.rint(layer.values.clip(0, 1) * 255).astype(np.uint8)
    return layer.values.astype(np.float32)


def _describe(layer: Layer, start: int, values: NDArray[Any], top: int) -> dict[str, Any]:
    strength = float(np.percentile(np.abs(layer.values), SCALE_PERCENTILE)) or float(
        np.abs(layer.values).max()
    )
    found = {
        "key": layer.key,
        "title": layer.title,
        "kind": layer.kind,
        "start": start,
        "bytes": values.dtype == np.uint8,
        "limit": 1.0 if layer.kind == "share" else strength,
        "top": top_patches(layer.values, top).tolist(),
    }
    if layer.kind == "diverging":
        found["bottom"] = top_patches(-layer.values, top).tolist()
    return found


def _grid(boxes: PatchBoxes) -> dict[str, float] | None:
    """Return the grid that patches fill without overlap, or None."""
    start = boxes.corners.min(axis=0)
    cells = (boxes.corners - start) / boxes.side
    columns, rows = (round(float(last)) + 1 for last in cells.max(axis=0))
    if np.abs(cells - np.rint(cells)).max() > 0.01 or columns * rows > MAX_CELLS:
        return None
    return {"x": float(start[0]), "y": float(start[1]), "columns": columns, "rows": rows}


def _tokens(explanation: Explanation) -> dict[str, Any] | None:
    if explanation.assignments is None:
        return None
    blocks, heads, _, tokens = explanation.assignments.shape
    return {
        "blocks": blocks,
        "heads": heads,
        "tokens": tokens,
        "usage": explanation.usage.round(5).tolist(),
        "entropy": explanation.uncertainty.mean(axis=2).round(5).tolist(),
    }


def _caution(explained: ExplainedSlide) -> str | None:
    """Return a warning if the slide is unlike the training slides."""
    share = explained.unlike
    return warning(share) if share is not None and is_unlike(share) else None


def _faithfulness(explained: ExplainedSlide, name: str) -> str:
    """Return how faithful a map is, in sentences."""
    if name == explained.explanation.first:
        return explained.faithfulness_text()
    if explained.ranking is None:
        return "The faithfulness of this map was not measured."
    return explained.ranking.in_words(name)


def _slides(explanation: Explanation, boxes: PatchBoxes) -> list[dict[str, Any]]:
    """Return the slides of a patient with their shares, and where they are shown."""
    found = []
    for share in slide_shares(explanation):
        corners = boxes.corners[share.rows]
        start, end = corners.min(axis=0), corners.max(axis=0) + boxes.side
        found.append(
            {
                "name": share.name,
                "patches": share.patches,
                "evidence": list(share.evidence),
                "attention": share.attention,
                "box": [*start.tolist(), *(end - start).tolist()],
            }
        )
    return found


def _contrast(contrast: Contrast) -> dict[str, Any]:
    names = ("name", "positive", "negative", "total", "ends")
    return {name: getattr(contrast, name) for name in names}


def _model(explanation: Explanation) -> dict[str, Any]:
    return {
        "name": explanation.model,
        "fold": explanation.fold,
        "method": explanation.method,
        "exact": explanation.exact,
        "gap": explanation.gap,
        "logits": explanation.logits.tolist(),
        "rest": explanation.rest.tolist(),
        "sums": explanation.evidence.astype(np.float64).sum(axis=0).tolist(),
        "totals": totals(explanation.target, explanation.logits),
        "answer": explanation.answer.tolist(),
    }


def _modalities(explanation: Explanation) -> dict[str, Any] | None:
    """Return what patches and covariates add to each contrast, if the model reads covariates."""
    target, terms = explanation.target, explanation.covariates
    if not terms:
        return None
    patches = totals(target, explanation.evidence.astype(np.float64).sum(axis=0))
    adds = [[each.of(contrast) for contrast in target.contrasts] for each in terms]
    each_of = [[own[number] for own in adds] for number in range(len(patches))]
    parts = [shares(own, each) for own, each in zip(patches, each_of, strict=True)]
    scales = [[each.scaling_of(contrast) for contrast in target.contrasts] for each in terms]
    split = all(each.scaling is None for each in terms)  # else nothing has a share of its own
    return {
        "patches": {"adds": patches, "shares": [own for own, _ in parts] if split else None},
        "covariates": [
            {
                "title": each.title,
                "adds": own,
                "shares": [part[number] for _, part in parts] if split else None,
                "scales": None if split else scales[number],
            }
            for number, (each, own) in enumerate(zip(terms, adds, strict=True))
        ],
        "bias": totals(target, explanation.bias),
    }


def totals(target: Target, outputs: NDArray[np.floating]) -> list[float]:
    """Return the value of each contrast, given the outputs of a model."""
    return [float(contrast.of(outputs.astype(np.float64))) for contrast in target.contrasts]


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "mean": answer.mean.tolist(),
        "calibrated": None if answer.calibrated is None else answer.calibrated.tolist(),
        "models": len(answer.by_fold),
        "unseen": answer.unseen,
    }


def _padded(array: NDArray[Any]) -> bytes:
    data = np.ascontiguousarray(array).tobytes()
    return data + b"\0" * (-len(data) % 4)


def asset(name: str) -> str:
    """Return a script that report and viewer share."""
    return (files("caprmil.explain") / "static" / name).read_text(encoding="utf-8")
