"""Conversion of bags between formats: plan the files of each bag, and write missing ones."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import h5py
import numpy as np

from caprmil.errors import BagError, CaprmilError, SlideError, UnknownNameError
from caprmil.features import bags, formats
from caprmil.features.level0 import Level0Bag, to_level0
from caprmil.features.output_formats import PLANNERS, PlannedFile
from caprmil.features.stored_arrays import own_datasets
from caprmil.io.atomic import atomic_write, check_writable, write_text
from caprmil.io.leftovers import clear_leftovers
from caprmil.io.output_stream import OutputStream, create_hdf5
from caprmil.io.paths import require_local
from caprmil.io.progress import Step
from caprmil.slides.scale import COARSEST_MPP, FINEST_MPP

FORMATS = tuple(PLANNERS)
SIZES = "slide_sizes.txt"
"""Lines of name,width,height next to CLAM's folders, whose feature files have no attributes."""

# Attributes that are ignored when an existing file is compared with the planned one.
_NOT_COMPARED = ("savetodir", "save_path", "stamp_version", "slide_path")


@dataclass(kw_only=True)
class Conversion:
    """The result of a conversion: feature files, and the errors of bags that failed."""

    written: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)  # existed with the same content
    failed: dict[str, str] = field(default_factory=dict)  # error message by slide


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
    """Write bags in another format, in the folder `out`.

    `slides` (by name), `slide_mpp` and `patch_px` add what a bag does not state, and may not
    contradict it; `encoder` is the name to write. An existing file is kept if its content is the
    same. Otherwise its bag fails, unless `replace`. A failed bag does not stop the others.
    """
    out = require_local(out)
    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    if slide_mpp is not None and not FINEST_MPP <= slide_mpp <= COARSEST_MPP:
        raise SlideError(
            f"slide_mpp is {slide_mpp:g} um/px, which is implausible; "
            f"{FINEST_MPP:g} to {COARSEST_MPP:g} are allowed."
        )
    check_writable(out / to)
    clear_leftovers(out)
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
            written = _write(bag, files, replace=replace)
        except CaprmilError as problem:
            done.failed[name] = str(problem)
        else:
            (done.written if written else done.kept).append(files[-1].path)
            sizes |= {name: bag.info.slide_size} if bag.info.slide_size else {}
        if progress is not None:
            progress(number, len(sources))
    if to == "clam" and sizes:
        _write_sizes(out / SIZES, sizes)
    return done


def _write(bag: Level0Bag, files: list[PlannedFile], *, replace: bool) -> bool:
    """Write the missing files, and return whether there were any."""
    for file in files:
        if file.path.resolve() == bag.path.resolve():
            raise BagError(f"{bag.path} would be written over itself. Choose another folder.")
    missing = [file for file in files if replace or not _exists(bag, file)]
    for file in missing:
        if file.info is not None:
            with bags.writing(file.info, file.coords, replace=replace) as append:
                for rows in bag.features(file.dtype):
                    append(rows)
        else:
            with atomic_write(file.path, replace=replace) as temporary:
                (_write_pt if file.path.suffix == ".pt" else _write_h5)(temporary, bag, file)
    return bool(missing)


def _exists(bag: Level0Bag, file: PlannedFile) -> bool:
    """Return whether a file exists; raise BagError if it has other content than planned."""
    if not file.path.exists():
        return False
    same = False
    with suppress(OSError, KeyError, BagError):
        if file.path.suffix == ".pt":
            with formats.open_file(file.path) as content:
                same = _same_ends(bag, file, content.features)
        else:
            with h5py.File(file.path) as h5:
                same = _same_content(bag, file, h5)
    if not same:
        raise BagError(
            f"{file.path} already exists with other content than {bag.path}. "
            "Move it away, choose another folder, or pass --replace."
        )
    return True


def _same_content(bag: Level0Bag, file: PlannedFile, h5: Any) -> bool:
    arrays = own_datasets(file.path, h5)
    coords, planned = arrays.get("coords"), file.coords
    if coords is None or planned is None:
        grid = coords is planned
    else:
        grid = coords.shape == planned.shape and np.array_equal(coords, planned)
    attributes = all(
        np.array_equal((h5[holder] if holder else h5).attrs[name], value)
        for holder, planned in file.attributes.items()
        for name, value in planned.items()
        if name not in _NOT_COMPARED
    )
    return (
        grid and attributes and (not file.features or _same_ends(bag, file, arrays[file.features]))
    )


def _same_ends(bag: Level0Bag, file: PlannedFile, stored: Any) -> bool:
    """Return whether shape, precision, and first and last row are as planned."""
    if stored.shape != (bag.info.n_patches, bag.info.width) or stored.dtype != file.dtype:
        return False
    ends = (stored[0], stored[bag.info.n_patches - 1])
    planned = bag.features(file.dtype, ends=True)
    return all(np.array_equal(rows[0], end) for rows, end in zip(planned, ends, strict=True))


def _write_h5(path: Path, bag: Level0Bag, file: PlannedFile) -> None:
    def shape(width: int) -> dict[str, Any]:
        if file.chunk is None:
            return {"shape": (bag.info.n_patches, width)}
        resizable = {"chunks": (file.chunk, width), "maxshape": (None, width)}
        return {"shape": (bag.info.n_patches, width), **resizable}

    with create_hdf5(path) as (h5, check_written):
        h5.create_dataset("coords", data=file.coords, **shape(2))
        if file.features:
            dataset = h5.create_dataset(file.features, dtype=file.dtype, **shape(bag.info.width))
            filled = 0
            for rows in bag.features(file.dtype):
                dataset[filled : filled + len(rows)] = rows
                filled += len(rows)
                check_written()
        for holder, attributes in file.attributes.items():
            (h5[holder] if holder else h5).attrs.update(attributes)


def _write_pt(path: Path, bag: Level0Bag, file: PlannedFile) -> None:
    import torch  # only here: the other formats do not need it

    features = np.empty((bag.info.n_patches, bag.info.width), file.dtype)
    filled = 0
    for rows in bag.features(file.dtype):
        features[filled : filled + len(rows)] = rows
        filled += len(rows)
    with OutputStream(path) as stream:
        torch.save(torch.from_numpy(features), cast("IO[bytes]", stream))
        stream.check()


def _write_sizes(path: Path, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Add the sizes of slides to the file."""
    try:
        lines = path.read_bytes().decode("utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError as problem:
        raise BagError(f"{path} is damaged ({problem}). Remove it: it is written again.") from None
    listed = {line.rsplit(",", 2)[0]: line for line in lines}
    listed |= {name: f"{name},{width},{height}" for name, (width, height) in sizes.items()}
    if list(listed.values()) != lines:
        write_text(path, "".join(f"{line}\n" for line in listed.values()), replace=True)
