"""Settings: all that shapes a bag. They are kept on it: equal settings, equal bag."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from caprmil import config
from caprmil.encoders import Card
from caprmil.errors import RecipeError
from caprmil.slides.patches import PatchConfig
from caprmil.slides.tissue import TissueConfig

VERSION = 1  # of the method: another one gives other bags from the same settings


@dataclass(frozen=True, kw_only=True)
class ExtractionConfig:
    """What shapes a bag, apart from the slide and the encoder."""

    patches: PatchConfig = field(default_factory=PatchConfig)
    tissue: TissueConfig = field(default_factory=TissueConfig)
    regions: Literal["and tissue", "alone"] = "and tissue"
    """Whether drawn regions restrict the tissue that is found, or stand in for it."""
    region_classes: tuple[str, ...] = ()
    """Only regions of these classes; none: of all."""
    dtype: Literal["float16", "float32"] = "float16"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that shapes the bag of a slide. Kept on the bag: equal settings, equal bag."""

    version: int = VERSION
    encoder: str | None
    fingerprint: str | None
    extraction: ExtractionConfig
    slide_file: str  # a hash of its size and ends: another slide of the same name is another
    slide_mpp: float | None = None  # as given by hand
    regions: str | None = None  # hash of what was drawn


def configure(
    card: Card,
    *,
    mpp: float | None = None,
    magnification: float | None = None,
    nominal: bool = False,
    changes: Sequence[str] = (),
) -> ExtractionConfig:
    """Return settings for an encoder: its own scale and input size, unless told otherwise."""
    if mpp is not None and magnification is not None:
        raise RecipeError("--mpp and --magnification say the same thing. Pass one of them.")
    if magnification is not None:
        if not magnification > 0:
            raise RecipeError(f"A magnification is more than 0, not {magnification:g}.")
        mpp = 10 / magnification
    table: dict[str, Any] = {"scale_rule": "nominal" if nominal else "exact"}
    table |= {"px": card.native_px, "mpp": (card.mpp or 1.0) if mpp is None else mpp}
    return config.parse({"patches": table}, into=ExtractionConfig, name="--set", changes=changes)


def hash_slide_file(path: Path) -> str:
    """Return a hash of the size and the ends of a slide's file, or of all in its folder."""
    stamp = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*")):
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stamp.update(f"{size} ".encode())
            for place in (0, max(0, size - 65536)):
                stream.seek(place)
                stamp.update(stream.read(65536))
    return stamp.hexdigest()[:16]
