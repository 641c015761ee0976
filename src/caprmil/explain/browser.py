"""Numbers for a browser: a case as one table of facts and one block of bytes, to be painted there.

Shares go as bytes (a 255th is finer than a colour), all else as float32. Twenty thousand patches
with 8 heads of 4 tokens are about a megabyte, and no later choice of a map needs a request.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.explain import (
    TOP,
    Case,
    Explanation,
    Layer,
    Squares,
    top_patches,
    why_unplaced,
)
from caprmil.slides.slide import Slide

MOST_CELLS = 4_000_000  # of a grid that is painted one pixel a patch
LEGEND = 99.0  # percentile that ends a scale: one outlier would make all others pale


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A case for a browser. `facts` can be JSON; it says where in `data` each array lies."""

    facts: dict[str, Any]
    data: bytes


def pack(case: Case, slide: Slide | None = None, *, top: int = TOP) -> Numbers:
    """Return a case as a browser paints it. The slide, if it is open, tells its size."""
    told = case.explanation
    placed = case.squares(slide)
    where = placed or Squares(corners=told.cells.astype(np.float64), side=1.0)
    known = (slide.size if slide else told.info.slide_size) if placed else None
    arrays: list[NDArray[Any]] = [where.corners.astype(np.float32).T]
    layers, start = [], arrays[0].nbytes
    for layer in told.layers():
        values = _wire(layer)
        layers.append(_describe(layer, start, values, top))
        arrays.append(values)
        start += values.nbytes + -values.nbytes % 4  # a float32 begins at a multiple of 4
    facts = {
        "slide": case.name,
        "label": case.label,
        "classes": told.classes,
        "predicted": told.predicted,
        "patches": len(told),
        "side": where.side,
        "size": [float(v) for v in (known or where.corners.max(axis=0) + where.side)],
        "mpp": case.mpp(slide),
        "grid": _grid(where),
        "pixels": slide is not None and placed is not None,
        "placed": placed is not None,
        "unplaced": None if placed else _unplaced(told),
        "layers": layers,
        "tokens": _tokens(case),
        "model": _model(case),
        "answer": _answer(case),
    }
    return Numbers(facts=facts, data=b"".join(_padded(array) for array in arrays))


def _unplaced(told: Explanation) -> str:
    """Say why patches are not where they lie on the slide, and where they are shown instead."""
    gridded = told.coords is not None and told.info.step is not None
    shown = "on their grid" if gridded else "row by row in a square, so neighbours mean nothing"
    return f"The bag {why_unplaced(told.info, told.coords)}: patches are shown {shown}."


def _wire(layer: Layer) -> NDArray[Any]:
    if layer.kind == "share":
        return np.rint(layer.values.clip(0, 1) * 255).astype(np.uint8)
    return layer.values.astype(np.float32)


def _describe(layer: Layer, start: int, values: NDArray[Any], top: int) -> dict[str, Any]:
    strength = float(np.percentile(np.abs(layer.values), LEGEND)) or float(
        np.abs(layer.values).max()
    )
    said = {
        "key": layer.key,
        "title": layer.title,
        "kind": layer.kind,
        "start": start,
        "bytes": values.dtype == np.uint8,
        "limit": 1.0 if layer.kind == "share" else strength,
        "top": top_patches(layer.values, top).tolist(),
    }
    if layer.kind == "diverging":
        said["bottom"] = top_patches(-layer.values, top).tolist()
    return said


def _grid(where: Squares) -> dict[str, float] | None:
    """Return the grid that patches fill without overlap, one pixel of a picture each, if any."""
    start = where.corners.min(axis=0)
    cells = (where.corners - start) / where.side
    columns, rows = (round(float(most)) + 1 for most in cells.max(axis=0))
    if np.abs(cells - np.rint(cells)).max() > 0.01 or columns * rows > MOST_CELLS:
        return None
    return {"x": float(start[0]), "y": float(start[1]), "columns": columns, "rows": rows}


def _tokens(case: Case) -> dict[str, Any] | None:
    told = case.explanation
    if told.assignments is None:
        return None
    blocks, heads, _, tokens = told.assignments.shape
    return {
        "blocks": blocks,
        "heads": heads,
        "tokens": tokens,
        "usage": told.usage.round(5).tolist(),
        "entropy": told.uncertainty.mean(axis=2).round(5).tolist(),
    }


def _model(case: Case) -> dict[str, Any]:
    told = case.explanation
    return {
        "name": told.model,
        "fold": told.fold,
        "method": told.method,
        "exact": told.exact,
        "gap": told.gap,
        "logits": told.logits.tolist(),
        "rest": told.rest.tolist(),
        "sums": told.evidence.astype(np.float64).sum(axis=0).tolist(),
        "probabilities": told.probabilities.tolist(),
    }


def _answer(case: Case) -> dict[str, Any]:
    answer = case.answer
    return {
        "probabilities": answer.probabilities.tolist(),
        "calibrated": None if answer.calibrated is None else answer.calibrated.tolist(),
        "models": len(answer.by_fold),
        "unseen": answer.unseen,
    }


def _padded(array: NDArray[Any]) -> bytes:
    data = np.ascontiguousarray(array).tobytes()
    return data + b"\0" * (-len(data) % 4)


def asset(name: str) -> str:
    """Return a script or style sheet that pages share."""
    return (files("caprmil.explain") / "static" / name).read_text(encoding="utf-8")
