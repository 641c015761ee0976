"""A mirror: the local copy of a run whose folder is elsewhere. A run is trained in it.

Each fold is uploaded when it is finished, its fold.json last, and the scores last of all: what
was uploaded in part counts for nothing. The mirror stays on this machine until the run is whole
over there, so that here an interrupted fold goes on too, and elsewhere the finished ones do.
"""

import hashlib
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from caprmil.errors import RunError, StorageError
from caprmil.io.paths import RemotePath, fetch_all, upload, upload_all, write_small

FOLDS, FOLD = "folds", "fold.json"
START = ("recipe.toml", "splits.json", "run.json")  # the same on both sides; the recipe is first
LAST = "scores.json"
LOCK = ".lock"
_log = logging.getLogger("caprmil")

BEAT, STALE = 30.0, 180.0  # seconds between two signs of life, and after which a run is given up


class Mirror:
    """The local folder of a run elsewhere; `share` uploads what is finished and not there yet."""

    def __init__(self, remote: RemotePath, recipe: str) -> None:
        self.remote = remote
        named = hashlib.sha256(f"{remote} {recipe}".encode()).hexdigest()[:12]
        self.folder = cache() / "runs" / f"{remote.name}-{named}"
        self.owner = f"{socket.gethostname()}, process {os.getpid()}, {uuid4().hex[:8]}"
        self._there: dict[Path, tuple[int, int]] = {}  # size and time of what was uploaded

    def fetch(self) -> None:
        """Bring over what is finished. A mirror of something else is put aside before."""
        if not self._agrees():
            aside = self.folder.with_name(f"{self.folder.name}.{uuid4().hex[:8]}")
            self.folder.rename(aside)
            _log.warning(
                "what is at %s has changed; what was made here is in %s", self.remote, aside
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [file for file in self.remote.glob("*") if file.name in START]
        fetch_all(files, self.remote, self.folder)
        self._note(self.folder / file.name for file in files)
        for name in finished_folds(self.remote):
            fold = self.folder / FOLDS / name
            if not fold.exists():
                passing = fold.with_name(f".{name}.fetched")  # which gets its name when it is whole
                shutil.rmtree(passing, ignore_errors=True)
                fetch_fold(self.remote, name, passing).rename(fold)
            self._note(self._files(fold))

    def _agrees(self) -> bool:
        """Tell whether both are of one run. What is missing on a side was not copied yet."""
        sides = [(self.folder / name, self.remote / name) for name in START]
        both = [pair for pair in sides if all(file.exists() for file in pair)]
        return all(here.read_bytes() == there.read_bytes() for here, there in both)

    def share(self) -> None:
        """Upload what is finished. If that fails it is said, and tried again with the next fold."""
        try:
            self.finish()
        except StorageError as problem:
            _log.warning("not uploaded yet, and kept in %s: %s", self.folder, problem)

    def finish(self) -> None:
        """Upload what is not there yet: what makes it count comes last."""
        if said := _holder(self.remote / LOCK, other_than=self.owner):
            raise RunError(
                f"{said} has taken over {self.remote} since this process was last heard of there. "
                f"What was made here is in {self.folder}."
            )
        new = [file for file in self._files(self.folder) if self._there.get(file) != _state(file)]
        first = [self.folder / name for name in START]
        marks = sorted((f for f in new if f.name in (FOLD, LAST)), key=lambda f: f.name == LAST)
        self._send([file for file in first if file in new])
        upload_all([f for f in new if f not in [*first, *marks]], self.folder, self.remote)
        self._send(marks)
        self._note(new)

    def _send(self, files: Iterable[Path]) -> None:
        """Upload one file after the other."""
        for file in files:
            upload(file, self.remote / file.relative_to(self.folder))

    def _files(self, folder: Path) -> list[Path]:
        """Return what is meant for others: nothing hidden, and no states of training."""
        found: list[Path] = []
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(place) / name for name in names if not name.startswith(".")]
        return sorted(file for file in found if file.suffix != ".ckpt")

    def _note(self, files: Iterable[Path]) -> None:
        self._there |= {file: _state(file) for file in files}


@contextmanager
def mirrored(remote: RemotePath, recipe: str) -> Iterator[Mirror]:
    """Hold a run elsewhere for this process, and yield its mirror, which goes at a good end.

    `recipe` is the digest of what is trained: another has another mirror.
    """
    mirror = Mirror(remote, recipe)
    with _held(remote / LOCK, mirror.owner):
        try:
            mirror.fetch()
            yield mirror
            mirror.finish()
        except BaseException:
            with suppress(OSError):
                mirror.folder.rmdir()  # if there is nothing in it
            raise
    shutil.rmtree(mirror.folder, ignore_errors=True)


def finished_folds(remote: RemotePath) -> list[str]:
    """Return the names of the folds that are whole."""
    return sorted(
        f.parent.name for f in (remote / FOLDS).rglob(FOLD) if len(f.relative_to(remote).parts) == 3
    )


def fetch_fold(remote: RemotePath, name: str, copy: Path) -> Path:
    """Copy the folder of a fold, without its logs."""
    folder = remote / FOLDS / name
    files = [file for file in folder.rglob("*") if "log" not in file.relative_to(folder).parts]
    fetch_all(files, folder, copy)
    return copy


def cache() -> Path:
    """Return the folder of this user for what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "caprmil"


def _state(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


@contextmanager
def _held(lock: RemotePath, owner: str) -> Iterator[None]:
    """Keep others away from a run. Elsewhere are no locks, so there are signs of life instead.

    Two processes that start within the same moment may still both go on.
    """
    if said := _holder(lock, other_than=owner):
        raise RunError(
            f"{lock.parent} is being trained by {said}. Wait for it, or stop it. If it was killed, "
            f"wait for {STALE / 60:.0f} minutes or remove {lock}"
        )
    _sign(lock, owner)
    if said := _holder(lock, other_than=owner):
        raise RunError(f"{lock.parent} is being trained by {said}, which was quicker.")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            with suppress(StorageError):  # the network may come back
                if _holder(lock, other_than=owner):
                    return
                _sign(lock, owner)

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(StorageError):
            if not _holder(lock, other_than=owner):
                lock.unlink(missing_ok=True)


def _sign(lock: RemotePath, owner: str) -> None:
    write_small(lock, json.dumps({"owner": owner, "time": time.time()}).encode())


def _holder(lock: Path, *, other_than: str) -> str | None:
    """Return who else gave a sign of life in the last minutes."""
    try:
        said = json.loads(lock.read_text())
        fresh = time.time() - float(said["time"]) < STALE
        return str(said["owner"]) if fresh and said["owner"] != other_than else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
