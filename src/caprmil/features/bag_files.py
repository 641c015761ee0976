"""Bag files: the bag of a slide in one file, or that of a patient in the files of several slides.

The bag of a patient has the patches of all slides, one slide after the other. A slide can have
several files, one of each source: see `source_bags`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError
from caprmil.features import bags
from caprmil.features.bags import Bag, BagInfo, Stream
from caprmil.features.placed_slides import Placement, place_slides
from caprmil.features.source_bags import (
    ConcatenatedStream,
    SlideFiles,
    SourceBags,
    WidenedStream,
    bag_width,
    common_facts,
    concatenate,
    concatenate_infos,
    widen,
)


@dataclass(frozen=True)
class SlideBags:
    """The bag files of the slides of a patient, in the order of the cohort."""

    slides: tuple[str, ...]
    paths: tuple[SlideFiles, ...]

    @classmethod
    def of(cls, paths: Mapping[str, SlideFiles]) -> Self:
        """Return the files of slides by their names."""
        return cls(tuple(paths), tuple(paths.values()))

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))

    def exists(self) -> bool:
        """Return whether all files exist."""
        return all(path.exists() for path in self.paths)


BagFiles: TypeAlias = Path | SourceBags | SlideBags


class Part(NamedTuple):
    """A part of a joined bag: a slide of a patient, or a source of a slide."""

    name: str
    files: SlideFiles
    slide: str = ""
    source: int | None = None


def parts_of(files: SourceBags | SlideBags) -> list[Part]:
    """Return the parts of a joined bag, in the order of its patches."""
    if isinstance(files, SlideBags):
        found: list[Part] = []
        for slide, own in zip(files.slides, files.paths, strict=True):
            if isinstance(own, SourceBags) and own.join == "bag":
                parts = (each._replace(slide=slide) for each in parts_of(own))
                found += [each._replace(name=f"{slide} {each.name}") for each in parts]
            else:
                found.append(Part(slide, own, slide))
        return found
    names = zip(files.sources, files.paths, strict=True)
    return [Part(name, path, source=number) for number, (name, path) in enumerate(names)]


def paths_of(files: BagFiles) -> tuple[Path, ...]:
    """Return the path of each file."""
    if isinstance(files, Path):
        return (files,)
    return tuple(path for own in files.paths for path in paths_of(own))


def move(files: BagFiles, old: Path, new: Path) -> BagFiles:
    """Return the files after the folder that they are in was renamed."""
    if isinstance(files, Path):
        return new / files.relative_to(old)
    paths: tuple[Any, ...] = tuple(move(own, old, new) for own in files.paths)
    return replace(files, paths=paths)


def read(files: BagFiles) -> Bag:
    """Return the bag of a slide or of a patient, with every value checked."""
    if isinstance(files, Path):
        return bags.read(files)
    if isinstance(files, SourceBags) and files.join == "concatenation":
        return concatenate(files, [bags.read(path) for path in files.paths])
    parts = parts_of(files)
    return join_bags(parts, [read(part.files) for part in parts])


def inspect(files: BagFiles) -> BagInfo:
    """Return the metadata of a bag. Slides and sources are not placed beside each other."""
    if isinstance(files, Path):
        return bags.inspect(files)
    if isinstance(files, SourceBags) and files.join == "concatenation":
        return concatenate_infos([bags.inspect(path) for path in files.paths])
    parts = parts_of(files)
    return join_infos(parts, [inspect(part.files) for part in parts])


def inspect_placed(files: BagFiles) -> BagInfo:
    """Return the metadata of a bag, with slides and sources beside each other."""
    if isinstance(files, Path):
        return bags.inspect(files)
    with streaming(files) as stream:
        return stream.info


@contextmanager
def streaming(files: BagFiles, *, rows: int = bags.ROWS) -> Iterator[Stream]:
    """Open a bag as a stream of chunks, in bounded memory."""
    with ExitStack() as opened:

        def open_each(each: Sequence[SlideFiles]) -> list[Stream]:
            return [opened.enter_context(streaming(own, rows=rows)) for own in each]

        if isinstance(files, Path):
            yield opened.enter_context(bags.streaming(files, rows=rows))
        elif isinstance(files, SourceBags) and files.join == "concatenation":
            yield ConcatenatedStream(files, open_each(files.paths))
        else:
            parts = parts_of(files)
            yield JoinedStream(parts, open_each([part.files for part in parts]))


def join_bags(parts: Sequence[Part], found: Sequence[Bag]) -> Bag:
    """Return the bag of the parts: the patches of one after those of the other."""
    infos = [bag.info for bag in found]
    placement = place_slides([part.name for part in parts], infos, [bag.coords for bag in found])
    info = join_infos(parts, infos, placement)
    features = [bag.features for bag in found]
    if info.widths:
        sources = [part.source or 0 for part in parts]
        features = [widen(f, s, info.widths) for f, s in zip(features, sources, strict=True)]
    return Bag(
        features=np.concatenate(features),
        coords=placement.coords,
        info=info,
        slide_of=_slide_of(infos),
    )


def join_infos(
    parts: Sequence[Part], infos: Sequence[BagInfo], placement: Placement | None = None
) -> BagInfo:
    """Return the metadata of a joined bag. What slides have in common is that of the first."""
    names = [part.name for part in parts]
    placement = placement or place_slides(names, infos, [None] * len(infos))
    known: dict[str, Any] = {
        name: next((v for info in infos if (v := getattr(info, name)) is not None), None)
        for name in ("encoder", "mpp", "scale_rule", "patch_px", "fingerprint", "settings")
    }
    widths = _widths(parts, infos)
    if widths:
        known = common_facts(infos) | {"width": bag_width(widths), "widths": widths}
    facts: dict[str, Any] = known | placement.facts
    fields = {
        "path": None,
        "kind": "joined",
        "n_patches": sum(info.n_patches for info in infos),
        "dtype": str(np.result_type(*(info.dtype for info in infos))),
        "slide_path": None,
        "sources": (),
        "slides": tuple(
            replace(slide, slide=part.slide, source=part.source)
            for slide, part in zip(placement.slides, parts, strict=True)
        ),
    }
    return replace(infos[0], **(fields | facts))


def _widths(parts: Sequence[Part], infos: Sequence[BagInfo]) -> tuple[int, ...]:
    """Return the width of each source, or nothing; refuse bags that cannot be one bag."""
    widths: dict[int | None, int] = {}
    for part, info in zip(parts, infos, strict=True):
        if widths.setdefault(part.source, info.width) != info.width:
            found = ", ".join(f"{p.name} has {i.width}" for p, i in zip(parts, infos, strict=True))
            raise BagError(
                f"Slides of one patient differ in their features: {found}. Encode all alike."
            )
    return () if None in widths else tuple(widths.values())


class JoinedStream(Stream):
    """The features of several open files in chunks of rows, one file after the other."""

    def __init__(self, parts: Sequence[Part], streams: Sequence[Stream]) -> None:
        infos = [stream.info for stream in streams]
        names = [part.name for part in parts]
        self._placement = place_slides(names, infos, [stream.coords for stream in streams])
        self.info, self.rows = join_infos(parts, infos, self._placement), streams[0].rows
        self._parts, self.slide_of = streams, _slide_of(infos)
        if self.info.widths:
            self._parts = [
                WidenedStream(stream, part.source or 0, self.info.widths)
                for part, stream in zip(parts, streams, strict=True)
            ]

    def __call__(self) -> Iterator[NDArray[np.floating[Any]]]:
        """Yield the chunks of all files in order."""
        for part in self._parts:
            yield from part()

    @cached_property
    def coords(self) -> NDArray[Any] | None:
        """Coordinates of the patches, as in the joined bag."""
        return self._placement.coords


def _slide_of(infos: Sequence[BagInfo]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(infos)), [info.n_patches for info in infos])
