"""What the sections of a report are made from, and what a section is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from markupsafe import Markup

from caprmil.explain import ExplainedSlide, Flips
from caprmil.explain.browser import BrowserData
from caprmil.io.progress import Step
from caprmil.report.patch_pictures import PatchPictures
from caprmil.report.prediction_parts import PredictionParts
from caprmil.runs.run import Run


@dataclass(frozen=True, eq=False, kw_only=True)
class SlideInputs:
    """What the sections of a slide report are made from."""

    run: Run
    explained: ExplainedSlide
    parts: PredictionParts
    pictures: PatchPictures  # a section includes the patches that it shows
    numbers: BrowserData  # the layers of the map
    has_heads: bool  # whether maps of single heads are among the layers
    no_pictures: str  # why there are no pictures, or nothing


@dataclass(frozen=True, eq=False, kw_only=True)
class RunInputs:
    """What the sections of a run report are made from."""

    run: Run
    parts: PredictionParts
    links: Mapping[str, str]  # addresses of slide reports, by slide
    pixels: Path | None = None  # a folder with slides
    flips: Flips | None = None  # how many patches must go before a prediction turns
    progress: Step | None = None


SlideSection: TypeAlias = Callable[[SlideInputs], Markup]
RunSection: TypeAlias = Callable[[RunInputs], Markup]
"""A section returns its HTML, or nothing if it does not apply."""
