"""Files that were moved together with what names them, as a run and its features may be."""

from collections.abc import Mapping
from pathlib import Path

from caprmil.io.paths import RemotePath, as_path


def find_moved(paths: Mapping[str, str], near: Path) -> dict[str, Path]:
    """Return where files are now, by their names.

    A relative path is looked for below the folders above `near`, the nearest first, and else stays
    relative to the working directory. So is what is left of an absolute path that no longer exists,
    without its first folders: a project that was moved as a whole is found. The files of a folder
    that still has one of them were not moved. URLs stay as they are.
    """
    found = {name: as_path(text) for name, text in paths.items()}
    if isinstance(near, RemotePath):
        return found
    by_folder: dict[Path, list[str]] = {}
    for name, path in found.items():
        if not isinstance(path, RemotePath):
            by_folder.setdefault(path.parent, []).append(name)
    for folder, names in by_folder.items():
        files = [found[name] for name in names]
        if folder.is_absolute() and folder.is_dir() and any(file.exists() for file in files):
            continue
        now = _find_folder(files[0], near)
        found |= {name: now / file.name for name, file in zip(names, files, strict=True)}
    return found


def _find_folder(path: Path, near: Path) -> Path:
    """Return the folder where the last parts of a path are, seen from `near`; else its own."""
    absolute = path.is_absolute()
    parts = path.parent.parts[1 if absolute else 0 :]
    ends = [Path(*parts[start:]) for start in range(len(parts))]
    if not absolute and not ends:
        ends = [Path()]
    start = near.absolute()
    for folder in (start, *start.parents):
        for end in ends:
            if (folder / end / path.name).exists():
                return folder / end
    return path.parent
