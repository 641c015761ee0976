"""Bag files: the bag of a slide in one file, or that of a patient in the files of several slides.

The bag of a patient has the patches of all slides, one slide after the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError
from caprmil.features import bags
from caprmil.features.bags import Bag, BagInfo, Stream
from caprmil.features.placed_slides import Placement, place_slides


@dataclass(frozen=True)
class SlideBags:
    """The bag files of the slides of a patient, in the order of the cohort."""

    slides: tuple[str, ...]
    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Mapping[str, Path]) -> Self:
        """Return the files of slides by their names."""
        return cls(tuple(paths), tuple(paths.values()))

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))

    def exists(self) -> bool:
        """Return whether all files exist."""
        return all(path.exists() for path in self.paths)


BagFiles: TypeAlias = Path | SlideBags


def paths_of(files: BagFiles) -> tuple[Path, ...]:
    """Return the path of each file."""
    return files.paths if isinstance(files, SlideBags) else (files,)


def read(files: BagFiles) -> Bag:
    """Return the bag of a slide or of a patient, with every value checked."""
    if not isinstance(files, SlideBags):
        return bags.read(files)
    return join_bags(files.slides, [bags.read(path) for path in files.paths])


def inspect(files: BagFiles) -> BagInfo:
    """Return the metadata of a bag. The slides of a patient are not placed beside each other."""
    if not isinstance(files, SlideBags):
        return bags.inspect(files)
    infos = [bags.inspect(path) for path in files.paths]
    return join_infos(infos, place_slides(files.slides, infos, [None] * len(infos)))


def inspect_placed(files: BagFiles) -> BagInfo:
    """Return the metadata of a bag, with the slides of a patient beside each other."""
    if not isinstance(files, SlideBags):
        return bags.inspect(files)
    with streaming(files) as stream:
        return stream.info


@contextmanager
def streaming(files: BagFiles, *, rows: int = bags.ROWS) -> Iterator[Stream]:
    """Open a bag as a stream of chunks, in bounded memory."""
    with ExitStack() as opened:
        streams = [
            opened.enter_context(bags.streaming(path, rows=rows)) for path in paths_of(files)
        ]
        yield JoinedStream(files.slides, streams) if isinstance(files, SlideBags) else streams[0]


def join_bags(slides: Sequence[str], parts: Sequence[Bag]) -> Bag:
    """Return the bag of a patient: the patches of its slides, one slide after the other."""
    infos = [part.info for part in parts]
    check_widths(slides, infos)
    placement = place_slides(slides, infos, [part.coords for part in parts])
    return Bag(
        features=np.concatenate([part.features for part in parts]),
        coords=placement.coords,
        info=join_infos(infos, placement),
        slide_of=_slide_of(infos),
    )


def join_infos(infos: Sequence[BagInfo], placement: Placement) -> BagInfo:
    """Return the metadata of a patient's bag. What slides have in common is that of the first."""
    known = {
        name: next((v for info in infos if (v := getattr(info, name)) is not None), None)
        for name in ("encoder", "mpp", "scale_rule", "patch_px", "fingerprint", "settings")
    }
    facts: dict[str, Any] = known | placement.facts
    return replace(
        infos[0],
        path=None,
        kind="joined",
        n_patches=sum(info.n_patches for info in infos),
        dtype=str(np.result_type(*(info.dtype for info in infos))),
        slide_path=None,
        slides=placement.slides,
        **facts,
    )


def check_widths(slides: Sequence[str], infos: Sequence[BagInfo]) -> None:
    """Refuse bags of different widths: they cannot be one bag."""
    if len({info.width for info in infos}) > 1:
        found = ", ".join(f"{n} has {i.width}" for n, i in zip(slides, infos, strict=True))
        raise BagError(
            f"Slides of one patient differ in their features: {found}. Encode all alike."
        )


class JoinedStream(Stream):
    """The features of several open files in chunks of rows, one file after the other."""

    def __init__(self, slides: Sequence[str], parts: Sequence[Stream]) -> None:
        infos = [part.info for part in parts]
        check_widths(slides, infos)
        placement = place_slides(slides, infos, [part.coords for part in parts])
        self.info, self.rows, self._parts = join_infos(infos, placement), parts[0].rows, parts
        self._placement = placement
        self.slide_of = _slide_of(infos)

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
