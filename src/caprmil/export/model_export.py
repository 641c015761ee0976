"""Model export: the models of a run as files, each compared with its model before it is kept."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caprmil import config
from caprmil.errors import BagError, ExportError, RunError
from caprmil.export.export_module import ExportModule
from caprmil.export.model_files import (
    FORMATS,
    Predict,
    Values,
    find_format,
    quiet,
    read_metadata,
)
from caprmil.features import bag_files
from caprmil.io.atomic import atomic_write, check_new
from caprmil.io.paths import require_local
from caprmil.io.progress import Step
from caprmil.models import MILModel
from caprmil.runs.run import Run
from caprmil.targets import Classification, Target

SIZES = (1, 2, 17, 1000, 5000)  # patches of the bags that a file is checked with
TOLERANCE = 1e-4
"""Of answers relative to `Target.scale`, of attention relative to its maximum, of assignments."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A file that was written, and its deviation from the model."""

    path: Path
    to: str
    deviation: float  # the largest of an answer, relative to `Target.scale`
    metadata: Mapping[str, Any]

    @property
    def usage(self) -> str:
        """Two lines of Python that run it."""
        names = ", ".join(self.metadata["outputs"])
        inputs = self.metadata["inputs"]
        return "\n".join(FORMATS[self.to].usage).format(
            path=self.path,
            names=names,
            inputs=", ".join(inputs),
            feed=", ".join(f'"{name}": {name}' for name in inputs),
        )


def export_run(
    run: Run,
    to: str,
    out: str | Path,
    *,
    fold: str | None = None,
    ensemble: bool = False,
    changes: Mapping[str, Any] | None = None,
    progress: Step | None = None,
) -> list[ExportedModel]:
    """Write the model of each fold, of one fold, or with `ensemble` the mean of all in one file.

    `out` is a folder or, for a single file, its path. `changes` replace settings of the models,
    such as `draws`.
    """
    if fold is not None and ensemble:
        raise ExportError("An ensemble has all folds: leave out --fold or --ensemble.")
    names = [each.name for each in run.trained_folds(fold)]
    groups = {"ensemble": names} if ensemble else {name: [name] for name in names}
    paths = _output_paths(require_local(out), list(groups), find_format(to).suffix)
    changes, features, written = dict(changes or {}), _example_features(run), []
    of_paths = {
        path: run_metadata(run) | {"fold": name, "folds": folds, "changes": changes}
        for path, (name, folds) in zip(paths, groups.items(), strict=True)
    }
    # An export of several files that was stopped is completed by the same command.
    stopped = any(path.exists() for path in paths) and not all(path.exists() for path in paths)
    ours = [path for path in paths if stopped and path.exists() and _has(path, of_paths[path])]
    for path in paths:
        if path not in ours:
            check_new(path)
    for number, (path, metadata) in enumerate(of_paths.items(), 1):
        folds = metadata["folds"]
        models = [
            MILModel.from_pretrained(run.fold_folder(each) / "model", **changes) for each in folds
        ]
        options: dict[str, Any] = {"metadata": metadata, "features": features}
        options["targets"] = [run.fold_target(each) for each in folds]
        written.append(export_model(models, path, to=to, **options, replace=path in ours))
        if progress:
            progress(number, len(groups))
    return written


def export_model(
    models: MILModel | Sequence[MILModel],
    path: str | Path,
    *,
    to: str,
    targets: Sequence[Target] | None = None,
    metadata: Mapping[str, Any] | None = None,
    features: Values | None = None,
    replace: bool = False,
) -> ExportedModel:
    """Write a model, or the mean of several, as one file; raise if its outputs differ.

    `targets` are those of the models, by default classifications.

    The file is checked with bags of rows of `features`, or else of normally distributed numbers.
    """
    kind, path = find_format(to), Path(path)
    models = [models] if isinstance(models, MILModel) else list(models)
    if targets is None:
        classes = tuple(map(str, range(models[0].n_outputs)))
        targets = [Classification(classes=classes)] * len(models)
    module = ExportModule(models, targets)
    module.check_exportable()
    metadata = {
        **(metadata or {}),
        "caprmil": version("caprmil"),
        "in_dim": module.width,
        "inputs": module.inputs,
        "outputs": module.outputs,
        **({"covariates": module.columns} if module.columns else {}),
    }
    with atomic_write(path, replace=replace) as partial, quiet():
        try:
            kind.write(module, partial, json.dumps(metadata))
        except OSError:
            raise
        except Exception as problem:  # torch raises exceptions of many types
            raise ExportError(
                f"{module.model_name} cannot be exported to {to}: torch could not trace it for "
                f"bags of any size ({_first_line(problem)}). Use caprmil predict."
            ) from problem
        deviation = _check(kind.open(partial), module, features)
    return ExportedModel(path=path, to=to, deviation=deviation, metadata=metadata)


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Return settings of a model from texts such as `draws=0`."""
    return config.parse({}, into=_Changes, changes=changes).settings


@dataclass(frozen=True, kw_only=True)
class _Changes:
    settings: dict[str, Any] = field(default_factory=dict, metadata=config.REST)


def run_metadata(run: Run) -> dict[str, Any]:
    """Return what is needed to use the models of a run: encoder and scale of features, target."""
    names = ("model", "target", "encoder", "fingerprint", "mpp", "patch_px", "digest")
    return {name: getattr(run.facts, name) for name in names} | {"trained_with": run.facts.version}


@torch.no_grad()
def _check(predict: Predict, module: ExportModule, features: Values | None) -> float:
    """Return the largest deviation of an answer; raise if any output deviates too far."""
    generator, deviations = np.random.default_rng(0), []
    not_kept = "It was not kept. Choose another format, or use caprmil predict."
    for size in SIZES:
        bag = generator.standard_normal((size, module.width), dtype=np.float32)
        if features is not None:
            bag = features[generator.integers(len(features), size=size)]
        inputs = [bag]
        if module.columns:
            inputs.append(generator.standard_normal(module.n_covariates, dtype=np.float32))
        try:
            found = dict(zip(module.outputs, predict(*inputs), strict=True))
        except Exception as problem:  # onnxruntime and torch raise exceptions of many types
            raise ExportError(
                f"The exported {module.model_name} does not run on a bag of {size} patches "
                f"({_first_line(problem)}). {not_kept}"
            ) from problem
        expected = _expected(module, *inputs)
        units = {
            module.outputs[0]: np.max([target.scales for target in module.targets], axis=0),
            "attention": expected["attention"].max(),
        }
        deviation = _deviations(found, expected, units)
        if deviation[largest := max(deviation, key=deviation.__getitem__)] > TOLERANCE:
            raise ExportError(
                f"The exported {module.model_name} deviates from the model: {largest} by "
                f"{deviation[largest]:.1e} on a bag of {size} patches; {TOLERANCE:g} is allowed. "
                f"{not_kept}"
            )
        deviations.append(deviation[module.outputs[0]])
    return max(deviations)


def _expected(module: ExportModule, bag: Values, *covariates: Values) -> dict[str, Values]:
    """Return the outputs of the models as `caprmil predict` runs them."""
    read = {"covariates": torch.from_numpy(covariates[0])[None]} if covariates else {}
    outputs = [model(torch.from_numpy(bag)[None], **read) for model in module.mil_models]
    pairs = zip(module.targets, outputs, strict=True)
    answers = [target.answer(each.logits[0]) for target, each in pairs]
    expected = {
        module.outputs[0]: torch.stack(answers).mean(dim=0),
        "attention": torch.stack([each.attention[0] for each in outputs]).mean(dim=0),
    }
    if len(outputs) == 1:
        for number, assignments in enumerate(outputs[0].assignments, 1):
            expected[f"assignments_{number}"] = assignments[0]
    return {name: value.numpy() for name, value in expected.items()}


def _deviations(
    found: Mapping[str, Values], expected: Mapping[str, Values], units: Mapping[str, Any]
) -> dict[str, float]:
    """Return the largest deviation of each output, in its unit. Logits follow from the answer."""
    deviations = {}
    for name, values in expected.items():
        same_shape = found[name].shape == values.shape
        apart = np.abs(found[name] - values) / units.get(name, 1.0) if same_shape else inf
        deviation = float(np.max(apart))
        deviations[name] = inf if isnan(deviation) else deviation
    return deviations


def _example_features(run: Run) -> Values | None:
    """Return the features of a bag of the run, if one still exists."""
    with suppress(RunError, BagError):
        return bag_files.read(run.bag_paths()[0]).features.astype(np.float32)
    return None


def _output_paths(out: Path, names: Sequence[str], suffix: str) -> list[Path]:
    """Return the paths of the files."""
    single = out.suffix == suffix
    if single and len(names) > 1:
        raise ExportError(
            f"{out} is one file, but there are {len(names)} folds. Pass a folder, or choose "
            "--fold NAME, or --ensemble for the mean of all."
        )
    return [out] if single else [out / f"{name}{suffix}" for name in names]


def _has(path: Path, metadata: Mapping[str, Any]) -> bool:
    """Return whether a file was exported with this metadata. Nothing in it is run."""
    try:
        found = read_metadata(path)
    except ExportError:
        return False
    return json.loads(json.dumps(metadata)).items() <= found.items()


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0][:200] or type(problem).__name__
