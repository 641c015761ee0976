"""Output streams: a full disk is an OSError, also where a library writes that crashes then."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any

import h5py


class OutputStream(RawIOBase):
    """A new file, in which writing never fails: the first error is kept, and raised by `check`.

    HDF5 ends the process with a segmentation fault if it cannot write, because it tries again when
    the file is closed and when Python exits. torch raises errors of its own. After an error,
    nothing more is written.
    """

    def __init__(self, path: Path) -> None:
        self.file = FileIO(path, "x+")
        self.problem: OSError | None = None

    def check(self) -> None:
        """Raise the first error."""
        if self.problem is not None:
            raise self.problem

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while len(rest) and self.problem is None:
                rest = rest[self.file.write(rest) :]  # a write may be partial
        except OSError as problem:
            self.problem = problem
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            if self.problem is None:
                return self.file.truncate(size)
        except OSError as problem:
            self.problem = problem
        return size or 0

    def readinto(self, buffer: Any) -> int | None:
        return self.file.readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()


@contextmanager
def create_hdf5(path: Path) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Open a new HDF5 file, with a function that raises OSError if something was not written.

    Call it during long work; it is called at the end.
    """
    with OutputStream(path) as output:
        with h5py.File(output, "w") as file:
            yield file, output.check
        output.check()
