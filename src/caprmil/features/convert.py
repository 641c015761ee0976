"""Convert bags: understand each, plan its files, and write those that are not there yet."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from caprmil.errors import BagError, CaprmilError, SlideError, UnknownNameError
from caprmil.features import bags, formats
from caprmil.features.level0 import Level0Bag, to_level0
from caprmil.features.output_formats import PLANNERS, PlannedFile
from caprmil.io.atomic import atomic_write, check_writable, write_text
from caprmil.io.paths import require_local
from caprmil.io.progress import Step
from caprmil.slides.slide import COARSEST_MPP, FINEST_MPP

FORMATS = tuple(PLANNERS)
SIZES = "slide_sizes.txt"
"""Lines of name,width,height beside CLAM's folders, whose feature files cannot say them."""

_PASSING = ("savetodir", "save_path", "stamp_version")  # equal files may differ in these


@dataclass(kw_only=True)
class Conversion:
    """What became of the bags: files with features, and why others have none."""

    written: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)  # there already, and the same
    failed: dict[str, str] = field(default_factory=dict)  # by slide


def convert(
    sources: Mapping[str, Path],
    out: str | Path,
    to: str,
    *,
    slides: Mapping[str, Path] | None = None,
    slide_mpp: float | None = None,
    patch_px: int | None = None,
    encoder: str | None = None,
    replace: bool = False,
    progress: Step | None = None,
) -> Conversion:
    """Write bags in another layout, under the folder `out`.

    `slides` (by name), `slide_mpp` and `patch_px` are for what a bag does not say, and may not
    contradict it; `encoder` is the name to write. A file that is there is kept if it is what would
    be written, else its bag fails, unless `replace`. One that fails does not stop the others.
    """
    out = require_local(out)
    if to not in FORMATS:
        raise UnknownNameError("layout", to, FORMATS)
    if slide_mpp is not None and not FINEST_MPP <= slide_mpp <= COARSEST_MPP:
        raise SlideError(f"No microscope has {slide_mpp:g} um/px; 0.05 to 20 can be.")
    check_writable(out / to)
    done = Conversion()
    sizes: dict[str, tuple[int, int]] = {}
    for number, (name, path) in enumerate(sources.items(), 1):
        try:
            bag = to_level0(
                name,
                path,
                slide=(slides or {}).get(name),
                slide_mpp=slide_mpp,
                patch_px=patch_px,
                encoder=encoder,
            )
            files = PLANNERS[to](bag, out)
            fresh = _write(bag, files, replace=replace)
        except CaprmilError as problem:
            done.failed[name] = str(problem)
        else:
            (done.written if fresh else done.kept).append(files[-1].path)
            sizes |= {name: bag.info.slide_size} if bag.info.slide_size else {}
        if progress is not None:
            progress(number, len(sources))
    if to == "clam" and sizes:
        _write_sizes(out / SIZES, sizes)
    return done


def _write(bag: Level0Bag, files: list[PlannedFile], *, replace: bool) -> bool:
    """Write the files that are not there yet; tell whether there were any."""
    for file in files:
        if file.path.resolve() == bag.path.resolve():
            raise BagError(f"{bag.path} would be written over itself. Choose another folder.")
    missing = [file for file in files if replace or not _is_there(bag, file)]
    for file in missing:
        if file.ours is not None:
            with bags.writing(file.ours, file.coords, replace=replace) as put:
                for rows in bag.features(file.dtype):
                    put(rows)
        else:
            with atomic_write(file.path, replace=replace) as passing:
                (_fill_pt if file.path.suffix == ".pt" else _fill_h5)(passing, bag, file)
    return bool(missing)


def _is_there(bag: Level0Bag, file: PlannedFile) -> bool:
    """Tell whether a file is there; refuse one that is not what would be written."""
    if not file.path.exists():
        return False
    same = False
    with suppress(OSError, KeyError, BagError):
        if file.path.suffix == ".pt":
            with formats.opened(file.path) as found:
                same = _same_ends(bag, file, found.features)
        else:
            with h5py.File(file.path) as h5:
                same = _same_content(bag, file, h5)
    if not same:
        raise BagError(
            f"{file.path} is there already, and is not what {bag.path} would become. "
            "Move it away, choose another folder, or pass --replace."
        )
    return True


def _same_content(bag: Level0Bag, file: PlannedFile, h5: Any) -> bool:
    grid = "coords" not in h5 if file.coords is None else np.array_equal(h5["coords"], file.coords)
    said = all(
        np.array_equal((h5[holder] if holder else h5).attrs[name], value)
        for holder, attributes in file.said.items()
        for name, value in attributes.items()
        if name not in _PASSING
    )
    return grid and said and (not file.features or _same_ends(bag, file, h5[file.features]))


def _same_ends(bag: Level0Bag, file: PlannedFile, stored: Any) -> bool:
    if stored.shape != (bag.info.n_patches, bag.info.width) or stored.dtype != file.dtype:
        return False
    ends = (stored[0], stored[bag.info.n_patches - 1])
    ours = bag.features(file.dtype, ends=True)
    return all(np.array_equal(rows[0], end) for rows, end in zip(ours, ends, strict=True))


def _fill_h5(passing: Path, bag: Level0Bag, file: PlannedFile) -> None:
    def shape(width: int) -> dict[str, Any]:
        if file.chunk is None:
            return {"shape": (bag.info.n_patches, width)}
        growing = {"chunks": (file.chunk, width), "maxshape": (None, width)}
        return {"shape": (bag.info.n_patches, width), **growing}

    with h5py.File(passing, "x") as h5:
        h5.create_dataset("coords", data=file.coords, **shape(2))
        if file.features:
            store = h5.create_dataset(file.features, dtype=file.dtype, **shape(bag.info.width))
            filled = 0
            for rows in bag.features(file.dtype):
                store[filled : filled + len(rows)] = rows
                filled += len(rows)
        for holder, attributes in file.said.items():
            (h5[holder] if holder else h5).attrs.update(attributes)


def _fill_pt(passing: Path, bag: Level0Bag, file: PlannedFile) -> None:
    import torch  # only here: the other layouts do without

    whole = np.empty((bag.info.n_patches, bag.info.width), file.dtype)
    filled = 0
    for rows in bag.features(file.dtype):
        whole[filled : filled + len(rows)] = rows
        filled += len(rows)
    with passing.open("wb") as stream:  # a full disk is then an OSError
        torch.save(torch.from_numpy(whole), stream)


def _write_sizes(path: Path, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Add the sizes of slides to those that are listed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    listed = {line.rsplit(",", 2)[0]: line for line in lines}
    listed |= {name: f"{name},{width},{height}" for name, (width, height) in sizes.items()}
    if list(listed.values()) != lines:
        write_text(path, "".join(f"{line}\n" for line in listed.values()), replace=True)
