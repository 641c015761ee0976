"""Writing: the models of a run become files, each asked before it gets its name."""

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
from caprmil.export.formats import FORMATS, Ask, Values, find_format, quiet
from caprmil.export.program import Program
from caprmil.features import bags
from caprmil.io.atomic import atomic_write, check_new
from caprmil.io.paths import require_local
from caprmil.io.progress import Step
from caprmil.models import MILModel
from caprmil.runs.run import Run

SIZES = (1, 2, 17, 1000, 5000)  # patches of the bags that a file is asked about
TOLERANCE = 1e-4
"""Of a probability, an assignment, or an attention as a part of the largest in the bag."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written, and how far it was seen to deviate from the model."""

    path: Path
    to: str
    deviation: float  # the largest of a probability
    facts: Mapping[str, Any]

    @property
    def usage(self) -> str:
        """Two lines of Python that run it."""
        names = ", ".join(self.facts["outputs"])
        return "\n".join(FORMATS[self.to].usage).format(path=self.path, names=names)


def export(
    run: Run,
    to: str,
    out: str | Path,
    *,
    fold: str | None = None,
    ensemble: bool = False,
    changes: Mapping[str, Any] | None = None,
    progress: Step | None = None,
) -> list[Exported]:
    """Write the model of each fold, or of one fold, or with `ensemble` the mean of all in one file.

    `out` is a folder or, for a single file, its name. `changes` replace settings of the models,
    such as `draws`.
    """
    if fold is not None and ensemble:
        raise ExportError("An ensemble is of all folds: leave --fold or --ensemble out.")
    names = [each.name for each in run.answering(fold)]
    groups = {"ensemble": names} if ensemble else {name: [name] for name in names}
    paths = _places(require_local(out), list(groups), find_format(to).ending)
    changes, features, written = dict(changes or {}), _features_of(run), []
    for number, (path, (name, folds)) in enumerate(zip(paths, groups.items(), strict=True), 1):
        models = [
            MILModel.from_pretrained(run.fold_folder(each) / "model", **changes) for each in folds
        ]
        facts = facts_of(run) | {"fold": name, "folds": folds, "changes": changes}
        written.append(write(models, path, to=to, facts=facts, features=features))
        if progress:
            progress(number, len(groups))
    return written


def write(
    models: MILModel | Sequence[MILModel],
    path: str | Path,
    *,
    to: str,
    facts: Mapping[str, Any] | None = None,
    features: Values | None = None,
) -> Exported:
    """Write a model, or the mean of several, as one file, unless it answers otherwise than they.

    It is asked about bags of rows of `features`, or else of normal numbers.
    """
    kind, path = find_format(to), Path(path)
    program = Program([models] if isinstance(models, MILModel) else models)
    program.refuse()
    told = {
        **(facts or {}),
        "caprmil": version("caprmil"),
        "in_dim": program.width,
        "outputs": program.outputs,
    }
    with atomic_write(path) as passing, quiet():
        try:
            kind.write(program, passing, json.dumps(told))
        except OSError:
            raise
        except Exception as problem:  # torch raises what it likes
            raise ExportError(
                f"{program.called} cannot be exported to {to}: torch could not make a program for "
                f"bags of any size of it ({_first_line(problem)}). Use caprmil predict."
            ) from problem
        deviation = _check(kind.open(passing)[0], program, features)
    return Exported(path=path, to=to, deviation=deviation, facts=told)


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Return settings of a model from words such as `draws=0`."""
    return config.parse({}, into=_Changes, changes=changes).settings


@dataclass(frozen=True, kw_only=True)
class _Changes:
    settings: dict[str, Any] = field(default_factory=dict, metadata=config.REST)


def facts_of(run: Run) -> dict[str, Any]:
    """Return what one must know of a run to use its models: what they eat, what answers mean."""
    names = ("model", "classes", "encoder", "fingerprint", "mpp", "patch_px", "digest")
    return {name: getattr(run.facts, name) for name in names} | {"trained_with": run.facts.version}


@torch.no_grad()
def _check(ask: Ask, program: Program, features: Values | None) -> float:
    """Return the largest deviation of a probability, or raise if anything deviates too far."""
    generator, deviations = np.random.default_rng(0), []
    nothing_kept = "Nothing was kept. Choose another format, or use caprmil predict."
    for size in SIZES:
        bag = generator.standard_normal((size, program.width), dtype=np.float32)
        if features is not None:
            bag = features[generator.integers(len(features), size=size)]
        try:
            answers = dict(zip(program.outputs, ask(bag), strict=True))
        except Exception as problem:  # onnxruntime as well
            raise ExportError(
                f"What was written of {program.called} does not run on a bag of {size} patches "
                f"({_first_line(problem)}). {nothing_kept}"
            ) from problem
        apart = _apart(answers, _expected(program, bag))
        if (largest := max(apart, key=apart.__getitem__)) and apart[largest] > TOLERANCE:
            raise ExportError(
                f"What was written of {program.called} deviates from the model: {largest} by "
                f"{apart[largest]:.1e} on a bag of {size} patches; {TOLERANCE:g} is allowed. "
                f"{nothing_kept}"
            )
        deviations.append(apart["probabilities"])
    return max(deviations)


def _expected(program: Program, bag: Values) -> dict[str, Values]:
    """Ask the models as `caprmil predict` does, which is not the way of the program."""
    outputs = [model(torch.from_numpy(bag)[None]) for model in program.parts]
    answers = [each.logits[0].softmax(dim=-1) for each in outputs]
    expected = {
        "probabilities": torch.stack(answers).mean(dim=0),
        "attention": torch.stack([each.attention[0] for each in outputs]).mean(dim=0),
    }
    if len(outputs) == 1:
        for number, assignments in enumerate(outputs[0].assignments, 1):
            expected[f"assignments_{number}"] = assignments[0]
    return {name: value.numpy() for name, value in expected.items()}


def _apart(answers: Mapping[str, Values], expected: Mapping[str, Values]) -> dict[str, float]:
    """Return the largest deviation of each. Logits are left out: the probabilities tell."""
    apart = {}
    for name, wanted in expected.items():
        scale = float(wanted.max()) if name == "attention" else 1.0
        same = answers[name].shape == wanted.shape
        value = float(np.abs(answers[name] - wanted).max()) / scale if same else inf
        apart[name] = inf if isnan(value) else value
    return apart


def _features_of(run: Run) -> Values | None:
    """Return a bag of the run if one is still there: numbers as they come in life."""
    with suppress(RunError, BagError):
        return bags.read(run.bag_paths()[0]).features.astype(np.float32)
    return None


def _places(out: Path, names: Sequence[str], ending: str) -> list[Path]:
    """Return where the files go, all of them new."""
    single = out.suffix == ending
    if single and len(names) > 1:
        raise ExportError(
            f"{out} is one file, and there are {len(names)} folds. Name a folder; or choose "
            "--fold NAME, or --ensemble for the mean of all."
        )
    paths = [out] if single else [out / f"{name}{ending}" for name in names]
    for path in paths:
        check_new(path)
    return paths


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0][:200] or type(problem).__name__
