"""Storage: files that are elsewhere, at s3://, gs:// or any other place of fsspec.

They are paths like any other: `place` turns a word into a `Path`, and one that is a URL into a
`Remote`, which lists, reads and removes what is there. What only a local file can do is done in
local scratch: fetched before, or uploaded after, whole or not at all.
"""

import atexit
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from errno import ENOENT
from io import BytesIO, RawIOBase, TextIOWrapper
from pathlib import Path, PosixPath
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, TypeVar
from uuid import uuid4

from caprmil.errors import CaprmilError, StorageError

T = TypeVar("T")

BLOCK = 2**18  # bytes that are fetched at once where only parts of a file are looked at
ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs")  # here a file appears when all of it is there
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}

# pathlib takes one slash of two away, so one is enough; a single letter is a drive of Windows.
_URL = re.compile(r"([a-z][a-z0-9+]+):/+(.*)", re.DOTALL | re.IGNORECASE)


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return where a word points to: a `Remote` if it is a URL, also one that was a Path before."""
    if isinstance(path, RemotePath):
        return path
    match = _URL.match(str(path))
    if match is None:
        if "::" in str(path) and ":/" in str(path):
            raise StorageError(f"{path} is a chain of storages, which is not understood here.")
        return Path(path)
    protocol, rest = match[1].lower(), match[2]
    return Path("/" + rest) if protocol in ("file", "local") else RemotePath(f"{protocol}:/{rest}")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is elsewhere."""
    return isinstance(as_path(path), RemotePath)


def require_local(path: str | os.PathLike[str]) -> Path:
    """Return a path on this machine, for work that can be done nowhere else; refuse others."""
    path = as_path(path)
    if isinstance(path, RemotePath):
        raise StorageError(
            f"{path} cannot be written to by this command yet. Pass a local folder, and copy it "
            "when it is done."
        )
    return path


def join_path(folder: Path, name: str) -> Path:
    """Return a path as seen from a folder: a URL and an absolute path stand for themselves."""
    return as_path(name) if is_remote(name) or Path(name).is_absolute() else folder / name


class RemotePath(PosixPath):
    """A path elsewhere. Names, endings and parents are those of pathlib.

    What cannot be done there, such as to give it to a library that opens local files, is an error.
    """

    listed = False  # whether a listing said that it is a file: nobody needs to ask again

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise StorageError(
            f"{self} is not on this machine, and here a local file or folder is needed. Copy it, "
            "and pass the copy."
        )

    @property
    def _system(self) -> Any:
        return _system(self.parts[0].removesuffix(":"))

    def _info(self) -> dict[str, Any] | None:
        try:
            with _telling(self):
                info: dict[str, Any] = self._system.info(str(self))
                return info
        except FileNotFoundError:
            return None

    def exists(self, **_: Any) -> bool:
        return self.listed or self._info() is not None

    def is_file(self, **_: Any) -> bool:
        return self.listed or (self._info() or {}).get("type") == "file"

    def is_dir(self, **_: Any) -> bool:
        return not self.listed and (self._info() or {}).get("type") == "directory"

    @property
    def size(self) -> int:
        """How many bytes a file has."""
        with _telling(self):
            return int(self._system.size(str(self)))

    def resolve(self, strict: bool = False) -> "RemotePath":  # noqa: ARG002
        return self

    def absolute(self) -> "RemotePath":
        return self

    def iterdir(self) -> Iterator["RemotePath"]:  # type: ignore[override]
        with _telling(self):
            base = self._system._strip_protocol(str(self))
            found = self._system.ls(str(self), detail=False)
        # S3's own page makes a folder as an empty file of that name, which is listed in itself
        return iter([self / Path(name).name for name in found if name.rstrip("/") != base])

    def glob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:  # type: ignore[override]
        return self._find(pattern, maxdepth=pattern.count("/") + 1)

    def rglob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:  # type: ignore[override]
        return self._find(pattern)

    def _find(self, pattern: str, **depth: int) -> Iterator["RemotePath"]:
        """Return the files in a folder; other than pathlib, no folders."""
        with _telling(self):
            base = self._system._strip_protocol(str(self))
            names = self._system.find(str(self), **depth)
        for name in names:
            path = self / name.removeprefix(base).lstrip("/")
            if path.relative_to(self).match(pattern):
                path.listed = True
                yield path

    def read_bytes(self) -> bytes:
        with _telling(self):
            content: bytes = self._system.cat_file(str(self))
            return content

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", *_: Any, **words: Any) -> Any:
        """Open a file to read it: text at once, bytes as far as they are asked for."""
        if mode in ("r", "rt"):
            return TextIOWrapper(BytesIO(self.read_bytes()), **words)
        if mode != "rb":
            raise StorageError(f"{self} cannot be written in place. Write a file, and upload it.")
        with _telling(self):
            return self._system.open(str(self), "rb", block_size=BLOCK, cache_type="blockcache")

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: where files have long names, folders come and go with them."""

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with _telling(self):
                self._system.rm_file(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def fetch(self, to: Path) -> Path:
        """Copy the file to a local one."""
        to.parent.mkdir(parents=True, exist_ok=True)
        with _telling(self):
            self._system.get_file(str(self), str(to))
        return to


def fetch_all(files: Sequence[RemotePath], base: RemotePath, to: Path) -> None:
    """Copy files of a folder into a local one, several at a time where that can be done."""
    copies = [to / file.relative_to(base) for file in files]
    for copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
    if files:
        with _telling(base):
            base._system.get([str(file) for file in files], [str(copy) for copy in copies])


def upload(file: Path, to: Path) -> None:
    """Put a local file there, whole or not at all, over what has that name."""
    system, passing = to._system, to  # type: ignore[attr-defined]
    if to.parts[0].removesuffix(":") not in ATOMIC:
        passing = to.with_name(f".{uuid4().hex[:8]}.{to.name}")
    with _writing(to):
        try:
            system.put_file(str(file), str(passing))
            if passing != to:
                system.mv(str(passing), str(to))
        except BaseException:
            if passing != to and system.exists(str(passing)):
                system.rm_file(str(passing))
            raise


def upload_all(files: Sequence[Path], base: Path, to: RemotePath) -> None:
    """Put files of a local folder there, several at a time. One that fails may be there in part."""
    names = [str(to / file.relative_to(base)) for file in files]
    if files:
        with _writing(to):
            to._system.put([str(file) for file in files], names)


@contextmanager
def upload_when_done(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a name in local scratch; what was written there is uploaded at the end."""
    with TemporaryDirectory(prefix="caprmil-") as folder:
        file = Path(folder) / path.name
        yield file
        if not replace and path.exists():
            raise StorageError(f"{path} already exists. Move it away, or choose another name.")
        upload(file, path)


@contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yield a file on this machine: the file itself, or a copy for as long as it is used."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with TemporaryDirectory(prefix="caprmil-") as folder:
        yield path.fetch(Path(folder) / path.name)


def scratch_folder() -> Path:
    """Return a new local folder, which goes with the process if nobody removes it before."""
    folder = Path(mkdtemp(prefix="caprmil-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def check_remote_writable(path: Path) -> None:
    """Raise if nothing can be written beside a path: a small file is put there, and removed."""
    name = f".caprmil-{uuid4().hex[:8]}"
    probe = path.with_name(name) if len(path.parts) > 2 else path / name  # parts: s3:, bucket, ...
    with _writing(path):
        probe._system.pipe_file(str(probe), b"")  # type: ignore[attr-defined]
    probe.unlink(missing_ok=True)


def write_small(path: RemotePath, content: bytes) -> None:
    """Write a small file over what has that name."""
    with _writing(path):
        path._system.pipe_file(str(path), content)


def read_blocks(path: RemotePath, look: Callable[[Any], T]) -> T:
    """Return what `look` finds in a file, of which only the parts are fetched that it reads.

    `look` is called again until all of them are at hand, and so must change nothing. It never
    waits for the network itself: h5py holds a lock while it reads, and if the thread that fetches
    came to clear away an object of h5py, both would wait for ever.
    """
    size = path.size
    parts = Parts(size)
    wanted = {0, max(0, size - 1) // BLOCK}
    while wanted:
        for block in sorted(wanted):
            with _telling(path):
                end = min(size, (block + 1) * BLOCK)
                content = path._system.cat_file(str(path), start=block * BLOCK, end=end)
            parts.blocks[block] = content
        parts.missing.clear()
        try:
            return look(parts)
        except Exception:
            if not parts.missing:
                raise
        wanted = set(parts.missing)
    return look(parts)


class Parts(RawIOBase):
    """A file of which some blocks are at hand. To read others fails, and notes them."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0
        self.blocks: dict[int, bytes] = {}
        self.missing: set[int] = set()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence]
        )
        return self.place

    def readinto(self, buffer: Any) -> int:
        end = min(self.place + len(buffer), self.size)
        if end <= self.place:
            return 0
        first, last = self.place // BLOCK, (end - 1) // BLOCK
        missing = {block for block in range(first, last + 1) if block not in self.blocks}
        if missing:
            self.missing |= missing
            raise OSError("Not at hand yet.")
        content = b"".join(self.blocks[block] for block in range(first, last + 1))
        start = self.place - first * BLOCK
        buffer[: end - self.place] = content[start : start + end - self.place]
        done, self.place = end - self.place, end
        return done


def _system(protocol: str) -> Any:
    """Return the file system of a protocol; asked each time, as a forked process has its own."""
    import fsspec  # takes its time, and most files are here

    try:
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError as problem:
        package = PACKAGES.get(protocol, "")
        remedy = f"Install {package or 'it'}: pip install {package or '...'}"
        if package in ("s3fs", "gcsfs"):
            remedy = f"Install it: pip install {package}, or pip install 'caprmil[remote]'"
        raise StorageError(
            f"{protocol}:// needs a package that is not here ({problem}). {remedy}"
        ) from None
    except ValueError:
        raise StorageError(
            f"There is no storage called {protocol}://. Known are s3://, gs://, memory:// and what "
            "else fsspec has."
        ) from None


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Turn what goes wrong elsewhere into one line; that nothing is there stays what it is."""
    try:
        yield
    except (CaprmilError, MemoryError):
        raise
    except FileNotFoundError:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path)) from None
    except PermissionError as problem:
        raise StorageError(
            f"{path} may not be read or written by you ({_reason(problem)}). Check the rights, and "
            "the credentials in the environment: docs/storage.md"
        ) from problem
    except Exception as problem:  # each file system raises kinds of its own
        raise StorageError(
            f"{path} cannot be reached ({_reason(problem)}). Check the network, the address, and "
            "the credentials in the environment: docs/storage.md"
        ) from problem


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        with _telling(path):
            yield
    except FileNotFoundError:
        bucket = "/".join(str(path).split("/")[:3])
        raise StorageError(
            f"{path} cannot be written: there is no {bucket}. Make it, or check its name."
        ) from None


def _reason(problem: BaseException) -> str:
    return " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
