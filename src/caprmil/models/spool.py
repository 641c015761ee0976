"""Projected patches of a bag in a temporary file, so that each pass but the first reads them there.

At width 128 they take 512 bytes per patch, a quarter of 1,024 features in half precision, and need
no projection.
"""

import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from caprmil.io.leftovers import has_temporary_folder, temporary_name

Rows = Float[Tensor, "n _"]

RESERVE = 2**31  # bytes that stay free on the disk
CHECKED = 2**26  # bytes after which the free space is checked again

log = logging.getLogger(__name__)


class Spool:
    """The rows of chunks, from the source in the first complete pass, and then from a file.

    On Linux and macOS the file has no name in its folder, so that nothing is left if the process is
    killed. Without space for it, and on a GPU, each pass reads the source.
    """

    def __init__(self, source: Callable[[], Iterable[Rows]]) -> None:
        self.source = source
        self.file: Any = None  # a raw file
        self.shapes, self.dtype = list[tuple[int, int]](), torch.float32
        self.passes, self.complete = 0, False
        self.failed = not has_temporary_folder() or is_in_memory(Path(tempfile.gettempdir()))

    def __call__(self) -> Iterator[Rows]:
        if self.complete:
            yield from self._stored()
            return
        self.passes += 1
        own = self.passes  # only the latest pass writes
        self.shapes.clear()
        if self.file is not None:
            self.file.seek(0)
        unchecked = CHECKED
        for rows in self.source():
            unchecked += rows.numel() * rows.element_size()
            if not self.failed and own == self.passes and len(rows):
                self._write(rows, checks=unchecked > CHECKED)
                unchecked = 0 if unchecked > CHECKED else unchecked
            yield rows
        if not self.failed and own == self.passes and self.shapes:
            self.complete = True
            log.info("Projected patches are kept in a file in %s.", tempfile.gettempdir())

    def _write(self, rows: Rows, *, checks: bool) -> None:
        """Append a chunk to the file, or give it up if there is no space."""
        folder = Path(tempfile.gettempdir())
        try:
            if rows.device.type != "cpu":
                raise OSError("they are not on the CPU")
            if checks and shutil.disk_usage(folder).free < RESERVE:
                raise OSError(f"less than {RESERVE / 2**30:.0f} GiB are free")
            if self.file is None:
                prefix = temporary_name("patches")
                self.file = tempfile.TemporaryFile(prefix=prefix, dir=folder, buffering=0)  # noqa: SIM115
                weakref.finalize(self, _close, self.file)
            data = _bytes(rows.contiguous())
            if self.file.write(data) < len(data):
                raise OSError("the disk is full")
        except OSError as problem:
            log.info("Patches are projected in each pass: no file in %s (%s).", folder, problem)
            self.failed = True
            if self.file is not None:
                _close(self.file)
            self.file = None
            return
        self.shapes.append((rows.shape[0], rows.shape[1]))
        self.dtype = rows.dtype

    def _stored(self) -> Iterator[Rows]:
        assert self.file is not None
        at = 0
        for shape in self.shapes:
            rows = torch.empty(shape, dtype=self.dtype)
            self.file.seek(at)  # another pass may have read in between
            data = _bytes(rows)
            if self.file.readinto(data) != len(data):
                raise RuntimeError("The file with the projected patches of a bag was cut.")
            at += len(data)
            yield rows


def is_in_memory(folder: Path, mounted: Path = Path("/proc/mounts")) -> bool:
    """Return whether the files of a folder take memory instead of space on a disk."""
    try:
        mounts = [line.split() for line in mounted.read_text("utf-8", "replace").splitlines()]
        resolved = folder.resolve()
    except OSError:  # not on Linux
        return False
    found = [
        (len(words[1]), number, words[2])
        for number, words in enumerate(mounts)
        if resolved.is_relative_to(words[1])
    ]
    return max(found)[2] in ("tmpfs", "ramfs") if found else False


def _bytes(rows: Rows) -> memoryview:
    numbers: Any = rows.view(torch.uint8).numpy()
    return memoryview(numbers).cast("B")


def _close(file: Any) -> None:
    with suppress(OSError):
        file.close()
