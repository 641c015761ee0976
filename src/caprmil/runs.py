"""Runs: a folder with the recipe, the weights, the predictions and the scores of a study.

run.json          versions, seed, classes, encoder and scale of the bags, digest of the recipe
recipe.toml       every setting, resolved
splits.json       who was in which part of which fold
folds/NAME/       model/ (config.json, model.safetensors), history.csv, test.csv, validation.csv
predictions.csv   every slide, answered by models that had not seen it
scores.json, scores.md, curves.png, roc.png
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil import bags, batches
from caprmil.bags import BagInfo
from caprmil.batches import Cache, Sample
from caprmil.errors import BagError, RunError, UnknownName
from caprmil.folds import Fold, some
from caprmil.models import MILModel
from caprmil.predictions import Predictions
from caprmil.progress import Step

FACTS, RECIPE, SPLITS = "run.json", "recipe.toml", "splits.json"
PREDICTIONS, SCORES = "predictions.csv", "scores.json"

SAME_SCALE = 0.1  # microns per pixel may differ by this share


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


class Run:
    """A run that was made before, whole or in part."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            facts = json.loads((self.folder / FACTS).read_text())
            self.facts = Facts(**{**facts, **{k: tuple(facts[k]) for k in ("classes", "notes")}})
            splits = json.loads((self.folder / SPLITS).read_text())
            self.patients: dict[str, str] = splits["patients"]
            self.splits = [
                Fold(**{**fold, **{part: tuple(fold[part]) for part in PARTS}})
                for fold in splits["folds"]
            ]
        except FileNotFoundError as problem:
            name = Path(problem.filename).name
            raise RunError(f"{self.folder} is not a run: there is no {name} in it.") from None
        except (ValueError, KeyError, TypeError) as problem:
            raise RunError(f"{self.folder} holds a damaged run: {problem}") from problem

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
        return [fold for fold in self.splits if self.fold_folder(fold.name).is_dir()]

    def fold_folder(self, name: str) -> Path:
        return self.folder / "folds" / name

    @cached_property
    def predictions(self) -> Predictions:
        """Every slide as the models answered that had not seen it."""
        return Predictions.read(self._finished(PREDICTIONS))

    @cached_property
    def scores(self) -> dict[str, Any]:
        """The scores over folds and pooled, as in scores.json."""
        scores: dict[str, Any] = json.loads(self._finished(SCORES).read_text())
        return scores

    def _finished(self, name: str) -> Path:
        if not self.finished:
            missing = some(fold.name for fold in self.splits if fold not in self.done)
            raise RunError(
                f"{self.folder} is not finished; still to do: {missing or 'the scores'}. "
                "Give the same train command again, and it goes on."
            )
        return self.folder / name

    def model(self, fold: str) -> MILModel:
        """Load the model of a fold."""
        if fold not in [done.name for done in self.done]:
            raise UnknownName(f"fold in {self.folder}", fold, [done.name for done in self.done])
        return MILModel.from_pretrained(self.fold_folder(fold) / "model")

    def check_bag(self, slide: str, info: BagInfo, *, force: bool = False) -> None:
        """Refuse a bag that is not of the kind the models were trained on.

        `force` lets another encoder or scale pass, never another width.
        """
        facts = self.facts
        told = f"{slide} has patches of {{}}; the models of {self.folder} were trained on {{}}."
        if info.width != facts.in_dim:
            raise BagError(told.format(f"{info.width} features", facts.in_dim))
        if force:
            return
        advice = " Extract the features in the same way, or say --force if you know better."
        if info.encoder and facts.encoder and _bare(info.encoder) != _bare(facts.encoder):
            raise BagError(told.format(f"encoder {info.encoder}", facts.encoder) + advice)
        if info.mpp and facts.mpp and abs(info.mpp / facts.mpp - 1) > SAME_SCALE:
            scales = f"{info.mpp:g} um/px", f"{facts.mpp:g} um/px"
            raise BagError(told.format(*scales) + advice)

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
        chosen = [done for done in self.done if fold in (None, done.name)]
        if not chosen:
            raise UnknownName(
                f"fold in {self.folder}", str(fold), [done.name for done in self.done]
            )
        for slide, path in paths.items():
            self.check_bag(slide, bags.inspect(path), force=force)
        place = pick_device(device)
        models = {each.name: self.model(each.name).to(place) for each in chosen}
        rows, answering, spreads = [], [], []
        for number, (slide, path) in enumerate(paths.items(), 1):
            unseen = [f.name for f in chosen if slide not in {*f.train, *f.validation}]
            names = unseen or list(models)
            batch = batches.collate([(Sample(slide, path), bags.read(path))])
            answers = np.stack([ask(models[name], batch, place)[0] for name in names])
            mean = answers.mean(axis=0)
            rows.append(mean)
            answering.append(f"{len(names)}{'' if unseen else ' (all saw it in training)'}")
            spreads.append(f"{answers[:, mean.argmax()].std():.4f}")
            if progress:
                progress(number, len(paths))
        return Predictions(
            slides=tuple(paths),
            classes=self.classes,
            probabilities=np.stack(rows),
            extra={"models": tuple(answering), "spread": tuple(spreads)},
        )

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


def _bare(name: str) -> str:
    """Return an encoder's name without what tools write differently."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def pick_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the first GPU, or else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).splitlines()[0]
        raise RunError(f"There is no device '{name}' here ({reason}). Use auto or cpu.") from None
    return device


@torch.no_grad()
def ask(model: MILModel, batch: batches.Batch, device: torch.device) -> NDArray[np.float64]:
    """Return the class probabilities of a batch of bags."""
    mask, grid = (None if t is None else t.to(device) for t in (batch.mask, batch.grid))
    output = model.eval()(batch.features.to(device), mask=mask, grid=grid)
    probabilities: NDArray[np.float64] = output.logits.double().softmax(dim=-1).cpu().numpy()
    return probabilities


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
    """Return a table as the JSON files of a run have it."""
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table
