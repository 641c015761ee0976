"""The description of an encoder: weights, architecture, transform and features."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from caprmil.errors import RecipeError

Interpolation = Literal["bilinear", "bicubic"]
Precision = Literal["fp32", "fp16", "bf16"]
Colour = tuple[float, float, float]

IMAGENET: dict[str, Colour] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclass(frozen=True, kw_only=True)
class Card:
    """One encoder: the source of its weights, its input and its features."""

    name: str
    hub: str | None = None
    revision: str | None = None
    """A commit of the hub; None: the current main branch."""
    loader: Literal["lite0", "timm", "keep", "transformers", "titan", "callable"] = "callable"
    architecture: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the architecture. Layers are given by their name in timm or torch."""
    file: str | None = None
    """The weight file, if it is neither model.safetensors nor pytorch_model.bin."""
    unused: tuple[str, ...] = ()
    """Prefixes of weights in the file that the features do not need."""
    width: int | None = None
    pooled: str = "as answered"
    """How the features are pooled. It is part of the fingerprint, so the text must not change."""
    input_px: int | None = None
    """Side of the network's input; None: any."""
    resize_px: int | None = None
    """Side that the shorter side is resized to before the centre crop of `input_px`."""
    interpolation: Interpolation = "bilinear"
    mean: Colour = IMAGENET["mean"]
    std: Colour = IMAGENET["std"]
    mpp: float | None = None
    patch_px: int | None = None
    precision: Precision = "fp32"
    """Precision on CUDA devices. Other devices use fp32."""
    licence: str = "not known"
    gated: bool = False
    remote_code: bool = False
    """Whether loading runs Python code from the hub."""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.resize_px is not None and self.resize_px < (self.input_px or self.resize_px + 1):
            raise ValueError(f"{self.name}: {self.resize_px=} is smaller than {self.input_px=}.")

    @property
    def native_px(self) -> int:
        """Side of patches that are not resampled."""
        return self.resize_px or self.input_px or self.patch_px or 224

    def with_input(self, px: int) -> "Card":
        """Return the card with another size of the network's input, which is part of its name."""
        if not 16 <= px <= 4096:
            raise RecipeError(f"An input of {px} px is not possible; 16 to 4096 px are.")
        settings = dict(self.settings)
        if self.loader == "timm" and self.architecture.startswith("vit_"):
            settings["dynamic_img_size"] = True
        name = f"{self.name.split('@')[0]}@{px}"
        return replace(self, name=name, input_px=px, resize_px=None, settings=settings, aliases=())

    def fingerprint_fields(self) -> dict[str, Any]:
        """Return the settings that, with the weights, determine the features of a patch."""
        return {
            "pooled": self.pooled,
            "input_px": self.input_px,
            "resize_px": self.resize_px or self.input_px,
            "interpolation": self.interpolation,
            "mean": [round(value, 9) for value in self.mean],
            "std": [round(value, 9) for value in self.std],
        }


def same_encoder(one: str, other: str) -> bool:
    """Return whether two names denote one encoder, ignoring case and punctuation."""

    def normalise(name: str) -> str:
        return "".join(letter for letter in name.lower() if letter.isalnum())

    return normalise(one) == normalise(other)
