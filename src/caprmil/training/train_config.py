"""The settings of a training. No torch is loaded: a mistake in them is answered at once."""

from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import TYPE_CHECKING, Literal

from caprmil.errors import RecipeError

if TYPE_CHECKING:
    from caprmil.models import MILModel
    from caprmil.targets import Target


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The [train] table of a recipe. The defaults are the paper's."""

    epochs: int = 30
    """Passes over the training part, at most: `patience` may stop earlier."""
    lr: float = 2e-4
    """The learning rate after the warm-up. It then falls on a cosine to `min_lr`."""
    weight_decay: float = 1e-5
    """The weight decay of AdamW, for the parameters that the model does not exclude."""
    warmup_epochs: int = 6
    """Epochs with a rising rate. 0 for a plain cosine, which is what the authors' code does."""
    warmup_lr: float = 1e-5
    """The learning rate of the first epoch of the warm-up."""
    min_lr: float = 1e-7
    """The learning rate at the end of the cosine."""
    patience: int = 20
    """Stop when the validation loss has not fallen by `min_delta` for this number of epochs."""
    min_delta: float = 1e-4
    """The smallest fall of the validation loss that `patience` counts."""
    weights: Literal["best", "last"] = "best"
    """Which epoch's weights to keep: the best on the validation loss, or the last."""
    batch_size: int = 1
    """Bags per step, on all devices together, packed without padding. More are faster where bags
    are small."""
    sampling: Literal["shuffle", "balanced"] = "shuffle"
    """balanced: draw bags with replacement, each class (or stratum) as often as the others."""
    top_k: int = 0
    """Adds a second loss: that of the mean of the k highest patch logits of each class. It helps to
    find rare patches. CAPRMIL with a pool only, and classes only. 0: none."""
    drop_patches: float = 0.0
    """In every step, leave out a random share of the patches of each bag, at most this one. A bag
    then looks different in every epoch, and is harder to memorise."""
    probes: int = 0
    """Before training, replace this number of rows of the first layer by linear probes: directions
    in which the top patches of a class stand out. CAPRMIL and ABMIL only, and classes only."""
    clip: float = 0.0
    """Clip the norm of the gradient at this value. 0 does not clip."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the computations in training. Weights are float32."""
    cache_gb: float = 4.0
    """Gigabytes of bags to keep in memory."""
    memory: Literal["auto", "whole", "keep", "stream"] = "auto"
    """What of a bag stays in memory while CAPRMIL trains on it: whole, keep (the projected
    patches), stream (one chunk at a time), or auto, by its size. The gradients are the same; less
    memory costs time."""
    compile: bool = False
    """Compile the model with torch.compile. It needs a C++ compiler: see docs/export.md."""
    workers: int = 0
    """Processes that read ahead. Bags are then not cached: each process would have its cache."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} must be 1 or more, not {getattr(self, name)}.")
        positive = ("lr", "warmup_lr", "min_lr")
        others = ("weight_decay", "clip", "min_delta", "cache_gb", "workers", "top_k", "probes")
        for name in (*positive, *others):
            value = getattr(self, name)
            if not isfinite(value) or value < 0 or (value == 0 and name in positive):
                raise RecipeError(f"{name} cannot be {value}.")
        if not 0 <= self.drop_patches < 1:
            raise RecipeError(
                f"drop_patches is a share, from 0 to below 1, not {self.drop_patches}."
            )
        if not 0 <= self.warmup_epochs < self.epochs:
            raise RecipeError(
                f"warmup_epochs must be less than epochs ({self.epochs}), not {self.warmup_epochs}."
            )


def learning_rate(epoch: int, train: TrainConfig) -> float:
    """Return the learning rate of an epoch: a linear warm-up, then a cosine to the minimum."""
    warmup = train.warmup_epochs
    if epoch < warmup:
        return train.warmup_lr + epoch * (train.lr - train.warmup_lr) / max(warmup - 1, 1)
    done = (epoch - warmup) / (train.epochs - warmup)
    return train.min_lr + (train.lr - train.min_lr) * (1 + cos(pi * done)) / 2


def check_classes(model: "MILModel", target: "Target", settings: TrainConfig) -> None:
    """Raise an error if there can be no loss on the top patches, or no probes."""
    if settings.probes:
        most = len(model.probe_units)
        if not most or not target.has_classes:
            raise RecipeError(
                "train.probes needs a model with a first linear layer, and classes: choose caprmil "
                f"or abmil for a classification, not {model.title} for {target.in_words}. Or set "
                "train.probes = 0."
            )
        if settings.probes > most:
            raise RecipeError(
                f"{model.title} starts from at most {most} probes, not {settings.probes}: set "
                "train.probes."
            )
    if settings.top_k and not (model.has_patch_logits and target.has_classes):
        raise RecipeError(
            "train.top_k needs logits of single patches, and classes: choose caprmil with the pool "
            f"mean, attention or gated for a classification, not {model.title} for "
            f"{target.in_words}. Or set train.top_k = 0."
        )
