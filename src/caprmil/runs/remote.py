"""Remote runs: a run whose folder is remote is trained in a local folder and uploaded.

Each fold is uploaded when it is finished, its fold.json last, and the scores at the very end, so
that a partial upload is never taken for a finished fold or run. The local folder is kept until the
run is complete. So this machine also resumes an interrupted fold; others resume after the last
finished fold.
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
from caprmil.io.cache_folder import cache_folder
from caprmil.io.json_files import parse_json
from caprmil.io.paths import RemotePath, download_all, upload, upload_all

FOLDS, FOLD = "folds", "fold.json"
MEAN = "mean"  # a run of a Mean on the same folds, inside a run
IMAGE_ONLY, COVARIATES_ONLY = "image", "covariates"  # runs of one modality, on the same folds
COLUMNS_ONLY, VECTORS_ONLY = "columns", "vectors"  # if there are covariates of both kinds
SOURCE_ONLY = "source-"  # and the name of a source
BESIDE = (MEAN, IMAGE_ONLY, COVARIATES_ONLY, COLUMNS_ONLY, VECTORS_ONLY, f"{SOURCE_ONLY}*")
START = ("recipe.toml", "splits.json", "run.json")  # uploaded first, in this order
LAST = "scores.json"
LOCK = ".lock"
HEARTBEAT_SECONDS = 30.0  # between two heartbeats
STALE_SECONDS = 180.0  # since the last heartbeat, after which the lock is free
_log = logging.getLogger("caprmil")


class RemoteRun:
    """A remote run with its local folder. `upload` copies what is finished to the remote one."""

    def __init__(self, remote: RemotePath, recipe: str) -> None:
        self.remote = remote
        digest = hashlib.sha256(f"{remote} {recipe}".encode()).hexdigest()[:12]
        self.folder = cache_folder() / "runs" / f"{remote.name}-{digest}"
        self.owner = f"{socket.gethostname()}, process {os.getpid()}, {uuid4().hex[:8]}"
        self._uploaded: dict[Path, tuple[int, int]] = {}  # size and time of modification

    def download(self) -> None:
        """Download the finished folds. A local folder of a different run is renamed before."""
        if not self._matches_remote():
            renamed = self.folder.with_name(f"{self.folder.name}.{uuid4().hex[:8]}")
            self.folder.rename(renamed)
            _log.warning("%s has changed; its local folder was renamed to %s", self.remote, renamed)
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [file for file in self.remote.glob("*") if file.name in START]
        download_all(files, self.remote, self.folder)
        self._mark_uploaded(self.folder / file.name for file in files)
        for name in finished_folds(self.remote):
            fold = self.folder / FOLDS / name
            if not fold.exists():
                temporary = fold.with_name(f".{name}.download")  # renamed when it is complete
                shutil.rmtree(temporary, ignore_errors=True)
                download_fold(self.remote, name, temporary).rename(fold)
            self._mark_uploaded(self._finished_files(fold))

    def _matches_remote(self) -> bool:
        """Return whether both folders are of one run. A file may be missing in one of them."""
        pairs = [(self.folder / name, self.remote / name) for name in START]
        in_both = [pair for pair in pairs if all(file.exists() for file in pair)]
        return all(local.read_bytes() == remote.read_bytes() for local, remote in in_both)

    def try_upload(self) -> None:
        """Upload what is finished. A failure is logged; the next upload includes the same files."""
        try:
            self.upload()
        except StorageError as problem:
            _log.warning("upload failed, the files are kept in %s: %s", self.folder, problem)

    def upload(self) -> None:
        """Upload new and changed files. Those that mark a fold or the run as finished come last."""
        if owner := _other_owner(self.remote / LOCK, self.owner):
            raise RunError(
                f"{owner} has taken over {self.remote}. The files of this process are in "
                f"{self.folder}."
            )
        files = self._finished_files(self.folder)
        new = [file for file in files if self._uploaded.get(file) != _state(file)]
        first = [self.folder / name for name in START]
        last = sorted((f for f in new if f.name in (FOLD, LAST)), key=lambda f: f.name == LAST)
        self._upload_each([file for file in first if file in new])
        upload_all([f for f in new if f not in [*first, *last]], self.folder, self.remote)
        self._upload_each(last)
        self._mark_uploaded(new)

    def _upload_each(self, files: Iterable[Path]) -> None:
        """Upload files one after the other."""
        for file in files:
            upload(file, self.remote / file.relative_to(self.folder))

    def _finished_files(self, folder: Path) -> list[Path]:
        """Return all files but hidden ones and checkpoints of training."""
        found: list[Path] = []
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(parent) / name for name in names if not name.startswith(".")]
        return sorted(file for file in found if file.suffix != ".ckpt")

    def _mark_uploaded(self, files: Iterable[Path]) -> None:
        self._uploaded |= {file: _state(file) for file in files}


@contextmanager
def remote_run(remote: RemotePath, recipe: str) -> Iterator[RemoteRun]:
    """Lock a remote run and yield it. Upload it at the end, and then remove its local folder.

    After an error the local folder stays. `recipe` is the digest of the recipe: each recipe has its
    own local folder.
    """
    run = RemoteRun(remote, recipe)
    with _lock(remote / LOCK, run.owner):
        try:
            run.download()
            yield run
            run.upload()
        except BaseException:
            with suppress(OSError):
                run.folder.rmdir()  # only if it is empty
            raise
    shutil.rmtree(run.folder, ignore_errors=True)


def finished_folds(remote: RemotePath) -> list[str]:
    """Return the names of the folds that are uploaded completely."""
    return sorted(
        f.parent.name for f in (remote / FOLDS).rglob(FOLD) if len(f.relative_to(remote).parts) == 3
    )


def download_fold(remote: RemotePath, name: str, to: Path) -> Path:
    """Copy the folder of a fold without its logs, and return the copy."""
    folder = remote / FOLDS / name
    files = [file for file in folder.rglob("*") if "log" not in file.relative_to(folder).parts]
    download_all(files, folder, to)
    return to


def _state(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


@contextmanager
def _lock(lock: RemotePath, owner: str) -> Iterator[None]:
    """Lock a run by a file with heartbeats, as object stores have no locks.

    Two processes that start at the same moment may still both continue.
    """
    if other := _other_owner(lock, owner):
        raise RunError(
            f"{lock.parent} is being trained by {other}. Wait for it, or stop it. If it was "
            f"killed, wait for {STALE_SECONDS / 60:.0f} minutes or remove {lock}"
        )
    _write_heartbeat(lock, owner)
    if other := _other_owner(lock, owner):
        raise RunError(f"{lock.parent} is being trained by {other}, which has just started.")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            with suppress(StorageError):  # the network may come back
                if _other_owner(lock, owner):
                    return
                _write_heartbeat(lock, owner)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(StorageError):
            if not _other_owner(lock, owner):
                lock.unlink(missing_ok=True)


def _write_heartbeat(lock: RemotePath, owner: str) -> None:
    lock.write_bytes(json.dumps({"owner": owner, "time": time.time()}).encode())


def _other_owner(lock: RemotePath, owner: str) -> str | None:
    """Return the owner of a lock if it is another process with a recent heartbeat."""
    try:
        heartbeat = parse_json(lock.read_bytes())
        recent = time.time() - float(heartbeat["time"]) < STALE_SECONDS
        return str(heartbeat["owner"]) if recent and heartbeat["owner"] != owner else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
