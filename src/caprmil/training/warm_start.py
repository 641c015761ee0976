"""Warm start: training starts from the weights of a trained model, in a folder or on the hub.

The model is copied to `start` in the run, so that all folds start from the same weights, also when
the run is resumed. The last layer starts anew if the target is another one.
"""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.folds import Fold
from caprmil.encoders.card import same_encoder
from caprmil.errors import CaprmilError, RecipeError, count, shorten
from caprmil.io.model_hub import CONFIG, WEIGHTS
from caprmil.models import MILModel, create
from caprmil.models.pretrained import describe
from caprmil.models.wrapped import WrappedModel
from caprmil.runs.facts import FACTS, START, StartFacts, read_facts
from caprmil.runs.splits import read_splits
from caprmil.targets import Target
from caprmil.targets.target_table import target_table


def start_from(model: MILModel, start: MILModel, target: Target) -> tuple[list[str], list[str]]:
    """Copy the weights of a trained model into a new one of the same settings.

    Return the tensors that were copied and those that start anew: the last layers, if the target or
    its classes are others. Of a model with covariates or sources, the model of the patches starts.
    """
    if isinstance(model, WrappedModel) and type(start) is not type(model):
        return start_from(model.image, start, target)
    if type(start) is not type(model):
        raise RecipeError(
            f"[model] start is a {type(start).__name__}, and the recipe trains a "
            f"{type(model).__name__}. Start from a model of the same kind."
        )
    if start.in_dim != model.in_dim:
        raise RecipeError(
            f"[model] start reads {start.in_dim} features per patch, and these bags have "
            f"{model.in_dim}. Start from a model of the same encoder."
        )
    given, own = start.state_dict(), model.state_dict()
    anew = set() if _same_target(start, target) else _last_layers(model)
    copied = [name for name in own if name not in anew]
    if odd := [n for n in copied if n not in given or given[n].shape != own[n].shape]:
        raise RecipeError(
            f"[model] start does not fit: {odd[0]} is {_shape(given.get(odd[0]))}, not "
            f"{_shape(own[odd[0]])}. Set [model] as it was trained: {_settings(start)}."
        )
    model.load_state_dict({name: given[name] for name in copied}, strict=False)
    return copied, [name for name in own if name in anew]


def open_start(
    source: str, out: Path, model: MILModel, cohort: Cohort, folds: list[Fold]
) -> StartFacts:
    """Copy the start of a run into it, and return what is known of it.

    `model` is one of the run; it gets the weights. A run that is resumed has its copy already.
    """
    kept = out / START
    before = read_facts(out).start if (out / FACTS).is_file() else None
    if before is not None and before.source == source and (kept / CONFIG).is_file():
        start_from(model, MILModel.from_pretrained(kept), cohort.target)
        return before
    found = MILModel.from_pretrained(source)
    copied, anew = start_from(model, found, cohort.target)
    notes = (*_feature_notes(found.metadata, cohort), *_overlap_notes(Path(source), folds))
    found.save_pretrained(kept)
    return StartFacts(
        source=source,
        weights=hashlib.sha256((kept / WEIGHTS).read_bytes()).hexdigest()[:16],
        copied=len(copied),
        anew=tuple(anew),
        notes=notes,
    )


def _same_target(start: MILModel, target: Target) -> bool:
    """Return whether the outputs of a model are those of a target, as far as it is known."""
    before = start.metadata.get("target")
    now = target_table(target)
    same = start.n_outputs == target.n_outputs
    if not isinstance(before, dict):
        return same
    names = ("kind", "classes", "labels", "targets")
    return same and all(_plain(before.get(name)) == _plain(now.get(name)) for name in names)


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, (list, tuple)) else value


def _last_layers(model: MILModel) -> set[str]:
    """Return the tensors whose shape depends on the number of outputs."""
    settings = describe(model)
    name, outputs = settings.pop("model"), settings.pop("n_outputs")
    with torch.device("meta"):
        one, other = (
            create(name, n_outputs=number, **settings).state_dict()
            for number in (outputs, outputs + 1)
        )
    return {key for key in one if key not in other or one[key].shape != other[key].shape}


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(tuple(tensor.shape))


def _settings(model: MILModel) -> str:
    known = {**describe(model)}
    for name in ("in_dim", "n_outputs"):
        del known[name]
    return ", ".join(f"{key} = {value}" for key, value in known.items())


def _feature_notes(metadata: dict[str, Any], cohort: Cohort) -> Iterator[str]:
    """Refuse a start of another encoder; yield a note if the scale is another."""
    for name, title in (("encoder", "encoder"), ("fingerprint", "weights of the encoder")):
        before, now = metadata.get(name), cohort.first_known(name)
        if not (isinstance(before, str) and isinstance(now, str)) or cohort.sources:
            continue
        if not (same_encoder(before, now) if name == "encoder" else before == now):
            raise RecipeError(
                f"[model] start was trained on another {title} ({before[:40]}) than that of these "
                f"bags ({now[:40]}). Its weights mean nothing to them: start from another model."
            )
    before, now = metadata.get("mpp"), cohort.mpp
    if isinstance(before, (int, float)) and now and abs(before - now) > 0.05 * now:
        yield f"The model that training starts from saw {before:g} µm per pixel; bags have {now:g}."


def _overlap_notes(source: Path, folds: list[Fold]) -> Iterator[str]:
    """Yield a note if the start is a model of a local run that has seen slides of a test part."""
    if not source.is_dir():
        return
    path = source.absolute()
    seen: set[str] = set()
    with suppress(CaprmilError, IndexError):
        splits = read_splits(path.parents[2])  # RUN/folds/NAME/model
        for fold in splits.folds:
            if fold.name == path.parent.name:
                seen = {*fold.train, *fold.validation}
    tested = sorted({slide for fold in folds for slide in fold.test} & seen)
    if tested:
        yield (
            f"The model that training starts from has seen {count(len(tested), 'slide')} of the "
            f"test parts ({shorten(tested[:3])}{', ...' if len(tested) > 3 else ''}): scores of "
            "this run are too high."
        )
