"""Runs: a folder with the recipe, the weights, the predictions and the scores of a study.

run.json          versions, seed, classes, encoder and scale of the bags, digest of the recipe
recipe.toml       every setting, resolved
splits.json       who was in which part of which fold
folds/NAME/       model/ (config.json, model.safetensors), history.csv, test.csv, validation.csv
predictions.csv   every slide, answered by models that had not seen it
shortcuts/        the same slides, answered without a model: patch_count.csv, mean_feature.csv, ...
calibration.json  the temperature of each fold, and errors before and after
scores.json, scores.md, curves.png, roc.png, reliability.png
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil import bags, batches, mirror, storage
from caprmil.bags import BagInfo
from caprmil.batches import Cache, Sample
from caprmil.cohort import CohortConfig
from caprmil.cohort import load as load_cohort
from caprmil.errors import BagError, RunError, UnknownName, some
from caprmil.folds import Fold
from caprmil.models import MILModel
from caprmil.models.base import Chunks
from caprmil.predictions import Predictions
from caprmil.progress import Step

LARGE = 2**30  # bytes of a bag in float32 beyond which it is read in pieces
KEEPABLE = 400_000  # patches of which a model may keep what it knows between two readings

FACTS, RECIPE, SPLITS = "run.json", "recipe.toml", "splits.json"
PREDICTIONS, SCORES = "predictions.csv", "scores.json"
SHORTCUTS, CALIBRATION, RELIABILITY = "shortcuts", "calibration.json", "reliability.png"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run must know of itself to be used again."""

    version: str
    digest: str
    model: str
    classes: tuple[str, ...]
    in_dim: int
    encoder: str | None
    mpp: float | None
    seed: int
    weights: str  # which epoch's weights were kept: best or last
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    fingerprint: str | None = None  # of the encoder
    patch_px: int | None = None
    scale_rule: str | None = None
    settings: str | None = None  # how `caprmil encode` made a bag of the cohort


class Run:
    """A run that was made before, whole or in part."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = storage.place(folder)
        try:
            facts = read_json(self.folder / FACTS)
            self.facts = Facts(**{**facts, **{k: tuple(facts[k]) for k in ("classes", "notes")}})
            splits = read_json(self.folder / SPLITS)
            self.patients: dict[str, str] = splits["patients"]
            self.paths: dict[str, str] = splits["paths"]
            self.splits = [
                Fold(**{**fold, **{part: tuple(fold[part]) for part in PARTS}})
                for fold in splits["folds"]
            ]
        except (FileNotFoundError, NotADirectoryError) as problem:
            name = Path(problem.filename).name
            raise RunError(f"{self.folder} is not a run: there is no {name} in it.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise RunError(
                f"{self.folder} holds a damaged run, or one of another version: {FACTS} or "
                f"{SPLITS} cannot be understood ({type(problem).__name__}: {problem})."
            ) from problem

    def __repr__(self) -> str:
        state = "" if self.finished else ", unfinished"
        return f"Run({str(self.folder)!r}: {self.facts.model}, {len(self.splits)} folds{state})"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.facts.classes

    @property
    def finished(self) -> bool:
        """Whether all folds are trained and scored."""
        return (self.folder / SCORES).exists()

    @property
    def done(self) -> list[Fold]:
        """The folds whose models are there."""
        if isinstance(self.folder, storage.Remote):
            there = mirror.finished_folds(self.folder)
            return [fold for fold in self.splits if fold.name in there]
        return [fold for fold in self.splits if self.fold_folder(fold.name).is_dir()]

    def fold_folder(self, name: str) -> Path:
        """Return the folder of a fold. Of a run elsewhere it is a copy, fetched when asked for."""
        if isinstance(self.folder, storage.Remote):
            if name not in self._copies:
                self._copies[name] = mirror.fetch_fold(self.folder, name, storage.scratch())
            return self._copies[name]
        return self.folder / "folds" / name

    @cached_property
    def _copies(self) -> dict[str, Path]:
        return {}

    @cached_property
    def predictions(self) -> Predictions:
        """Every slide as the models answered that had not seen it."""
        return Predictions.read(self._finished(PREDICTIONS))

    @cached_property
    def scores(self) -> dict[str, Any]:
        """The scores over folds and pooled, as in scores.json."""
        return read_json(self._finished(SCORES))

    @cached_property
    def shortcuts(self) -> dict[str, Predictions]:
        """The same slides, answered without a model; none in a run of an older version."""
        found = sorted(self._finished(SHORTCUTS).glob("*.csv"))
        return {path.stem.replace("_", " "): Predictions.read(path) for path in found}

    @property
    def validation(self) -> dict[str, Predictions]:
        """The validation part of each fold that has one, answered by the fold's model."""
        paths = {fold.name: self.fold_folder(fold.name) / "validation.csv" for fold in self.done}
        return {name: Predictions.read(path) for name, path in paths.items() if path.exists()}

    def _finished(self, name: str) -> Path:
        if not self.finished:
            missing = some(fold.name for fold in self.splits if fold not in self.done)
            raise RunError(
                f"{self.folder} is not finished; still to do: {missing or 'the scores'}. "
                "Give the same train command again, and it goes on."
            )
        return self.folder / name

    def answering(self, name: str | None = None) -> list[Fold]:
        """Return the fold of that name, or all, as far as their models are there."""
        known = [fold.name for fold in self.done]
        if not known:
            raise RunError(
                f"{self.folder} has no trained model yet. "
                "Give the same train command again, and it goes on."
            )
        if name is not None and name not in known:
            raise UnknownName(f"fold in {self.folder}", name, known)
        return [fold for fold in self.done if name in (None, fold.name)]

    def model(self, fold: str) -> MILModel:
        """Load the model of a fold."""
        self.answering(fold)
        return MILModel.from_pretrained(self.fold_folder(fold) / "model")

    def check_bag(self, slide: str, info: BagInfo, *, force: bool = False) -> None:
        """Refuse a bag that is not of the kind the models were trained on.

        `force` lets another encoder or scale pass, never another width.
        """
        facts = self.facts
        width, encoder, scale = info.width, info.encoder, info.mpp
        if width != facts.in_dim:
            differs, advice = f"{width} features, not {facts.in_dim}", ""
        elif encoder and facts.encoder and not bags.same_encoder(encoder, facts.encoder):
            differs, advice = f"encoder {encoder}, not {facts.encoder}", ", or pass --force"
        elif info.fingerprint and facts.fingerprint and info.fingerprint != facts.fingerprint:
            differs = f"other weights or another transform of encoder {encoder}, not those"
            advice = ", or pass --force"
        elif scale and facts.mpp and not bags.same_scale(scale, facts.mpp):
            differs, advice = f"{scale:g} um/px, not {facts.mpp:g}", ", or pass --force"
        else:
            return
        if not (force and advice):
            raise BagError(
                f"{slide} is of {differs} as the models of {self.folder} were trained on. "
                f"Extract its features in the same way{advice}."
            )

    def _check_bags(self, paths: Mapping[str, Path], *, force: bool) -> None:
        """Refuse bags of another kind, all of them at once."""
        problems = []
        for slide, path in paths.items():
            try:
                self.check_bag(slide, bags.inspect(path), force=force)
            except BagError as problem:
                problems.append(str(problem))
        if problems:
            raise BagError(some(problems, between="\n- "))

    def predict(
        self,
        paths: Mapping[str, Path],
        *,
        fold: str | None = None,
        force: bool = False,
        device: str = "auto",
        progress: Step | None = None,
    ) -> Predictions:
        """Answer bags with the mean of the folds' models, or with the model of one fold.

        A slide of the training cohort is answered only by models that have not seen it, if there
        are any. The column `models` says how many answered, `spread` how far they disagree.
        """
        chosen = self.answering(fold)
        self._check_bags(paths, force=force)
        place = pick_device(device)
        models = {each.name: self.model(each.name).to(place) for each in chosen}
        rows: dict[str, NDArray[np.float64]] = {}
        extra: dict[str, list[str]] = {"models": [], "spread": []}
        for number, (slide, path) in enumerate(paths.items(), 1):
            unseen = [f.name for f in chosen if slide not in {*f.train, *f.validation}]
            names = unseen or list(models)
            try:
                answers = ask_file([models[name] for name in names], path, place)
            except BagError as problem:  # one broken bag does not cost the answers of the others
                logging.getLogger("caprmil").error("not answered: %s", problem)
                continue
            rows[slide] = answers.mean(axis=0)
            spread = answers[:, rows[slide].argmax()].std(ddof=1) if len(names) > 1 else None
            extra["models"].append(f"{len(names)}{'' if unseen else ' (all saw it in training)'}")
            extra["spread"].append("" if spread is None else f"{spread:.4f}")
            if progress:
                progress(number, len(paths))
        if not rows:
            raise BagError("None of these bags could be read.")
        return Predictions(
            slides=tuple(rows),
            classes=self.classes,
            probabilities=np.stack(list(rows.values())),
            extra={name: tuple(cells) for name, cells in extra.items()},
        )

    def evaluate(
        self,
        table: str | Path,
        features: str | Path | None = None,
        *,
        label: str | None = None,
        force: bool = False,
        device: str = "auto",
        progress: Step | None = None,
    ) -> Predictions:
        """Answer the slides of another cohort with each fold's model, beside their labels."""
        settings = CohortConfig(label=label, classes=self.classes, scan=False, mixed_patients=True)
        cohort, _ = load_cohort(table, features, settings)
        self.check_unseen(cohort.patients)
        for slide, info in cohort.bags.items():
            self.check_bag(slide, info, force=force)
        samples = [Sample(e.name, e.path) for e in cohort.entries]
        cache, place, tables = Cache(4.0), pick_device(device), []
        for number, fold in enumerate(self.answering(), 1):
            answers = answer(self.model(fold.name), samples, cache=cache, device=place)
            tables.append(
                Predictions(
                    slides=tuple(sample.slide for sample in samples),
                    classes=self.classes,
                    probabilities=answers,
                    labels=np.array([cohort.labels.get(sample.slide, -1) for sample in samples]),
                    patients=tuple(entry.patient for entry in cohort.entries),
                    folds=(fold.name,) * len(samples),
                )
            )
            if progress:
                progress(number, len(self.done))
        return Predictions.concatenate(tables)

    def bag_paths(self) -> list[Path]:
        """Return the run's own bags, as far as they are still where they were."""
        found = [path for path in map(storage.place, self.paths.values()) if path.exists()]
        if not found:
            raise RunError(f"The bags of {self.folder} are no longer where they were. Name some.")
        return found

    def check_unseen(self, patients: Mapping[str, str]) -> None:
        """Refuse to score slides or patients that a model was trained or validated on."""
        seen = {slide for fold in self.splits for slide in (*fold.train, *fold.validation)}
        owners = {self.patients[slide] for slide in seen}
        known = [slide for slide, who in patients.items() if slide in seen or who in owners]
        if known:
            raise RunError(
                f"The models of {self.folder} know {len(known)} of these slides, or their "
                f"patients: {some(known)}. Leave them out. For the scores on slides that they "
                f"did not know: caprmil evaluate {self.folder}"
            )


PARTS = ("train", "validation", "test")


def pick_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the first GPU, or else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise RunError(f"A device is auto, cpu, cuda, cuda:1, ... or mps, not '{name}'.")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).partition(".")[0].partition("\n")[0]
        raise RunError(f"There is no device '{name}' here ({reason}). Use auto or cpu.") from None


@torch.no_grad()
def ask(model: MILModel, batch: batches.Batch, device: torch.device) -> NDArray[np.float64]:
    """Return the class probabilities of a batch of bags."""
    mask, grid = (None if t is None else t.to(device) for t in (batch.mask, batch.grid))
    output = model.eval()(batch.features.to(device), mask=mask, grid=grid, sizes=batch.sizes)
    probabilities: NDArray[np.float64] = output.logits.cpu().double().softmax(dim=-1).numpy()
    return probabilities


def ask_file(models: Sequence[MILModel], path: Path, device: torch.device) -> NDArray[np.float64]:
    """Return the class probabilities that each model gives a bag's file.

    A large file is read piece by piece, a few times over, if the models can do with that.
    """
    if not is_large(bags.inspect(path)) or not all(model.streams for model in models):
        batch = batches.collate([(Sample(path.stem, path), bags.read(path))])
        return np.concatenate([ask(model, batch, device) for model in models])
    with bags.streaming(path) as stream:
        return np.concatenate([ask_stream(model, stream, device) for model in models])


def is_large(info: BagInfo) -> bool:
    """Tell whether a bag is better read in pieces."""
    return 4 * info.n_patches * info.width > LARGE


def may_keep(info: BagInfo) -> bool:
    """Tell whether a model may keep what it knows of patches while it reads a bag in pieces."""
    return info.n_patches <= KEEPABLE


def ask_stream(model: MILModel, stream: bags.Stream, device: torch.device) -> NDArray[np.float64]:
    """Return the class probabilities of a bag that is read piece by piece."""
    pieces = pieces_of(stream, device)
    output = model.eval().to(device).stream(pieces, keep=may_keep(stream.info))
    return np.asarray(output.logits.cpu().double().softmax(dim=-1).numpy())


def pieces_of(stream: bags.Stream, device: torch.device) -> Chunks:
    """Return the pieces of an open bag as a model takes them."""
    return lambda: (torch.from_numpy(piece)[None].to(device) for piece in stream())


def answer(
    model: MILModel,
    samples: Sequence[Sample],
    *,
    cache: Cache | None = None,
    device: torch.device | str = "cpu",
) -> NDArray[np.float64]:
    """Return the class probabilities of many slides, bag by bag."""
    device = torch.device(device)
    model.to(device)
    return np.concatenate([ask(model, b, device) for b in batches.load(samples, cache=cache)])


def as_json(table: Mapping[str, Any]) -> str:
    """Return a table as the JSON files of a run have it; what is not known (NaN) is null."""
    return json.dumps(_plain(table), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table
