"""Slide references: a slide, found by its name in a run or by its bag, and its files."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from caprmil.cohort.cohort import find_bags
from caprmil.errors import BagError, RunError, SlideError, shorten
from caprmil.features import bags
from caprmil.features.formats import HDF5
from caprmil.io.paths import RemotePath, as_path
from caprmil.runs.run import Run
from caprmil.slides.qc import Record
from caprmil.slides.slide import find_slides


@dataclass(frozen=True, kw_only=True)
class SlideReference:
    """A slide and its files."""

    name: str
    bag: Path
    pixels: Path | None = None  # the slide's own file, if it was found
    record: Record | None = None  # of its encoding


def locate_slide(run: Run, what: str | Path, *, pixels: Path | None = None) -> SlideReference:
    """Return the slide of a run by its name, or that of a bag file.

    `pixels` is the slide's file or a folder that holds it. Without it, the path is used from which
    `caprmil encode` read the slide: that in its record, or else in the bag.
    """
    name, path = str(what), as_path(what)
    if name in run.paths:
        path = as_path(run.paths[name])
        if not path.exists():
            raise RunError(f"The bag of {name} is no longer at {path}. Pass the bag's file.")
    elif path.suffix.lower() in bags.SUFFIXES and path.exists():
        ((name, path),) = find_bags([path]).items()
    else:
        raise RunError(
            f"{what} is neither a slide of {run.folder} nor a bag file. "
            f"Its slides: {shorten(run.paths)}."
        )
    record = Record.read(path.parent / "qc", name)
    return SlideReference(
        name=name, bag=path, pixels=_pixels(name, path, record, pixels), record=record
    )


def _pixels(name: str, bag: Path, record: Record | None, given: Path | None) -> Path | None:
    if given is not None:
        found = find_slides([given])
        if name in found:
            return found[name]
        if given.is_dir():
            return None
        raise SlideError(f"{given} is not the slide {name}. Give it the bag's name.")
    stored = (record.path if record else "") or _path_in_bag(bag)
    path = as_path(stored) if stored else None
    return path if path and path.exists() else None


def _path_in_bag(bag: Path) -> str | None:
    """Return the path of the slide in a bag, if it can be read without reading the features."""
    if isinstance(bag, RemotePath) or bag.suffix.lower() not in HDF5:
        return None
    with suppress(BagError):  # the error is raised when the bag is read
        return bags.inspect(bag).slide_path
    return None
