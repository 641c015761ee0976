"""What is known of an encoder before it is loaded: a row of the table, or of your own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Interpolation = Literal["bilinear", "bicubic"]
Precision = Literal["fp32", "fp16", "bf16"]
Colour = tuple[float, float, float]

IMAGENET: dict[str, Colour] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclass(frozen=True, kw_only=True)
class Card:
    """One encoder: where its weights are, what it wants to see, and what it answers."""

    name: str
    hub: str | None = None
    revision: str | None = None
    """A commit of the hub; None is whatever its main branch holds today."""
    loader: Literal["lite0", "timm", "keep", "transformers", "titan", "callable"] = "callable"
    architecture: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the architecture. Layers are given by the name they have in timm or torch."""
    file: str | None = None
    """The file of weights, where it is neither model.safetensors nor pytorch_model.bin."""
    unused: tuple[str, ...] = ()
    """How the names of weights begin that the file has and the features have no need of."""
    width: int | None = None
    pooled: str = "as answered"
    input_px: int | None = None
    """Side of the picture that the network sees; None: whatever comes."""
    resize_px: int | None = None
    """The shorter side is first brought to this; the middle `input_px` are cut from it."""
    interpolation: Interpolation = "bilinear"
    mean: Colour = IMAGENET["mean"]
    std: Colour = IMAGENET["std"]
    mpp: float | None = None
    patch_px: int | None = None
    precision: Precision = "fp32"
    """On a CUDA device; elsewhere it is fp32."""
    licence: str = "not known"
    gated: bool = False
    remote_code: bool = False
    """Loading it runs Python code from the hub."""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.resize_px is not None and self.resize_px < (self.input_px or self.resize_px + 1):
            raise ValueError(f"{self.name}: {self.resize_px=} has no {self.input_px=} within.")

    @property
    def native_px(self) -> int:
        """Side of patches that the network sees as they are, without resampling."""
        return self.resize_px or self.input_px or self.patch_px or 224

    def fingerprint_fields(self) -> dict[str, Any]:
        """Return what decides, beside the weights, what the features of a patch are."""
        return {
            "pooled": self.pooled,
            "input_px": self.input_px,
            "resize_px": self.resize_px or self.input_px,
            "interpolation": self.interpolation,
            "mean": [round(value, 9) for value in self.mean],
            "std": [round(value, 9) for value in self.std],
        }


def same_encoder(one: str, other: str) -> bool:
    """Tell whether two names are of one encoder; tools differ in case and in hyphens."""

    def bare(name: str) -> str:
        return "".join(letter for letter in name.lower() if letter.isalnum())

    return bare(one) == bare(other)
