"""The pictures of an atlas: typical patches of its tokens, and a slide with their maps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.errors import CaprmilError, SlideError
from caprmil.explain.explanation import square_cells
from caprmil.explain.explanation_figures import canvas_of
from caprmil.explain.patch_boxes import patch_boxes, read_patch, why_no_boxes
from caprmil.explain.slide_reference import SlideReference, locate_slide, open_pixels
from caprmil.explain.slide_tokens import opened_bag, remove_tokens
from caprmil.explain.token_atlas import TokenAtlas, TypicalPatch
from caprmil.features import bag_files
from caprmil.figures import Canvas
from caprmil.io.progress import Step
from caprmil.models import average_slide
from caprmil.runs.inference import may_keep
from caprmil.runs.run import Run
from caprmil.slides.readers import Pixels

PATCH_PX = 144
TRIED = 50  # slides that are searched for one with its file

NOT_FOUND = "the slide file was not found"


@dataclass(frozen=True, eq=False, kw_only=True)
class AtlasPictures:
    """Pictures of patches by slide and row, and why the patches of other slides have none."""

    patches: Mapping[tuple[str, int], Pixels] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def of(self, patch: TypicalPatch) -> Pixels | None:
        return self.patches.get((patch.slide, patch.row))


@dataclass(frozen=True, eq=False, kw_only=True)
class ExampleSlide:
    """A slide with the assignments of its patches to the tokens of the last block (N, H, M)."""

    name: str
    canvas: Canvas
    assignments: NDArray[np.float32]


def read_pictures(
    run: Run, atlas: TokenAtlas, *, pixels: Path | None = None, progress: Step | None = None
) -> AtlasPictures:
    """Read the typical patches of the last block, as far as slide files are found.

    `pixels` is a folder with the slides, if they were moved since they were encoded.
    """
    wanted: dict[str, dict[int, TypicalPatch]] = defaultdict(dict)
    for token in atlas.last:
        for patch in token.patches:
            wanted[patch.slide][patch.row] = patch
    found: dict[tuple[str, int], Pixels] = {}
    missing: dict[str, str] = {}
    for done, (slide, patches) in enumerate(wanted.items(), 1):
        try:
            reference = locate_slide(run, slide, pixels=pixels)
            pictures = _read(reference, list(patches.values()))
            found |= {(slide, row): picture for row, picture in pictures.items()}
        except CaprmilError as problem:
            missing[slide] = str(problem)
        if progress:
            progress(done, len(wanted))
    return AtlasPictures(patches=found, missing=missing)


def _read(reference: SlideReference, patches: Sequence[TypicalPatch]) -> dict[int, Pixels]:
    if not reference.has_pixels:
        raise SlideError(NOT_FOUND)
    info = bag_files.inspect_placed(reference.bag)
    coords = None
    if all(patch.x is not None for patch in patches):
        coords = np.array([(patch.x, patch.y) for patch in patches], dtype=np.float64)
    opened = open_pixels(reference, info)
    if opened is None:
        raise SlideError(f"the bag {why_no_boxes(info, coords)}")
    with opened as slide:
        boxes = patch_boxes(info, coords, info.slide_mpp or slide.reported_mpp)
        if boxes is None:
            raise SlideError(f"the bag {why_no_boxes(info, coords)}")
        px = min(PATCH_PX, max(1, round(boxes.side)))
        return {
            patch.row: read_patch(slide, boxes, number, px) for number, patch in enumerate(patches)
        }


def example_slide(
    run: Run,
    atlas: TokenAtlas,
    *,
    pixels: Path | None = None,
    device: torch.device | str = "cpu",
) -> ExampleSlide:
    """Return a slide that uses many tokens of the reference fold, with its file if possible."""
    references = [locate_slide(run, name, pixels=pixels) for name in atlas.examples[:TRIED]]
    small = [each for each in references if may_keep(bag_files.inspect(each.bag))] or references
    reference = next((each for each in small if each.has_pixels), small[0])
    with opened_bag(reference) as bag:
        removal = remove_tokens(average_slide(run.model(atlas.reference)), bag, device)
        assigned = torch.cat([chunk.float().cpu() for chunk in removal.assignments(-1)])
        cells, coords, info = bag.grid(), bag.coords, bag.info
    cells = square_cells(info.n_patches) if cells is None else cells
    canvas = canvas_of(cells, None, None, None)
    with suppress(SlideError):  # a damaged file: the map is drawn without it
        opened = open_pixels(reference, info)
        if opened is not None:
            with opened as slide:
                mpp = info.slide_mpp or slide.reported_mpp
                canvas = canvas_of(cells, slide, patch_boxes(info, coords, mpp), mpp)
    return ExampleSlide(name=reference.name, canvas=canvas, assignments=assigned.numpy())
