"""The library: the slides of a run by their ids, and all that is told and shown of them.

Everything is made at first use and kept on a shelf. Nothing is written.
"""

import gzip
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.cohort.cohort import find_bags
from caprmil.errors import BagError, RunError, SlideError
from caprmil.explain import (
    PatchBoxes,
    SlideReference,
    explain_slide,
    locate_slide,
    open_slide,
    read_patch,
)
from caprmil.explain import browser as pages
from caprmil.features import bags
from caprmil.features.bags import Bag
from caprmil.io.paths import as_path
from caprmil.models import MILModel
from caprmil.models.device import pick_device
from caprmil.runs.run import Run
from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Slide, find_slides
from caprmil.viewer.shelf import Shelf
from caprmil.viewer.tiles import Pyramid, is_joined, jpeg, tile

ROOM = 768 * 2**20  # bytes of all that is kept
OF_SLIDE = 32 * 2**20  # what an open slide may hold in its reader's cache
GALLERY_PX, GALLERY_ROW, MOST_IN_GALLERY = 112, 16, 512
LONGEST = 8192  # pixels on a side that are read for one patch


class Gone(SlideError):  # noqa: N818  reads as it is said
    """What is asked for is known, but no longer there."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A slide on the list."""

    id: str
    subject: SlideReference | None
    name: str
    problem: str | None = None  # why it cannot be explained


@dataclass(frozen=True, kw_only=True)
class Told:
    """A case as the page gets it."""

    facts: dict[str, Any]
    data: bytes
    packed: bytes  # the data, compressed
    version: str
    fold: str  # whose model is explained
    folds: tuple[str, ...]  # whose models answer
    exact: bool
    calibrated: bool
    where: PatchBoxes | None  # where patches lie on the slide, if its pixels can be shown
    gallery: tuple[int, ...]  # rows of the patches that any map may show first


class Library:
    """The slides of a run. Methods may be called from several threads."""

    def __init__(
        self,
        run: Run,
        *,
        pixels: Path | None = None,
        extra: Sequence[Path] = (),
        device: str = "auto",
        room: int = ROOM,
    ) -> None:
        run.trained_folds()  # says what to do if there is no model yet
        if not run.target.has_classes:
            raise RunError(
                f"The viewer shows classes, and {run.folder} predicts a {run.target.kind}. Use "
                "caprmil explain."
            )
        self.run, self.device = run, str(pick_device(device))
        self.shelf = Shelf(room)
        beside = find_bags(extra) if extra else {}
        if not beside:
            run.bag_paths()
        slides = {} if pixels is None else find_slides([pixels])
        self.entries = {
            entry.id: entry
            for entry in (self._entry(n, beside, slides) for n in self._names(beside))
        }

    def _names(self, beside: Iterable[str]) -> list[str]:
        return list(dict.fromkeys([*self.run.paths, *beside]))

    def _entry(self, name: str, beside: dict[str, Path], slides: dict[str, Path]) -> Entry:
        own = self.run.paths.get(name)
        what = name if own is not None and as_path(own).exists() else beside.get(name, name)
        try:
            subject = locate_slide(self.run, what, pixels=slides.get(name))
        except RunError as problem:
            return Entry(id=identify(name), name=name, subject=None, problem=str(problem))
        return Entry(id=identify(name), name=name, subject=subject)

    def subject(self, key: str) -> SlideReference:
        """Return the slide of that id. A KeyError says that there is none."""
        entry = self.entries[key]
        if entry.subject is None:
            raise Gone(entry.problem or f"{entry.name} is no longer there.")
        return entry.subject

    # Why

    def told(self, key: str) -> Told:
        """Return a slide explained."""
        return self.shelf.once(
            ("told", key),
            lambda: self._tell(key),
            lambda told: len(told.data) + len(told.packed) + 200_000,
        )

    def _tell(self, key: str) -> Told:
        case = explain_slide(self.run, self.subject(key), device=self.device)
        problem, slide = None, None
        try:
            slide = self.opened(key)
        except SlideError as reason:
            problem = str(reason)
        numbers = pages.pack(case, slide)
        facts = {**numbers.facts, "id": key, "problem": problem, "tiles": None, "gallery": None}
        where = case.patch_boxes(slide) if facts["pixels"] else None
        rows: tuple[int, ...] = ()
        if slide and where is not None:
            rows = _shown_first(facts["layers"])
            facts["tiles"] = {"top": Pyramid(*slide.size).top, "version": _version(slide)}
            facts["gallery"] = {"px": GALLERY_PX, "columns": GALLERY_ROW, "rows": rows}
        version = _digest(numbers.data + repr(facts["model"]).encode())
        facts["numbers"] = version
        record = case.reference.record
        facts["flags"] = record.flags if record else ""
        return Told(
            facts=facts,
            data=numbers.data,
            packed=gzip.compress(numbers.data, 5, mtime=0),
            version=version,
            fold=case.explanation.fold,
            folds=tuple(case.answer.by_fold),
            calibrated=case.answer.calibrated is not None,
            exact=case.explanation.exact,
            where=where,
            gallery=rows,
        )

    def ask(self, key: str, without: NDArray[np.bool_]) -> dict[str, Any]:
        """Return what the run and the explained model answer when some patches are left out."""
        told, bag = self.told(key), part(self._bag(key), ~without)
        cells = bag.grid()
        grid = None if cells is None else torch.from_numpy(cells)[None].to(self.device)
        features = torch.from_numpy(bag.features)[None].to(self.device).float()
        with torch.no_grad():
            said = {fold: self._model(fold)(features, grid=grid) for fold in told.folds}
        by_fold = {
            fold: self.run.fold_target(fold).answer(output.logits[0].cpu().double()).numpy()
            for fold, output in said.items()
        }
        own = said[told.fold]
        logits = own.aux.get("mean_logits", own.logits) if told.exact else own.logits
        calibrated = self.run.calibrate(by_fold) if told.calibrated else None
        return {
            "probabilities": by_fold[told.fold].tolist(),
            "logits": logits[0].tolist(),
            "answer": np.mean(list(by_fold.values()), axis=0).tolist(),
            "calibrated": None if calibrated is None else calibrated.tolist(),
            "left": len(bag.features),
            "out": int(without.sum()),
        }

    def _bag(self, key: str) -> Bag:
        path = self.subject(key).bag
        return self.shelf.once(
            ("bag", key), lambda: bags.read(path), lambda bag: bag.features.nbytes
        )

    def _model(self, fold: str) -> MILModel:
        return self.shelf.once(
            ("model", fold),
            lambda: self.run.model(fold).eval().to(self.device),
            lambda model: sum(p.nbytes for p in model.parameters()),
        )

    # What it looks like

    def opened(self, key: str) -> Slide:
        """Return the slide itself, open."""
        subject = self.subject(key)
        if subject.pixels is None:
            raise Gone(_missing(subject))
        if not subject.pixels.exists():
            raise Gone(f"The slide {subject.name} is no longer at {subject.pixels}.")
        pixels = subject.pixels
        return self.shelf.once(
            ("slide", key),
            lambda: open_slide(pixels, bags.inspect(subject.bag)),
            lambda _: OF_SLIDE,
        )

    def tile(self, key: str, zoom: int, x: int, y: int) -> bytes | None:
        """Return a tile as a JPEG, or None if the slide ends before it."""
        slide = self.opened(key)
        if not Pyramid(*slide.size).has(zoom, x, y):
            return None
        return jpeg(self._tile(key, slide, zoom, x, y))

    def _tile(self, key: str, slide: Slide, *place: int) -> Pixels:
        def make() -> Pixels:
            zoom, x, y = place
            return tile(slide, zoom, x, y, child=lambda *child: self._tile(key, slide, *child))

        if is_joined(slide, Pyramid(*slide.size).scale(place[0])):  # dear to make, so kept
            return self.shelf.once(("tile", key, *place), make, lambda pixels: pixels.nbytes)
        return make()

    def thumbnail(self, key: str) -> bytes:
        """Return the whole slide as one small JPEG."""
        slide = self.opened(key)
        return self.shelf.once(("thumbnail", key), lambda: self._thumbnail(key, slide), len)

    def _thumbnail(self, key: str, slide: Slide) -> bytes:
        from PIL import Image

        image = Image.fromarray(self._tile(key, slide, 0, 0, 0))
        image.thumbnail((160, 160))
        return jpeg(np.asarray(image))

    def patch(self, key: str, row: int, px: int) -> bytes | None:
        """Return a patch as a JPEG, or None if there are not so many."""
        told = self.told(key)
        if not 0 <= row < told.facts["patches"]:
            return None
        return jpeg(self._cut(key, told, row, px), 88)

    def _cut(self, key: str, told: Told, row: int, px: int) -> Pixels:
        if told.where is None:
            raise Gone(told.facts["problem"] or _missing(self.subject(key)))
        slide, side = self.opened(key), told.where.side
        fine = [level.downsample for level in slide.levels if level.downsample <= 1.02 * side / px]
        if side / max(fine, default=1.0) > LONGEST:
            raise SlideError(f"A patch of {side:g} pixels is too large to be cut out.")
        return read_patch(slide, told.where, row, px)

    def gallery(self, key: str) -> bytes:
        """Return the patches that any map may show first as one JPEG, so that no choice of a map
        needs another request."""
        return self.shelf.once(("gallery", key), lambda: self._gallery(key), len)

    def _gallery(self, key: str) -> bytes:
        told = self.told(key)
        if told.where is None:
            raise Gone(told.facts["problem"] or _missing(self.subject(key)))
        px, lines = GALLERY_PX, -(-len(told.gallery) // GALLERY_ROW)
        sheet = np.full((lines * px, GALLERY_ROW * px, 3), 255, dtype=np.uint8)
        for place, row in enumerate(told.gallery):
            top, left = (px * at for at in divmod(place, GALLERY_ROW))
            sheet[top : top + px, left : left + px] = self._cut(key, told, row, px)
        return jpeg(sheet, 85)


def identify(name: str) -> str:
    """Return the id of a slide: no request ever holds a path."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def part(bag: Bag, rows: NDArray[np.bool_]) -> Bag:
    """Return some patches of a bag. At least one must be left."""
    if not rows.any():
        raise BagError("Nothing would be left of the slide. Leave at least one patch in.")
    coords = None if bag.coords is None else bag.coords[rows]
    info = replace(bag.info, n_patches=int(rows.sum()))
    return Bag(features=bag.features[rows], coords=coords, info=info)


def _version(slide: Slide) -> str:
    """Return another word for other pixels under the same name, so that browsers may keep tiles."""
    stat = slide.path.stat()
    return _digest(f"{slide.path}|{stat.st_mtime_ns}|{stat.st_size}")


def _missing(subject: SlideReference) -> str:
    return f"The pixels of {subject.name} are not at hand. Start with --slides and their folder."


def _shown_first(layers: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    rows = (row for layer in layers for row in (*layer["top"], *layer.get("bottom", ())))
    return tuple(dict.fromkeys(rows))[:MOST_IN_GALLERY]


def _digest(what: str | bytes) -> str:
    data = what.encode("utf-8", "surrogateescape") if isinstance(what, str) else what
    return hashlib.sha256(data).hexdigest()[:16]
