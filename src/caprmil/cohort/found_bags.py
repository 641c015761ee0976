"""The bags among files and under folders."""

from collections.abc import Iterable
from pathlib import Path

from caprmil.cohort.located_bags import of_patches, with_several_bags
from caprmil.errors import CohortError, shorten
from caprmil.features import bags
from caprmil.io.paths import as_path

COORDINATES = "_patches.h5"  # how TRIDENT calls a file of coordinates, in its folder `patches`


def find_bags(paths: Iterable[str | Path]) -> dict[str, Path]:
    """Return the bags among files and under folders, by the name of their slide."""
    files = bag_files_in(paths)
    found = {name: of_patches(own) for name, own in bags.group_by_slide(files).items()}
    if doubled := with_several_bags(found):
        raise CohortError(f"Slides with more than one bag: {shorten(doubled)}. Name one of each.")
    if not found:
        raise CohortError(f"No bag was found. A bag ends in {', '.join(bags.SUFFIXES)}.")
    return {name: own[0] for name, own in sorted(found.items())}


def bag_files_in(paths: Iterable[str | Path]) -> list[Path]:
    """Return the bags among files and under folders."""
    files: dict[Path, Path] = {}  # a file that is given twice is one file
    for path in map(as_path, paths):
        if not path.exists():
            raise CohortError(f"There is no file or folder {path}.")
        if path.is_file() and path.suffix.lower() not in bags.SUFFIXES:
            raise CohortError(f"{path} is not a bag. A bag ends in {', '.join(bags.SUFFIXES)}.")
        own = [path] if path.is_file() else path.rglob("*")
        files.update((file.resolve(), file) for file in own if _is_bag(file))
    return list(files.values())


def _is_bag(file: Path) -> bool:
    """Return whether a file is a bag by its name."""
    of_trident = file.parent.name == "patches" and file.name.endswith(COORDINATES)
    hidden = file.name.startswith(".")
    return file.suffix.lower() in bags.SUFFIXES and not (hidden or of_trident)
