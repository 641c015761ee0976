"""A folder with all that can be said of a case: figures and exports, whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from caprmil import figures
from caprmil.errors import CaprmilError
from caprmil.explain.case import Case, why_unplaced
from caprmil.explain.explanation import TOP, Explanation
from caprmil.explain.export import write_csv, write_geojson, write_parquet, write_scores
from caprmil.explain.pictures import METHOD_WORDS, Pictures, pick_head
from caprmil.io.atomic import check_new, write_text
from caprmil.io.json_files import as_json
from caprmil.io.paths import require_local
from caprmil.io.progress import Step
from caprmil.runs.run import Run

SCREEN, PRINT = 200, 300  # dots per inch of PNG, and of pictures in PDF
VECTOR = ("tokens", "evidence")  # figures that are written as PDF too


@contextmanager
def building(folder: str | Path) -> Iterator[Path]:
    """Yield a hidden folder beside; it becomes `folder` at the end, or goes if anything fails."""
    folder = require_local(folder)
    check_new(folder)
    passing = folder.with_name(f".{uuid4().hex[:8]}.{folder.name}")
    try:
        passing.mkdir(parents=True)
        yield passing
        check_new(folder)  # somebody may have been quicker
        passing.rename(folder)
    except OSError as problem:
        raise CaprmilError(
            f"{folder} cannot be written ({problem.strerror or problem}). "
            "Check space and rights in its folder."
        ) from problem
    finally:
        shutil.rmtree(passing, ignore_errors=True)


def fill(
    folder: Path,
    case: Case,
    run: Run,
    *,
    head: int | None = None,
    top: int = TOP,
    parquet: bool = False,
    progress: Step | None = None,
) -> list[str]:
    """Write figures and exports of a case into a folder; return what could not be written, and why.

    `head` is one to draw, from 1; 0 draws the mean over heads, None the most telling one.
    """
    told, left_out = case.explanation, []
    chosen = pick_head(told, head)
    slide = case.slide()
    try:
        pictures = Pictures(case, slide, top=top)
        drawn = pictures.all(chosen)
    finally:
        if slide is not None:
            slide.close()
    for number, (name, figure) in enumerate(drawn.items(), 1):
        figures.settle(figure)
        figures.save(figure, folder / f"{name}.png", dpi=SCREEN)
        if name in VECTOR:
            figures.save(figure, folder / f"{name}.pdf", dpi=PRINT)
        if progress:
            progress(number, len(drawn) + 1)
    if told.assignments is None:
        left_out.append(f"figures of tokens: {told.model} has none")
    if slide is None:
        left_out.append("patches to look at: the slide itself is not at hand; pass --slide")
    write_csv(told, folder / "patches.csv")
    if parquet:
        write_parquet(told, folder / "patches.parquet")
    write_scores(told, folder / "scores.h5")
    if pictures.squares is None:
        why = why_unplaced(told.info, told.coords)
        missing = "patches.geojson" if slide is None else "pictures and patches.geojson"
        left_out.append(f"{missing}: the bag {why}")
    else:
        write_geojson(told, pictures.squares, folder / "patches.geojson", top=top)
    write_text(folder / "explanation.json", as_json(describe_case(case, run, head=chosen)))
    if progress:
        progress(len(drawn) + 1, len(drawn) + 1)
    return left_out


def describe_case(case: Case, run: Run, *, head: int | None = None) -> dict[str, Any]:
    """Return the answer, how it adds up, the tokens and where all came from, ready for JSON."""
    told, answer, info = case.explanation, case.answer, case.explanation.info
    return {
        "slide": case.name,
        "label": case.label,
        "answer": {
            "predicted": run.classes[int(answer.probabilities.argmax())],
            "probabilities": _by_class(run.classes, answer.probabilities),
            "calibrated": None
            if answer.calibrated is None
            else _by_class(run.classes, answer.calibrated),
            "by_fold": {fold: _by_class(run.classes, p) for fold, p in answer.by_fold.items()},
            "unseen": answer.unseen,
        },
        "explained": {
            "model": told.model,
            "fold": told.fold,
            "patches": len(told),
            "probabilities": _by_class(told.classes, told.probabilities),
            "method": told.method,
            "method_in_words": METHOD_WORDS[told.method],
            "logits": _by_class(told.classes, told.logits),
            "evidence": _by_class(told.classes, told.evidence.astype(np.float64).sum(axis=0)),
            "rest": _by_class(told.classes, told.rest),
            "gap": told.gap,
        },
        "tokens": None if told.assignments is None else _tokens(told, head),
        "provenance": {
            "caprmil": version("caprmil"),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": str(run.folder),
            "recipe": run.facts.digest,
            "bag": str(case.subject.bag),
            "pixels": None if case.subject.pixels is None else str(case.subject.pixels),
            "coordinates": info.unit,
            "patch_level0": info.patch_level0,
            "encoder": info.encoder,
            "mpp": info.mpp,
        },
    }


def _tokens(told: Explanation, head: int | None) -> dict[str, Any]:
    return {
        "head_drawn": "mean" if head is None else head + 1,
        "usage": told.usage.astype(float).round(6).tolist(),  # by block, head and token
        "entropy": told.uncertainty.mean(axis=2).astype(float).round(6).tolist(),
    }


def _by_class(classes: tuple[str, ...], values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in zip(classes, values, strict=True)}
