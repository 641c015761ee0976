"""Slide references: a slide or patient, found by its name in a run or by its bag, and its files."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from caprmil.errors import BagError, RunError, SlideError, shorten
from caprmil.explain.patch_boxes import open_slide
from caprmil.features import bags
from caprmil.features.bag_files import BagFiles, SlideBags, parts_of, paths_of
from caprmil.features.bags import BagInfo
from caprmil.features.formats import HDF5
from caprmil.features.placed_slides import PlacedSlide
from caprmil.features.source_bags import SourceBags
from caprmil.io.moved_files import find_moved
from caprmil.io.paths import RemotePath, as_path
from caprmil.runs.run import Run
from caprmil.runs.source_inputs import find_slide_bags
from caprmil.slides.names import slide_name
from caprmil.slides.qc import Record
from caprmil.slides.slide import Slide, find_slides
from caprmil.slides.slide_row import SlideInRow, SlideRow


@dataclass(frozen=True, kw_only=True)
class SlideReference:
    """A slide and its files, or a patient with those of all slides."""

    name: str
    bag: BagFiles
    pixels: Path | None = None  # the slide's own file, if it was found
    record: Record | None = None  # of its encoding
    slides: tuple["SlideReference", ...] = ()  # of a patient, or sources that are one bag

    @property
    def all_slides(self) -> tuple["SlideReference", ...]:
        """The slides of the patient, or the slide itself."""
        return self.slides or (self,)

    @property
    def has_pixels(self) -> bool:
        """Whether a slide file was found."""
        return any(each.pixels is not None for each in self.all_slides)


Pixels: TypeAlias = Path | Mapping[str, Path] | None
"""The file of a slide, a folder of slides, or files by the names of slides."""


def locate_slide(run: Run, what: str | BagFiles, *, pixels: Pixels = None) -> SlideReference:
    """Return the slide of a run by its name, or that of a bag file.

    `pixels` is the slide's file, a folder that holds it, or files by name. Without it, the path is
    used from which `caprmil encode` read the slide: that in its record, or else in the bag. If a
    run predicts patients from all their slides, `what` is a patient, or the bag or folder of bags
    of one. If it has several sources, `what` is the bags of a slide, or a folder of them.
    """
    if isinstance(what, SourceBags | SlideBags):
        return _reference(slide_name(paths_of(what)[0].name), what, pixels)
    name, path = str(what), as_path(what)
    if name in run.bags:
        return _reference(name, _existing(name, run.bags[name]), pixels)
    if name in run.paths:
        raise RunError(
            f"{name} is a slide of {run.owner(name)}, and {run.folder} predicts patients from all "
            "their slides. Name the patient."
        )
    if name in run.names:
        own = {slide: run.slide_bags[slide] for slide in run.paths if run.patients[slide] == name}
        return _reference(name, _existing(name, SlideBags.of(own)), pixels)
    if run.predicts == "patient" and path.is_dir():
        found = find_slide_bags(run.facts, [path])
        return _reference(path.resolve().name, SlideBags.of(found), pixels)
    if (path.suffix.lower() in bags.SUFFIXES and path.exists()) or (run.sources and path.is_dir()):
        found = find_slide_bags(run.facts, [path])
        if len(found) > 1:
            raise RunError(f"{path} has bags of several slides: {shorten(found)}. Name one.")
        ((name, files),) = found.items()
        return _reference(name, files, pixels)
    raise RunError(
        f"{what} is neither a {run.unit} of {run.folder} nor a bag file. "
        f"Its {run.unit}s: {shorten(run.bags)}."
    )


def _existing(name: str, files: BagFiles) -> BagFiles:
    """Return files; raise if one was moved."""
    if not files.exists():
        raise RunError(
            f"The bag of {name} is no longer at {files}. Pass the folder that has it now, "
            "--features FOLDER, or the bag's file."
        )
    return files


def references_of_slides(patient: SlideReference) -> list[SlideReference]:
    """Return the slides of a patient, each with its own bag, which may have several sources."""
    assert isinstance(patient.bag, SlideBags)
    parts = list(zip(parts_of(patient.bag), patient.slides, strict=True))
    found = []
    for slide, files in zip(patient.bag.slides, patient.bag.paths, strict=True):
        own = [(part, each) for part, each in parts if part.slide == slide]
        if len(own) == 1:
            found.append(own[0][1])
            continue
        sources = (replace(e, name=part.name.removeprefix(f"{slide} ")) for part, e in own)
        found.append(SlideReference(name=slide, bag=files, slides=tuple(sources)))
    return found


def _reference(name: str, files: BagFiles, pixels: Pixels) -> SlideReference:
    if isinstance(files, SlideBags) and isinstance(pixels, Path) and not pixels.is_dir():
        raise SlideError(f"{pixels} is not a folder. Name the folder of the patient's slides.")
    if isinstance(files, SlideBags) or (isinstance(files, SourceBags) and files.join == "bag"):
        own = [
            replace(_reference(part.slide or name, part.files, pixels), name=part.name)
            for part in parts_of(files)
        ]
        return SlideReference(name=name, bag=files, slides=tuple(own))
    path = paths_of(files)[0]
    record = Record.read(path.parent / "qc", name)
    return SlideReference(
        name=name, bag=files, pixels=_pixels(name, path, record, pixels), record=record
    )


def open_pixels(reference: SlideReference, info: BagInfo) -> Slide | None:
    """Open the pixels of a slide, or those of a patient's slides in a row, as far as they exist.

    `info` is that of the bag in memory, or of an open stream.
    """
    if not reference.slides:
        return None if reference.pixels is None else open_slide(reference.pixels, info)
    found: list[SlideInRow] = []
    with ExitStack() as opened:
        for each, place in _pairs(reference.slides, info.slides):
            if each.pixels is not None and place.box is not None:
                slide = open_slide(each.pixels, place.info)
                opened.callback(slide.close)
                found.append(_in_row(slide, place, info))
        if not found:
            return None
        opened.pop_all()  # the row closes them
    boxes = [place.box for place in info.slides if place.box is not None]
    unit = _pixels_per_unit(info.unit, found[0].slide, info.slides[0].info)
    width, height = (max(box[n] + box[n + 2] for box in boxes) * unit for n in (0, 1))
    size = info.slide_size or (round(width), round(height))
    return SlideRow(reference.name, found, size=size, mpp=info.slide_mpp)


def _pairs(
    references: Sequence[SlideReference], places: Sequence[PlacedSlide]
) -> list[tuple[SlideReference, PlacedSlide]]:
    by_name = {each.name: each for each in references}
    return [(by_name[place.name], place) for place in places if place.name in by_name]


def _in_row(slide: Slide, place: PlacedSlide, info: BagInfo) -> SlideInRow:
    """Return where an open slide is in the row, in pixels of the row."""
    assert place.box is not None
    row = _pixels_per_unit(info.unit, slide, info.slides[0].info)
    own = _pixels_per_unit(place.info.unit, slide, place.info)
    x, y = place.origin
    left, top, width, height = (end * row for end in place.box)
    return SlideInRow(
        slide=slide,
        scale=own / (place.scale * row),
        origin=(x * row, y * row),
        box=(left, top, width, height),
    )


def _pixels_per_unit(unit: str | None, slide: Slide, info: BagInfo) -> float:
    """Return level-0 pixels per unit of coordinates."""
    return 1 / (info.slide_mpp or slide.mpp) if unit == "um" else 1.0


def _pixels(name: str, bag: Path, record: Record | None, given: Pixels) -> Path | None:
    if isinstance(given, Mapping):
        given = given.get(name)
    if given is not None:
        found = find_slides([given])
        if name in found:
            return found[name]
        if given.is_dir():
            return None
        raise SlideError(f"{given} is not the slide {name}. Give it the bag's name.")
    stored = (record.path if record else "") or _path_in_bag(bag)
    path = find_moved({name: stored}, bag)[name] if stored else None
    return path if path and path.exists() else None


def _path_in_bag(bag: Path) -> str | None:
    """Return the path of the slide in a bag, if it can be read without reading the features."""
    if isinstance(bag, RemotePath) or bag.suffix.lower() not in HDF5:
        return None
    with suppress(BagError):  # the error is raised when the bag is read
        return bags.inspect(bag).slide_path
    return None
