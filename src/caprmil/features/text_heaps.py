"""The heaps of an HDF5 file, which hold the texts of its attributes."""

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import unpack
from typing import Any

from caprmil.errors import BagError

SIGNATURE = b"GCOL\x01\0\0\0"
HEADER = 16  # bytes, of a heap and of each of its entries
MOST_CHUNKS = 1000


def check_heaps(path: Path, file: Any, arrays: Iterable[Any]) -> None:
    """Raise if a heap of a local file has an entry without an end: HDF5 would read it for ever.

    Heaps are found by their signature, in what lies between the arrays.
    """
    with (
        Path(file.filename).open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        begin = 0
        for start, end in [*sorted(_stored(arrays)), (len(content), len(content))]:
            at = content.find(SIGNATURE, begin, max(begin, start))
            while at >= 0:
                if _is_endless(content, at):
                    raise BagError(
                        f"{path} cannot be read (the texts of its attributes are damaged). Copy it "
                        "again, or extract the features again."
                    )
                at = content.find(SIGNATURE, at + 1, max(begin, start))
            begin = max(begin, end)


def _stored(arrays: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield where arrays are stored: of many chunks, from the first to the last."""
    for array in arrays:
        if array.chunks is None:
            start = array.id.get_offset()
            if start is not None:
                yield start, start + array.id.get_storage_size()
            continue
        count = array.id.get_num_chunks()
        numbers = range(count) if count <= MOST_CHUNKS else (0, count - 1)
        chunks = [array.id.get_chunk_info(number) for number in numbers]
        places = [(chunk.byte_offset, chunk.byte_offset + chunk.size) for chunk in chunks]
        yield from places if count <= MOST_CHUNKS else [(min(places)[0], max(places)[1])]


def _is_endless(content: mmap.mmap, heap: int) -> bool:
    """Return whether an entry of a heap is followed by itself."""
    (size,) = unpack("<Q", content[heap + 8 : heap + HEADER])
    at, end = heap + HEADER, min(heap + size, len(content))
    while at + HEADER <= end:
        number, _, _, length = unpack("<HHIQ", content[at : at + HEADER])
        step = length if number == 0 else HEADER + (length + 7) // 8 * 8
        if step % 2**64 == 0:
            return True
        at += step
    return False
