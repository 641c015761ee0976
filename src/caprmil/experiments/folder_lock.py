"""One process at a time in the folder of an experiment."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from caprmil.io.atomic import check_writable

LOCK = ".lock"


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process holds a folder, then hold it.

    The same command twice then does the work once: the second one finds it done. A new folder in
    which nothing was written before an error is removed.
    """
    check_writable(folder / LOCK)
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logging.getLogger("caprmil").warning(
            "note: Another process is working in %s. This one waits for it.", folder
        )
        lock.acquire()
    try:
        yield
    except BaseException:
        lock.release()
        if new and [path.name for path in folder.iterdir()] == [LOCK]:
            with suppress(OSError):
                (folder / LOCK).unlink()
                for path in new:
                    path.rmdir()
        raise
    finally:
        lock.release()
