"""Settings of feature extraction. A bag stores them: equal settings give equal features."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from caprmil import config
from caprmil.config import LATER
from caprmil.encoders import Card
from caprmil.errors import RecipeError
from caprmil.slides.patches import PatchConfig
from caprmil.slides.tissue import TissueConfig

VERSION = 1  # of the method; another version gives other features from the same settings


@dataclass(frozen=True, kw_only=True)
class ExtractionConfig:
    """Settings of extraction, apart from the slide and the encoder."""

    patches: PatchConfig = field(default_factory=PatchConfig)
    """The patch grid."""
    tissue: TissueConfig = field(default_factory=TissueConfig)
    """The detection of tissue."""
    regions: Literal["and tissue", "alone"] = "and tissue"
    """Whether annotated regions restrict the detected tissue, or replace it."""
    region_classes: tuple[str, ...] = ()
    """Classes of regions to use; empty: all."""
    dtype: Literal["float16", "float32"] = "float16"
    """Of the features in the bag."""
    whole: bool = field(default=False, metadata=LATER)
    """Whether patches cover all of the picture, instead of the tissue: for cores and crops."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings that determine the features of a slide. They are stored on its bag."""

    version: int = VERSION
    encoder: str | None
    fingerprint: str | None
    extraction: ExtractionConfig
    slide_file: str  # hash of its size, start and end: distinguishes slides of the same name
    slide_mpp: float | None = None  # if given by the user
    regions: str | None = None  # hash of the region file


def configure(
    card: Card,
    *,
    mpp: float | None = None,
    magnification: float | None = None,
    nominal: bool = False,
    patch_px: int | None = None,
    whole: bool = False,
    changes: Sequence[str] = (),
) -> ExtractionConfig:
    """Return settings for an encoder. The defaults are its scale and input size."""
    if mpp is not None and magnification is not None:
        raise RecipeError("--mpp and --magnification both set the scale. Pass one of them.")
    if magnification is not None:
        if not magnification > 0:
            raise RecipeError(f"magnification must be more than 0, not {magnification:g}.")
        mpp = 10 / magnification
    table: dict[str, Any] = {"scale_rule": "nominal" if nominal else "exact"}
    table |= {"px": patch_px or card.native_px, "mpp": (card.mpp or 1.0) if mpp is None else mpp}
    tables = {"patches": table, "whole": whole}
    return config.parse(tables, into=ExtractionConfig, name="--set", changes=changes)


def hash_slide_file(path: Path) -> str:
    """Return a hash of size, start and end of a slide's file, or of all files in its folder."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*")):
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            digest.update(f"{size} ".encode())
            for position in (0, max(0, size - 65536)):
                stream.seek(position)
                digest.update(stream.read(65536))
    return digest.hexdigest()[:16]
