"""A shelf: what was made is kept, up to a number of bytes, and made once however many ask."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")


class Shelf:
    """Keeps what was used last. Two threads that want the same thing get it from one making.

    What falls off is not closed, only let go: another thread may still be reading it.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.used = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._coming: dict[Hashable, Future[Any]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def once(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return what is kept under a key, or make it. What fails is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                found: T = self._kept[key][0]
                return found
            coming = self._coming.get(key)
            if coming is None:
                mine: Future[Any] = Future()
                self._coming[key] = mine
        if coming is not None:
            waited: T = coming.result()
            return waited
        try:
            made = make()
            self._keep(key, made, size(made))
        except BaseException as problem:
            self._arrived(key)
            mine.set_exception(problem)
            raise
        self._arrived(key)
        mine.set_result(made)
        return made

    def _arrived(self, key: Hashable) -> None:
        with self._lock:
            del self._coming[key]

    def _keep(self, key: Hashable, made: object, size: int) -> None:
        with self._lock:
            self._kept[key] = (made, size)
            self.used += size
            while self.used > self.room and len(self._kept) > 1:  # the newest is wanted now
                _, (_, freed) = self._kept.popitem(last=False)
                self.used -= freed
