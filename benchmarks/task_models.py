"""Models of one width for the generated tasks, and their training with a validation curve."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from sklearn.metrics import roc_auc_score

from caprmil.features import bags
from caprmil.features.batches import Sample
from caprmil.models import MILModel, create
from caprmil.runs.history import Row
from caprmil.runs.inference import TrainedModel, predict_samples
from caprmil.synthetic.tasks import Features, Kinds, Task
from caprmil.targets import Classification
from caprmil.training.module import fit
from caprmil.training.train_config import TrainConfig

WIDTH = 64
NYSTROM = {"dim": WIDTH, "heads": 4, "landmarks": 64}
MODELS: dict[str, dict[str, Any]] = {
    "mean": {"dim": WIDTH},
    "abmil": {"dim": WIDTH, "hidden": WIDTH},
    "clam": {"dim": WIDTH, "hidden": WIDTH},
    "dsmil": {"hidden": WIDTH},
    "dtfd": {"dim": WIDTH, "hidden": WIDTH},
    "bayesmil": {"dim": WIDTH, "hidden": WIDTH},
    "sgpmil": {"dims": [WIDTH] * 3, "gp_dim": 32},
    "transmil": NYSTROM,
    "dgrmil": {**NYSTROM, "warmup_epochs": 2},
    "caprmil": {"dim": WIDTH},
    "caprmil+attention": {"dim": WIDTH},
    "caprmil+gated": {"dim": WIDTH},
}
"""All models have the same width, so that they cost about the same."""

TARGET = Classification(classes=("negative", "positive"))


@dataclass(frozen=True)
class Way:
    """A model and what its training adds to the plain recipe."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def create(self, width: int) -> MILModel:
        return create(self.model, width, 2, **MODELS[self.model], **self.settings)


CENTRED, SHARP = {"init": "centred"}, {"temperature": 0.15}
TOP, DROP, PROBES = {"top_k": 10}, {"drop_patches": 0.9}, {"probes": 4}
ALL_FIVE = Way("caprmil", CENTRED | SHARP, TOP | DROP | PROBES)
"""The settings of recipes/rare.toml."""


class TaskBag(NamedTuple):
    """A generated bag."""

    features: Features
    label: int
    kinds: Kinds

    def sample(self, name: str) -> Sample:
        return Sample(name, bags.from_arrays(self.features), self.label)


class TaskBags(NamedTuple):
    """The bags of a task, in three parts."""

    train: list[TaskBag]
    validation: list[TaskBag]
    test: list[TaskBag]

    @classmethod
    def generate(cls, task: Task, *counts: int) -> "TaskBags":
        """Return bags of a task: so many for training, validation and test."""
        made = [TaskBag(*task.bag(number)) for number in range(sum(counts))]
        first, second = counts[0], counts[0] + counts[1]
        return cls(made[:first], made[first:second], made[second:])


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When a training ends: as its validation AUC, a mean of three epochs, stops improving."""

    patience: int  # epochs without improvement
    improvement: float = 0.005
    solved: float = 0.999

    def best(self, curve: list[float]) -> int:
        """Return the epoch from which on the curve did not improve."""
        smooth = [mean(curve[max(0, n - 2) : n + 1]) for n in range(len(curve))]
        best = 0
        for number, value in enumerate(smooth):
            if value > smooth[best] + self.improvement:
                best = number
        return best

    def ends(self, curve: list[float]) -> bool:
        if len(curve) >= 3 and mean(curve[-3:]) >= self.solved:
            return True
        return len(curve) - 1 - self.best(curve) >= self.patience


class TrainingEndedError(Exception):
    """Raised in a callback to end a training."""


def train(
    model: MILModel,
    parts: TaskBags,
    settings: TrainConfig,
    *,
    seed: int,
    stop: StopRule | None = None,
    on_epoch: Callable[[], None] | None = None,
) -> list[float]:
    """Train a model in place, and return its validation AUC after each epoch.

    With a rule to stop, the model has the weights of the epoch with the best validation AUC;
    otherwise its last weights.
    """
    curve: list[float] = []
    best: Mapping[str, Any] = {}

    def epoch_done(row: Row) -> None:
        nonlocal best
        curve.append(row["val_auc"])
        if stop and curve[-1] >= max(curve):
            best = deepcopy(model.state_dict())
        if on_epoch:
            on_epoch()
        if stop and stop.ends(curve):
            raise TrainingEndedError

    train_samples, validation = (
        [bag.sample(f"bag{number}") for number, bag in enumerate(part)] for part in parts[:2]
    )
    with TemporaryDirectory(prefix="caprmil-") as folder, suppress(TrainingEndedError):
        fit(
            model,
            train_samples,
            validation,
            target=TARGET,
            folder=Path(folder),
            settings=settings,
            seed=seed,
            device="cpu",
            on_epoch=epoch_done,
        )
    if stop:
        model.load_state_dict(best)
    model.eval()
    return [round(value, 4) for value in curve]


def test_auc(model: MILModel, test: list[TaskBag]) -> float:
    """Return the AUC of a model on other bags."""
    samples = [bag.sample(f"bag{number}") for number, bag in enumerate(test)]
    with torch.no_grad():
        answers = predict_samples(TrainedModel(model, TARGET), samples)
    return round(float(roc_auc_score([bag.label for bag in test], answers[:, 1])), 4)
