"""The slides of a run by their ids, and everything that the viewer shows of them.

Everything is computed when it is first needed and kept in a cache. Nothing is written.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from caprmil.errors import RunError, SlideError
from caprmil.explain import (
    MapRanking,
    MarkedRegion,
    PatchBoxes,
    SlideReference,
    explain_slide,
    find_regions,
    locate_slide,
    map_ranking,
    open_pixels,
    outputs_without,
    read_patch,
)
from caprmil.explain import browser as pages
from caprmil.explain.marked_regions import measure_regions, why_no_regions
from caprmil.features import bag_files
from caprmil.features.bags import Bag
from caprmil.features.source_bags import SlideFiles
from caprmil.models import MILModel
from caprmil.models.device import pick_device
from caprmil.runs.run import Run
from caprmil.runs.source_inputs import find_slide_bags
from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Slide, find_slides
from caprmil.viewer.answers import calibrated_numbers, summarise
from caprmil.viewer.cache import SizedCache
from caprmil.viewer.tiles import Pyramid, is_joined, jpeg, tile

CACHE_BYTES = 768 * 2**20
OPEN_SLIDE_BYTES = 32 * 2**20  # what the reader of an open slide may hold
EXPLANATION_BYTES = 200_000  # of an explained slide, without its numbers
REGION_BYTES = 200_000  # of the regions of a slide
THUMBNAIL_PX = 160  # of the longer side
GALLERY_PX, GALLERY_COLUMNS, MAX_GALLERY = 112, 16, 512
MAX_PATCH_PX = 8192  # pixels on a side that are read for one patch
DISPLAYS = ("classes", "grades", "labels", "several", "survival", "value")  # in static/parts.js


class GoneError(SlideError):
    """A file that is known, but missing."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A slide in the list."""

    id: str
    reference: SlideReference | None
    name: str
    problem: str | None = None  # why it cannot be explained


@dataclass(frozen=True, kw_only=True)
class PackedSlide:
    """A slide and its explanation as the page gets them."""

    facts: dict[str, Any]
    data: bytes  # the numbers of patches
    version: str
    fold: str  # whose model is explained
    folds: tuple[str, ...]  # whose models predict
    exact: bool
    boxes: PatchBoxes | None  # of patches on the slide, if its pixels can be shown
    gallery: tuple[int, ...]  # rows of the patches that any map shows first
    layout: PatchBoxes  # of patches as they are shown: on the slide, or on their grid
    regions: tuple[MarkedRegion, ...]  # that the first map marks
    no_regions: str  # why there are none
    map: str  # that regions are found on


class Library:
    """The slides of a run. Methods may be called from several threads."""

    def __init__(
        self,
        run: Run,
        *,
        pixels: Path | None = None,
        extra: Sequence[Path] = (),
        device: str = "auto",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        run.trained_folds()  # raises if there is no trained model yet
        if run.target.display not in DISPLAYS:
            raise RunError(
                f"The viewer cannot show {run.target.in_words}: its display '{run.target.display}' "
                f"is not among {', '.join(DISPLAYS)}. Use caprmil explain."
            )
        self.run, self.device = run, str(pick_device(device))
        self.cache = SizedCache(cache_bytes)
        extra_bags = dict(find_slide_bags(run.facts, extra)) if extra else {}
        if not extra_bags:
            run.bag_paths()
        slides = {} if pixels is None else find_slides([pixels])
        names = dict.fromkeys([*run.bags, *extra_bags])
        entries = [self._entry(name, extra_bags, slides) for name in names]
        self.entries = {entry.id: entry for entry in entries}

    def _entry(
        self, name: str, extra_bags: dict[str, SlideFiles], slides: dict[str, Path]
    ) -> Entry:
        files = self.run.bags.get(name)
        is_there = files is not None and files.exists()
        try:
            what = name if is_there else extra_bags.get(name, name)
            reference = locate_slide(self.run, what, pixels=slides)
        except RunError as problem:
            return Entry(id=identify(name), name=name, reference=None, problem=str(problem))
        return Entry(id=identify(name), name=name, reference=reference)

    def reference(self, key: str) -> SlideReference:
        """Return the slide of an id; raise KeyError if there is none."""
        entry = self.entries[key]
        if entry.reference is None:
            raise GoneError(entry.problem or f"{entry.name} is missing.")
        return entry.reference

    # Explanations

    def explained(self, key: str) -> PackedSlide:
        """Return a slide with its explanation."""
        return self.cache.get(
            ("explained", key),
            lambda: self._explain(key),
            lambda explained: len(explained.data) + EXPLANATION_BYTES,
        )

    @cached_property
    def _ranking(self) -> MapRanking | None:
        """The faithfulness of the maps of the run. The viewer measures it but does not store it."""
        return map_ranking(self.run, store=False, device=self.device)

    def _explain(self, key: str) -> PackedSlide:
        explained = explain_slide(
            self.run,
            self.reference(key),
            ranking=self._ranking,
            regions=False,  # they are measured while the slide is shown
            device=self.device,
        )
        problem, slide = None, None
        try:
            slide = self.open_slide(key)
        except SlideError as reason:
            problem = str(reason)
        numbers = pages.pack(explained, slide)
        facts = {**numbers.facts, "id": key, "problem": problem, "tiles": None, "gallery": None}
        boxes = explained.patch_boxes(slide) if facts["pixels"] else None
        gallery: tuple[int, ...] = ()
        if slide and boxes is not None:
            gallery = _first_patches(facts["layers"])
            facts["tiles"] = {"top": Pyramid(*slide.size).top, "version": _version(slide)}
            facts["gallery"] = {"px": GALLERY_PX, "columns": GALLERY_COLUMNS, "rows": gallery}
        calibrated = calibrated_numbers(self.run, explained.answer.by_fold)
        facts["answer"] = {**facts["answer"], "calibrated": calibrated}
        version = _digest(numbers.data + repr(facts["model"]).encode())
        facts["numbers"] = version
        record = explained.reference.record
        facts["flags"] = record.flags if record else ""
        regions = find_regions(explained.explanation)
        return PackedSlide(
            facts=facts,
            data=numbers.data,
            version=version,
            fold=explained.explanation.fold,
            folds=tuple(explained.answer.by_fold),
            exact=explained.explanation.exact,
            boxes=boxes,
            gallery=gallery,
            layout=pages.layout(explained, slide),
            regions=regions,
            no_regions="" if regions else why_no_regions(explained.explanation),
            map=explained.explanation.first_signed,
        )

    def regions(self, key: str) -> dict[str, Any]:
        """Return the regions that the first map marks, with the effect of removing each."""
        return self.cache.get(
            ("regions", key), lambda: self._measure_regions(key), lambda _: REGION_BYTES
        )

    def _measure_regions(self, key: str) -> dict[str, Any]:
        explained = self.explained(key)
        if not explained.regions:
            return {"found": [], "reason": explained.no_regions}
        effects = measure_regions(
            self._model(explained.fold, key),
            self._bag(key),
            explained.regions,
            target=self.run.fold_target(explained.fold),
            of=explained.facts["first_contrast"],
            map_name=explained.map,
            device=self.device,
        )
        mpp = explained.facts["mpp"] if explained.facts["placed"] else None
        return pages.describe_regions(effects, explained.layout, mpp)

    def predict_without(
        self, key: str, removed: NDArray[np.bool_], tokens: NDArray[np.bool_] | None = None
    ) -> dict[str, Any]:
        """Return what the run and the explained model predict if some patches are removed.

        The messages of `tokens` (T, H, M) of the explained model are removed too.
        """
        explained, bag = self.explained(key), self._bag(key).select(~removed)
        models = {fold: self._model(fold, key) for fold in explained.folds}
        if tokens is not None and tokens.any():
            outputs = outputs_without(
                models, bag, tokens, reference=explained.fold, device=self.device
            )
        else:
            cells = bag.grid()
            grid = None if cells is None else torch.from_numpy(cells)[None].to(self.device)
            features = torch.from_numpy(bag.features)[None].to(self.device).float()
            with torch.no_grad():
                outputs = {fold: model(features, grid=grid) for fold, model in models.items()}
        prediction = summarise(self.run, outputs, explained=explained.fold, exact=explained.exact)
        return {**prediction, "left": len(bag.features), "removed": int(removed.sum())}

    def _bag(self, key: str) -> Bag:
        path = self.reference(key).bag
        return self.cache.get(
            ("bag", key), lambda: bag_files.read(path), lambda bag: bag.features.nbytes
        )

    def _model(self, fold: str, key: str) -> MILModel:
        model = self.cache.get(
            ("model", fold),
            lambda: self.run.model(fold).eval().to(self.device),
            lambda model: sum(p.nbytes for p in model.parameters()),
        )
        return self.run.for_slide(model, self.reference(key).name).to(self.device)

    # Pixels

    def open_slide(self, key: str) -> Slide:
        """Return the opened slide."""
        reference = self.reference(key)
        if not reference.has_pixels:
            raise GoneError(_no_pixels(reference))
        for each in reference.all_slides:
            if each.pixels is not None and not each.pixels.exists():
                raise GoneError(
                    f"The slide {each.name} is no longer at {each.pixels}. "
                    "Start the viewer with --slides FOLDER."
                )
        return self.cache.get(
            ("slide", key),
            lambda: _opened(reference),
            lambda _: OPEN_SLIDE_BYTES * max(len(reference.slides), 1),
        )

    def tile(self, key: str, zoom: int, x: int, y: int) -> bytes | None:
        """Return a tile as a JPEG, or None if it is outside of the slide."""
        slide = self.open_slide(key)
        if not Pyramid(*slide.size).has(zoom, x, y):
            return None
        return jpeg(self._tile(key, slide, zoom, x, y))

    def _tile(self, key: str, slide: Slide, *address: int) -> Pixels:
        def make() -> Pixels:
            zoom, x, y = address
            return tile(slide, zoom, x, y, child=lambda *child: self._tile(key, slide, *child))

        if is_joined(slide, Pyramid(*slide.size).scale(address[0])):  # slow to make, so it is kept
            return self.cache.get(("tile", key, *address), make, lambda pixels: pixels.nbytes)
        return make()

    def thumbnail(self, key: str) -> bytes:
        """Return the whole slide as one small JPEG."""
        slide = self.open_slide(key)
        return self.cache.get(("thumbnail", key), lambda: self._thumbnail(key, slide), len)

    def _thumbnail(self, key: str, slide: Slide) -> bytes:
        image = Image.fromarray(self._tile(key, slide, 0, 0, 0))
        image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
        return jpeg(np.asarray(image))

    def patch(self, key: str, row: int, px: int) -> bytes | None:
        """Return a patch as a JPEG, or None if there is no such row."""
        explained = self.explained(key)
        if not 0 <= row < explained.facts["patches"]:
            return None
        return jpeg(self._cut(key, explained, row, px), 88)

    def _cut(self, key: str, explained: PackedSlide, row: int, px: int) -> Pixels:
        if explained.boxes is None:
            raise GoneError(explained.facts["problem"] or _no_pixels(self.reference(key)))
        slide, side = self.open_slide(key), explained.boxes.side
        fine = [level.downsample for level in slide.levels if level.downsample <= 1.02 * side / px]
        if side / max(fine, default=1.0) > MAX_PATCH_PX:
            raise SlideError(f"A patch of {side:g} pixels is too large to be shown.")
        return read_patch(slide, explained.boxes, row, px)

    def gallery(self, key: str) -> bytes:
        """Return the patches that any map shows first, as one JPEG.

        The page can then show any map without another request.
        """
        return self.cache.get(("gallery", key), lambda: self._gallery(key), len)

    def _gallery(self, key: str) -> bytes:
        explained = self.explained(key)
        if explained.boxes is None:
            raise GoneError(explained.facts["problem"] or _no_pixels(self.reference(key)))
        px, rows = GALLERY_PX, -(-len(explained.gallery) // GALLERY_COLUMNS)
        sheet = np.full((rows * px, GALLERY_COLUMNS * px, 3), 255, dtype=np.uint8)
        for number, row in enumerate(explained.gallery):
            top, left = (px * n for n in divmod(number, GALLERY_COLUMNS))
            sheet[top : top + px, left : left + px] = self._cut(key, explained, row, px)
        return jpeg(sheet, 85)


def identify(name: str) -> str:
    """Return the id of a slide, so that no request holds a path."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _version(slide: Slide) -> str:
    """Return a text that changes with the file, so that browsers may keep its tiles."""
    stats = [(path, path.stat()) for path in slide.paths]
    return _digest("|".join(f"{path}|{s.st_mtime_ns}|{s.st_size}" for path, s in stats))


def _opened(reference: SlideReference) -> Slide:
    """Return the open slide, or the row of a patient's slides."""
    slide = open_pixels(reference, bag_files.inspect_placed(reference.bag))
    if slide is None:
        raise GoneError(f"The bags of {reference.name} do not say where their patches are.")
    return slide


def _no_pixels(reference: SlideReference) -> str:
    return f"The slide file of {reference.name} was not found. Pass its folder with --slides."


def _first_patches(layers: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    rows = (row for layer in layers for row in (*layer["top"], *layer.get("bottom", ())))
    return tuple(dict.fromkeys(rows))[:MAX_GALLERY]


def _digest(what: str | bytes) -> str:
    data = what.encode("utf-8", "surrogateescape") if isinstance(what, str) else what
    return hashlib.sha256(data).hexdigest()[:16]
