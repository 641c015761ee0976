"""Reading parts of a remote file: only the blocks that a reader needs are downloaded."""

import os
from collections.abc import Callable
from io import RawIOBase
from typing import Any, TypeVar

from caprmil.io.paths import BLOCK_BYTES, RemotePath

T = TypeVar("T")


def read_blocks(path: RemotePath, read: Callable[["PartialFile"], T]) -> T:
    """Return what `read` returns for a file of which only the needed blocks are downloaded.

    `read` is called again until all blocks that it reads are downloaded, so it must have no side
    effects. It never waits for the network itself: h5py holds a lock while it reads. If the
    downloading thread then collected an h5py object as garbage, the two would deadlock.
    """
    size = path.size
    file = PartialFile(size)
    needed = {0, max(0, size - 1) // BLOCK_BYTES}
    while needed:
        for block in sorted(needed):
            start = block * BLOCK_BYTES
            file.blocks[block] = path.read_range(start, min(size, start + BLOCK_BYTES))
        file.missing.clear()
        try:
            return read(file)
        except Exception:
            if not file.missing:
                raise
        needed = set(file.missing)
    return read(file)


class PartialFile(RawIOBase):
    """A file of which some blocks are downloaded. Reading others fails, and records them."""

    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0
        self.blocks: dict[int, bytes] = {}
        self.missing: set[int] = set()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = origin + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        end = min(self.position + len(buffer), self.size)
        if end <= self.position:
            return 0
        blocks = range(self.position // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1)
        missing = set(blocks) - self.blocks.keys()
        if missing:
            self.missing |= missing
            raise OSError("This block is not downloaded yet.")
        content = b"".join(self.blocks[block] for block in blocks)
        start = self.position - blocks[0] * BLOCK_BYTES
        count = end - self.position
        buffer[:count] = content[start : start + count]
        self.position = end
        return count
