"""The folder of an explanation: figures and tables of a slide, complete or absent."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from caprmil import figures
from caprmil.errors import CaprmilError, plural
from caprmil.explain.combination import Combination
from caprmil.explain.explained_slide import ExplainedSlide
from caprmil.explain.explanation import TOP, Explanation
from caprmil.explain.explanation_figures import (
    ExplanationFigures,
    choose_head,
    describe_method,
)
from caprmil.explain.geojson import write_geojson, write_region_geojson
from caprmil.explain.map_kinds import KINDS
from caprmil.explain.marked_regions import JointRemoval, RegionEffects
from caprmil.explain.patch_boxes import PatchBoxes, patch_boxes, why_no_boxes
from caprmil.explain.patch_tables import write_csv, write_hdf5, write_parquet
from caprmil.explain.removal import answer_words
from caprmil.explain.slide_shares import slide_explanations, slide_shares, write_shares
from caprmil.io.atomic import check_new, write_text
from caprmil.io.json_files import as_json
from caprmil.io.leftovers import temporary_name
from caprmil.io.paths import require_local
from caprmil.io.progress import Step
from caprmil.runs.run import Run

SCREEN, PRINT = 200, 300  # dots per inch of PNG, and of images in PDF
VECTOR = ("tokens", "relevance")  # figures that are written as PDF too


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `folder` at the end, or is removed if anything fails."""
    folder = require_local(folder)
    check_new(folder)
    partial = folder.with_name(temporary_name(folder.name))
    try:
        partial.mkdir(parents=True)
        yield partial
        check_new(folder)  # another process may have made it
        partial.rename(folder)
    except OSError as problem:
        raise CaprmilError(
            f"{folder} cannot be written ({problem.strerror or problem}). "
            "Check space and rights in its folder."
        ) from problem
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_explanation(
    folder: Path,
    explained: ExplainedSlide,
    run: Run,
    *,
    head: int | None = None,
    top: int = TOP,
    parquet: bool = False,
    progress: Step | None = None,
) -> list[str]:
    """Write figures and tables of an explained slide; return what was left out, and why.

    For `head` see `choose_head`.
    """
    explanation, left_out = explained.explanation, []
    chosen, regions = choose_head(explanation, head), explained.regions
    slide = explained.open_slide()
    try:
        mpp, areas = explained.mpp(slide), explained.region_areas(slide)
        drawing = ExplanationFigures(explained, slide, top=top)
        drawn = drawing.all(chosen)
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
    if explanation.assignments is None:
        left_out.append(f"figures of tokens: {explanation.model} has none")
    if slide is None:
        left_out.append("images of patches: the slide file was not found; pass --slide")
    if drawing.boxes is None:
        why = why_no_boxes(explanation.info, explanation.coords)
        missing = "patches.geojson" if slide is None else "images and patches.geojson"
        left_out.append(f"{missing}: the bag {why}")
    if explanation.slide_of is not None:
        path = folder / f"{plural(explanation.info.part_name)}.csv"
        write_shares(explanation, path, explained.combination)
    for own, boxes, effects, subfolder in _slide_by_slide(explained, drawing.boxes, mpp, folder):
        write_csv(own, subfolder / "patches.csv", regions=effects)
        if parquet:
            write_parquet(own, subfolder / "patches.parquet", regions=effects)
        write_hdf5(own, subfolder / "scores.h5")
        if boxes is not None:
            write_geojson(own, boxes, subfolder / "patches.geojson", top=top)
            if effects is not None and effects.regions:
                path = subfolder / "regions.geojson"
                write_region_geojson(effects, own, boxes, path, mpp=own.info.slide_mpp or mpp)
    record = explanation_record(explained, run, head=chosen)
    if regions is not None:
        record["regions"] = _regions(regions, explanation, areas)
    write_text(folder / "explanation.json", as_json(record))
    if progress:
        progress(len(drawn) + 1, len(drawn) + 1)
    return left_out


def _slide_by_slide(
    explained: ExplainedSlide, boxes: PatchBoxes | None, mpp: float | None, folder: Path
) -> Iterator[tuple[Explanation, PatchBoxes | None, RegionEffects | None, Path]]:
    """Yield the slide and its folder or, of a patient, each slide with its own coordinates.

    The patches of each source of a slide have a folder too.
    """
    explanation = explained.explanation
    if explanation.slide_of is None:
        yield explanation, boxes, explained.regions, folder
        return
    for number, own in enumerate(slide_explanations(explanation)):
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", own.slide).strip("._") or "slide"
        parts = folder / plural(explanation.info.part_name)
        subfolder = parts / name
        if subfolder.exists():
            subfolder = parts / f"{name}-{number + 1}"
        subfolder.mkdir(parents=True)
        rows = np.flatnonzero(explanation.slide_of == number)
        effects = None if explained.regions is None else explained.regions.within(rows)
        own_boxes = patch_boxes(own.info, own.coords, own.info.slide_mpp or mpp)
        yield own, own_boxes, effects, subfolder


def explanation_record(
    explained: ExplainedSlide, run: Run, *, head: int | None = None
) -> dict[str, Any]:
    """Return the answer, the sum of its evidence, the tokens and the provenance, for JSON."""
    explanation, answer = explained.explanation, explained.answer
    reference, info = explained.reference, explanation.info
    names = explanation.target.output_names
    return {
        "slide": explained.name,
        "label": explained.label,
        "answer": {
            **run.target.describe(answer.mean),
            "calibrated": None
            if answer.calibrated is None
            else _by_name(run.target.titles, answer.calibrated),
            "by_fold": {f: _by_name(run.target.titles, own) for f, own in answer.by_fold.items()},
            "unseen": answer.unseen,
        },
        "explained": {
            "model": explanation.model,
            "fold": explanation.fold,
            "patches": len(explanation),
            **explanation.target.describe(explanation.answer),
            "method": explanation.method,
            "method_in_words": describe_method(explanation),
            "logits": _by_name(names, explanation.logits),
            "evidence": _by_name(names, explanation.evidence.astype(np.float64).sum(axis=0)),
            "rest": _by_name(names, explanation.rest),
            "gap": explanation.gap,
            **_covariates(explanation),
        },
        "map": {
            "first": explanation.first,
            "meaning": KINDS[explanation.first].meaning_of(
                explanation.target.contrasts[explanation.predicted]
            ),
            "faithfulness": explained.faithfulness_text(),
            "removal": None if explained.effect is None else explained.effect.as_dict(),
            "ranking": None if explained.ranking is None else explained.ranking.as_dict(),
        },
        "tokens": None if explanation.assignments is None else _tokens(explanation, head),
        **_slides(explained),
        "provenance": {
            "caprmil": version("caprmil"),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": str(run.folder),
            "recipe": run.facts.digest,
            "bag": str(reference.bag),
            "pixels": ", ".join(
                str(each.pixels) for each in reference.all_slides if each.pixels is not None
            )
            or None,
            "coordinates": info.unit,
            "patch_level0": info.patch_level0,
            "encoder": info.encoder,
            "mpp": info.mpp,
        },
    }


def _slides(explained: ExplainedSlide) -> dict[str, Any]:
    """Return the slides of a patient with their shares; nothing for a single slide."""
    explanation, combination = explained.explanation, explained.combination
    part = explanation.info.part_name
    found: list[dict[str, Any]] = [
        {
            part: share.name,
            "patches": share.patches,
            "evidence": _by_name(explanation.names, share.evidence),
            "attention": share.attention,
            **({} if combination is None else _in_answer(combination, share.slide)),
        }
        for share in slide_shares(explanation)
    ]
    how = {} if combination is None else {"combine": combination.how}
    return {plural(part): found, **how} if found else {}


def _in_answer(combination: Combination, slide: str) -> dict[str, Any]:
    """Return the answer of a slide alone, its weight, and what it adds to that of the patient."""
    row, names = combination.slides.index(slide), combination.target.columns
    return {
        "answer": _by_name(names, combination.answers[row]),
        "weight": _by_name(names, combination.weights[row]),
        "adds": _by_name(names, combination.adds[row]),
    }


def _regions(
    effects: RegionEffects, explanation: Explanation, areas: Mapping[int, float]
) -> dict[str, Any]:
    """Return the regions, in the order of their effect. Their patches are in the table."""
    target, of = explanation.target, effects.of
    contrast = target.contrasts[of]

    def without(removal: JointRemoval) -> dict[str, Any]:
        return {
            "patches": len(removal.rows),
            "effect": effects.effect(removal),
            "without": float(removal.answer[of]),
            "without_random": float(removal.random[of]),
            "total_without": removal.total,
        }

    words = {1: contrast.positive, -1: contrast.negative}
    return {
        "map": effects.map,
        "number": answer_words(target.number_name, contrast.name),
        "with_all_patches": float(effects.answer[of]),
        "total": contrast.total,
        "total_with_all_patches": effects.total,
        "reason": effects.reason or None,
        "found": [
            {
                "region": region.number,
                "marked": words[region.sign],
                **without(region),
                "area_mm2": areas.get(region.number),
                "share_of_map": region.share,
            }
            for region in effects.regions
        ],
        "together": {words[sign]: without(removal) for sign, removal in effects.together.items()},
    }


def _covariates(explanation: Explanation) -> dict[str, Any]:
    """Return the parts of the rest, if the model reads covariates."""
    if not explanation.covariates:
        return {}
    return {
        "bias": _by_name(explanation.target.output_names, explanation.bias),
        "covariates": [
            {
                "name": each.name,
                "value": each.shown,
                "adds": _by_name(explanation.target.output_names, each.term),
            }
            | (
                {}
                if each.scaling is None
                else {"scales_patches": _by_name(explanation.target.output_names, each.scaling)}
            )
            for each in explanation.covariates
        ],
    }


def _tokens(explanation: Explanation, head: int | None) -> dict[str, Any]:
    return {
        "head_drawn": "mean" if head is None else head + 1,
        "usage": explanation.usage.astype(float).round(6).tolist(),  # by block, head and token
        "entropy": explanation.uncertainty.mean(axis=2).astype(float).round(6).tolist(),
    }


def _by_name(names: tuple[str, ...], values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in zip(names, values, strict=True)}
