"""An encoder: patches in, features out. What it does to a patch is on its card."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from caprmil.encoders.card import Card
from caprmil.errors import EncoderError

log = logging.getLogger("caprmil")

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
CPU_CHUNK = 16  # patches at a time on the CPU: small pieces stay in its cache (measured with lite0)


class Encoder:
    """A frozen network that turns patches into features, and says which one it is."""

    def __init__(
        self,
        network: Callable[[Tensor], Any],
        card: Card,
        *,
        fingerprint: str,
        revision: str | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
    ) -> None:
        if card.width is None:
            raise ValueError(f"{card.name}: {card.width=} is not known.")
        self.card = card
        self.name, self.width, self.mpp = card.name, card.width, card.mpp
        self.patch_px = card.native_px
        self.fingerprint = fingerprint
        """Of the weights and of all that is done to a patch, in hex; equal on every machine."""
        self.revision = revision
        """The commit of the hub that the weights came from, where they did."""
        self.device = choose_device(device)
        self.precision = pick_precision(card, self.device, precision)
        self._network = network
        if isinstance(network, nn.Module):
            self._network = network.eval().to(self.device)
        self._mean = torch.tensor(card.mean, device=self.device).view(3, 1, 1)
        self._std = torch.tensor(card.std, device=self.device).view(3, 1, 1)

    def __call__(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the features of patches (B, h, w, 3), of any size, as (B, width)."""
        check(patches)
        if len(patches) == 0:
            return np.empty((0, self.width), dtype=np.float32)
        features = self.forward(patches)
        self._check(features, len(patches))
        return features

    def forward(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return what the network answers, unchecked."""
        pictures = torch.from_numpy(resize_patches(patches, self.card))
        piece = CPU_CHUNK if self.device.type == "cpu" else len(pictures)
        with torch.inference_mode(), self._autocast():
            answers = [self._answer(part) for part in torch.split(pictures, piece)]
        features: NDArray[np.float32] = torch.cat(answers).cpu().numpy()
        return features

    def __repr__(self) -> str:
        return f"Encoder({self.name!r}, width={self.width}, device='{self.device}')"

    def _answer(self, pictures: Tensor) -> Tensor:
        colours = pictures.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 255
        answer = self._network((colours - self._mean) / self._std)
        if not isinstance(answer, Tensor) or answer.ndim != 2 or len(answer) != len(pictures):
            what = f"shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer)
            raise EncoderError(
                f"{self.name} answered with {what} for {len(pictures)} patches. "
                "Wrap it so that it returns a tensor (patches, width)."
            )
        return answer.float()

    def _autocast(self) -> Any:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, TYPES[self.precision])

    def _check(self, features: NDArray[np.float32], patches: int) -> None:
        if features.shape[1] != self.width:
            raise EncoderError(
                f"{self.name} gave {features.shape[1]} features, but its card says {self.width}. "
                "Correct the card."
            )
        bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
        if len(bad):
            raise EncoderError(
                f"{self.name} gave NaN or infinity for {len(bad)} of {patches} patches, the first "
                f"in row {bad[0]}, in {self.precision}. "
                + ("Look at its weights." if self.precision == "fp32" else "Use precision fp32.")
            )


def check(patches: NDArray[Any]) -> None:
    """Raise unless these are patches as a slide gives them."""
    if patches.dtype != np.uint8 or patches.ndim != 4 or patches.shape[-1] != 3:
        raise ValueError(f"{patches.dtype=} {patches.shape=} is not uint8 of (B, h, w, 3).")
    if 0 in patches.shape[1:]:
        raise ValueError(f"{patches.shape=} has patches without a pixel.")


def resize_patches(patches: NDArray[np.uint8], card: Card) -> NDArray[np.uint8]:
    """Bring patches to the size that the network wants, by the rule of its card.

    Pillow does it, on every device: it is what the encoders' own transforms use, so that the
    pixels are theirs to the last bit. Patches that have the size already are not touched.
    """
    if card.input_px is None:
        return np.require(patches, requirements=["C", "W"])
    height, width = patches.shape[1:3]
    short = card.resize_px or card.input_px
    if short != min(height, width):
        scale = short / min(height, width)
        # The longer side is rounded down, as in torchvision.
        size = [short if n == min(height, width) else int(n * scale) for n in (width, height)]
        filter_ = FILTERS[card.interpolation]
        patches = np.stack(
            [np.asarray(Image.fromarray(patch).resize(size, filter_)) for patch in patches]
        )
        height, width = patches.shape[1:3]
    top, left = (round((n - card.input_px) / 2) for n in (height, width))
    middle = patches[:, top : top + card.input_px, left : left + card.input_px]
    return np.require(middle, requirements=["C", "W"])


def fingerprint(weights: Mapping[str, Tensor], card: Card, *more: str) -> str:
    """Return a hash of weights and of what is done to a patch, in hex.

    It takes in each tensor's name, type, shape and bytes, and the facts of the card. Device,
    precision, file format and the folding of layers leave it as it is.
    """
    digest = hashlib.sha256()
    for line in ("caprmil encoder 1", json.dumps(card.fingerprint_fields(), sort_keys=True), *more):
        digest.update(line.encode() + b"\n")
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # not copied
    return digest.hexdigest()


def probe_patches(side: int) -> NDArray[np.uint8]:
    """Return two fixed patches that have all colours, edges and a gradient in them."""
    x, y = np.meshgrid(np.arange(side), np.arange(side))
    waves = [x * 255 // side, y * 255 // side, (x // 16 + y // 16) % 2 * 255]
    patch = np.stack(waves, axis=-1).astype(np.uint8)
    return np.stack([patch, 255 - patch[::-1]])


def summarise_output(answer: NDArray[np.float32]) -> str:
    """Return a few coarse numbers of an answer, to know a function by that shows no weights.

    Two decimals of the largest value: machines differ in the seventh digit, networks in the first.
    """
    values = answer / (np.abs(answer).max() or 1.0)
    some = values[np.linspace(0, len(values) - 1, num=6).astype(int)]
    return " ".join(f"{value + 0.0:.2f}" for value in (values.mean(), values.std(), *some))


def choose_device(device: str | torch.device) -> torch.device:
    """Return a device that is there; `auto` is the first GPU, or the CPU."""
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return torch.device(next((kind for kind, there in has.items() if there), "cpu"))
    device = torch.device(device)
    if not has.get(device.type, True):
        raise EncoderError(f"There is no {device.type} device here. Use cpu, or auto.")
    return device


def pick_precision(card: Card, device: torch.device, precision: str) -> str:
    """Return what to compute in: that of the card on CUDA, float32 elsewhere."""
    if precision not in ("auto", *TYPES):
        raise ValueError(f"{precision=} is not one of auto, {', '.join(TYPES)}.")
    if precision == "auto":
        return card.precision if device.type == "cuda" else "fp32"
    if precision != "fp32" and device.type != "cuda":
        log.warning("%s runs in fp32: %s is for CUDA devices only.", card.name, precision)
        return "fp32"
    return precision
