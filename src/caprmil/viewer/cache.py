"""A cache that is limited in bytes and computes each value once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")


class SizedCache:
    """Keeps the values that were used last. Threads that want the same value compute it once.

    A value that leaves the cache is not closed, since another thread may still use it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._pending: dict[Hashable, Future[Any]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return the value of a key, or make it. An error is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                value: T = self._values[key][0]
                return value
            pending = self._pending.get(key)
            if pending is None:
                future: Future[Any] = Future()
                self._pending[key] = future
        if pending is not None:
            made_elsewhere: T = pending.result()
            return made_elsewhere
        try:
            made = make()
            self._keep(key, made, size(made))
        except BaseException as problem:
            self._finish(key)
            future.set_exception(problem)
            raise
        self._finish(key)
        future.set_result(made)
        return made

    def _finish(self, key: Hashable) -> None:
        with self._lock:
            del self._pending[key]

    def _keep(self, key: Hashable, value: object, size: int) -> None:
        with self._lock:
            self._values[key] = (value, size)
            self.used_bytes += size
            while self.used_bytes > self.max_bytes and len(self._values) > 1:  # keep the newest
                _, (_, freed) = self._values.popitem(last=False)
                self.used_bytes -= freed
