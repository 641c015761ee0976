"""An encoder: patches in, features out, with the transform of its card."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from caprmil.encoders.card import Card
from caprmil.errors import EncoderError
from caprmil.models.device import pick_device

log = logging.getLogger("caprmil")

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
CPU_CHUNK, PARALLEL_CHUNK = 16, 4
"""Patches per forward pass on the CPU, of one that uses all threads and of one per thread: they fit
into its cache (measured: lite0)."""


class Encoder:
    """A frozen network that turns patches into features, with a fingerprint."""

    def __init__(
        self,
        network: Callable[[Tensor], Any],
        card: Card,
        *,
        fingerprint: str,
        revision: str | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        parallel: bool = False,
    ) -> None:
        """Wrap a network. `parallel`: it keeps nothing of a call, so a CPU may run several."""
        if card.width is None:
            raise ValueError(f"{card.name} has {card.width=}. A card needs a width.")
        self.card = card
        self.name, self.width, self.mpp = card.name, card.width, card.mpp
        self.patch_px = card.native_px
        self.fingerprint = fingerprint
        """Hash of the weights and the transform, in hex. It is the same on every machine."""
        self.revision = revision
        """The commit of the hub that the weights are from, or None for local weights."""
        self.device = pick_device(str(device))
        self.precision = pick_precision(card, self.device, precision)
        self._network, self._parallel = network, parallel
        if isinstance(network, nn.Module):
            self._network = network.eval().to(self.device)
        self._mean = torch.tensor(card.mean, device=self.device).view(3, 1, 1)
        self._std = torch.tensor(card.std, device=self.device).view(3, 1, 1)

    def __call__(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the features of patches (B, h, w, 3), of any size, as (B, width)."""
        check_patches(patches)
        if len(patches) == 0:
            return np.empty((0, self.width), dtype=np.float32)
        features = self.forward(patches)
        self._check(features, len(patches))
        return features

    def forward(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the output of the network, unchecked."""
        images = torch.from_numpy(resize_patches(patches, self.card))
        chunk = PARALLEL_CHUNK if self._parallel else CPU_CHUNK
        parts = torch.split(images, chunk if self.device.type == "cpu" else len(images))
        threads = torch.get_num_threads()
        if self._parallel and len(parts) > 1 and threads > 1:
            # Chunks at the same time, each in one thread: threads that share a chunk wait for each
            # other, and waste most of their time when other programs are running.
            with ThreadPoolExecutor(
                min(threads, len(parts)), initializer=torch.set_num_threads, initargs=(1,)
            ) as pool:
                outputs = list(pool.map(self._forward, parts))
            torch.set_num_threads(threads)  # of threads that start later
        else:
            outputs = [self._forward(part) for part in parts]
        features: NDArray[np.float32] = torch.cat(outputs).cpu().numpy()
        return features

    def __repr__(self) -> str:
        return f"Encoder({self.name!r}, width={self.width}, device='{self.device}')"

    def _forward(self, images: Tensor) -> Tensor:
        with torch.inference_mode(), self._autocast():
            return self._encode(images)

    def _encode(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 255
        output = self._network((pixels - self._mean) / self._std)
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(images):
            what = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output)
            raise EncoderError(
                f"{self.name} returned {what} for {len(images)} patches. "
                "Wrap it so that it returns a tensor (patches, width)."
            )
        return output.float()

    def _autocast(self) -> Any:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, TYPES[self.precision])

    def _check(self, features: NDArray[np.float32], patches: int) -> None:
        if features.shape[1] != self.width:
            raise EncoderError(
                f"{self.name} returned {features.shape[1]} features, but its card says "
                f"{self.width}. Correct the card."
            )
        bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
        if len(bad):
            raise EncoderError(
                f"{self.name} returned NaN or infinity for {len(bad)} of {patches} patches, first "
                f"in row {bad[0]}, in {self.precision}. "
                + ("Check its weights." if self.precision == "fp32" else "Use precision fp32.")
            )


def check_patches(patches: NDArray[Any]) -> None:
    """Raise ValueError unless these are patches of a slide, uint8 (B, h, w, 3)."""
    if patches.dtype != np.uint8 or patches.ndim != 4 or patches.shape[-1] != 3:
        raise ValueError(f"{patches.dtype=} {patches.shape=} is not uint8 of (B, h, w, 3).")
    if 0 in patches.shape[1:]:
        raise ValueError(f"{patches.shape=} has empty patches.")


def resize_patches(patches: NDArray[np.uint8], card: Card) -> NDArray[np.uint8]:
    """Return patches in the input size of the network, resized and cropped as on its card.

    Pillow resizes on every device, as in the encoders' published transforms, so the pixels are
    bit-identical to theirs. Patches of the right size are returned unchanged.
    """
    if card.input_px is None:
        return np.require(patches, requirements=["C", "W"])
    height, width = patches.shape[1:3]
    shorter = card.resize_px or card.input_px
    if shorter != min(height, width):
        scale = shorter / min(height, width)
        # The longer side is rounded down, as in torchvision.
        size = [shorter if n == min(height, width) else int(n * scale) for n in (width, height)]
        filter_ = FILTERS[card.interpolation]
        patches = np.stack(
            [np.asarray(Image.fromarray(patch).resize(size, filter_)) for patch in patches]
        )
        height, width = patches.shape[1:3]
    top, left = (round((n - card.input_px) / 2) for n in (height, width))
    centre = patches[:, top : top + card.input_px, left : left + card.input_px]
    return np.require(centre, requirements=["C", "W"])


def fingerprint(weights: Mapping[str, Tensor], card: Card, *extra: str) -> str:
    """Return a hash of the weights and the transform, in hex.

    It covers name, type, shape and bytes of each tensor, and the transform on the card. It does
    not depend on device, precision, file format or fused layers.
    """
    digest = hashlib.sha256()
    for line in (
        "caprmil encoder 1",
        json.dumps(card.fingerprint_fields(), sort_keys=True),
        *extra,
    ):
        digest.update(line.encode() + b"\n")
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # not copied
    return digest.hexdigest()


def probe_patches(side: int) -> NDArray[np.uint8]:
    """Return two fixed patches with colour gradients and edges."""
    x, y = np.meshgrid(np.arange(side), np.arange(side))
    channels = [x * 255 // side, y * 255 // side, (x // 16 + y // 16) % 2 * 255]
    patch = np.stack(channels, axis=-1).astype(np.uint8)
    return np.stack([patch, 255 - patch[::-1]])


def summarise_output(output: NDArray[np.float32]) -> str:
    """Return a few rounded numbers of an output, to identify a function without weights.

    Values are rounded to 1 % of the largest: machines differ in the seventh digit, networks in the
    first.
    """
    values = output / (np.abs(output).max() or 1.0)
    sample = values[np.linspace(0, len(values) - 1, num=6).astype(int)]
    return " ".join(f"{value + 0.0:.2f}" for value in (values.mean(), values.std(), *sample))


def pick_precision(card: Card, device: torch.device, precision: str) -> str:
    """Return the precision to compute in: the card's on CUDA, fp32 on other devices."""
    if precision not in ("auto", *TYPES):
        raise ValueError(f"{precision=} is not one of auto, {', '.join(TYPES)}.")
    if precision == "auto":
        return card.precision if device.type == "cuda" else "fp32"
    if precision != "fp32" and device.type != "cuda":
        log.warning("%s runs in fp32: %s is supported on CUDA devices only.", card.name, precision)
        return "fp32"
    return precision
