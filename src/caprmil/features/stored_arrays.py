"""The arrays that a file really has: complete, in the file itself, and no larger than it can be."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import h5py
import numpy as np

from caprmil.errors import BagError

FEATURES = ("features", "feats", "patch_embeddings", "embeddings")
COORDS = ("coords", "coordinates")
"""The names of features and coordinates in files."""

SMALL, EXPANSION = 2**28, 100
"""Bytes that arrays may always have, and how many times the size of their file beyond that.
Features hardly compress: a file that declares more is damaged, or meant to fill the memory."""


def check_sizes(path: Path, file_size: int, sizes: Mapping[str, int]) -> None:
    """Raise if arrays would take far more memory than their file has bytes."""
    total, most = sum(sizes.values()), max(SMALL, EXPANSION * file_size)
    if total > most:
        name = max(sizes, key=lambda name: sizes[name])
        raise BagError(
            f"{path} cannot be used: {name} would take {total / 1e9:,.1f} GB in memory, but the "
            f"file has {file_size / 1e6:,.1f} MB. It is damaged. Extract the features again."
        )


def zip_sizes(file: Path) -> dict[str, int]:
    """Return the bytes of each file in a zip archive, uncompressed."""
    with ZipFile(file) as archive:
        return {entry.filename: entry.file_size for entry in archive.infolist()}


def check_npz(path: Path, file: Path) -> None:
    """Raise if the arrays of an .npz file would take far more memory than the file has bytes."""
    header, sizes = np.lib.format, zip_sizes(file)
    check_sizes(path, file.stat().st_size, sizes)  # first: headers are read as far as they go
    with ZipFile(file) as archive:
        for name in [name for name in sizes if name.endswith(".npy")]:
            with archive.open(name) as stream:
                first = header.read_magic(stream) == (1, 0)
                read = header.read_array_header_1_0 if first else header.read_array_header_2_0
                shape, _, dtype = read(stream)
            sizes[name] = max(sizes[name], prod(shape) * dtype.itemsize)
    check_sizes(path, file.stat().st_size, sizes)


def own_datasets(path: Path, file: Any) -> dict[str, Any]:
    """Return the arrays that are stored in an HDF5 file itself.

    HDF5 can point at other files, and an array can be declared without being written. The former is
    not followed, and the latter would be read as zeros: features and coordinates like these are
    errors.
    """
    arrays, sizes = {}, {}
    for name in file:
        problem = _h5_problem(file, name)
        if problem is None:
            arrays[name] = item = file[name]
            if name in (*FEATURES, *COORDS):  # a chunk is read as a whole, also where it juts out
                sizes[name] = max(item.nbytes, prod(item.chunks or ()) * item.dtype.itemsize)
        elif problem and name in (*FEATURES, *COORDS):
            raise BagError(
                f"{path} cannot be used: {name} {problem}. Extract the features again, or ask for "
                "a complete file."
            )
    check_sizes(path, file.id.get_filesize(), sizes)
    return arrays


def _h5_problem(file: Any, name: str) -> str | None:
    """Return why an array cannot be read: None if it can, nothing if it is not an array."""
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        return "is a link to another place, which is not followed"
    item = file[name]
    if not isinstance(item, h5py.Dataset):
        return ""
    if item.external or item.is_virtual:
        return "is stored in another file, which is not read"
    if file.driver == "fileobj" or not item.size:  # of a remote file, only parts are here
        return None
    if item.chunks is None:
        complete = item.id.get_storage_size() >= item.nbytes
    else:
        chunks = (-(-side // chunk) for side, chunk in zip(item.shape, item.chunks, strict=True))
        complete = item.id.get_num_chunks() >= prod(chunks)
    return None if complete else f"is declared with {item.shape} numbers that were never written"
