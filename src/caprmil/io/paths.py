"""Paths: local, or remote at s3://, gs:// or any other file system of fsspec.

`as_path` returns a `Path` for a local path and a `RemotePath` for a URL. A `RemotePath` is a Path
too: it lists, reads and removes remote files. What needs a local file works on a temporary copy,
downloaded before or uploaded after.

`RemotePath` is our own because universal_pathlib's UPath (0.3) is not a Path, returns False from
`is_file` without a network, creates missing buckets in `mkdir`, and without a cache of listings,
which can be outdated, sends a request per listed file. Every method that uses the network would
have to be overridden.
"""

import atexit
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import ENOENT
from io import BytesIO, TextIOWrapper
from pathlib import Path, PosixPath
from typing import Any
from uuid import uuid4

from caprmil.errors import CaprmilError, StorageError
from caprmil.io.leftovers import make_temporary_folder, temporary_folder, temporary_name

BLOCK_BYTES = 2**18  # downloaded at once where only parts of a file are read
ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs")  # a file appears here when its upload is complete
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}

# One slash is enough: pathlib turns s3://lab into s3:/lab. One letter is a drive on Windows.
_URL = re.compile(r"([a-z][a-z0-9+]+):/+(.*)", re.DOTALL | re.IGNORECASE)


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a `RemotePath` for a URL, also for one that was a Path in between, else a `Path`."""
    if isinstance(path, RemotePath):
        return path
    match = _URL.match(str(path))
    if match is None:
        if "::" in str(path) and ":/" in str(path):
            raise StorageError(
                f"{path} is a chain of file systems, which is not supported. Pass a single URL."
            )
        return Path(path)
    protocol, rest = match[1].lower(), match[2]
    return Path("/" + rest) if protocol in ("file", "local") else RemotePath(f"{protocol}:/{rest}")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is remote."""
    return isinstance(as_path(path), RemotePath)


def require_local(path: str | os.PathLike[str]) -> Path:
    """Return a local path; a remote one is an error."""
    path = as_path(path)
    if isinstance(path, RemotePath):
        raise StorageError(
            f"This command cannot write to {path}. Pass a local folder, and copy it afterwards."
        )
    return path


def check_utf8(path: Path) -> None:
    """Raise if the name of a file, or of its folder, cannot be written to a table."""
    try:
        str(path.absolute()).encode("utf-8")
    except UnicodeEncodeError:
        raise CaprmilError(
            f"{path} or its folder has bytes in its name that are not UTF-8. Rename it."
        ) from None


def join_path(folder: Path, name: str) -> Path:
    """Return a path relative to a folder. URLs and absolute paths stay as they are."""
    return as_path(name) if is_remote(name) or Path(name).is_absolute() else folder / name


class RemotePath(PosixPath):
    """A remote path. Names, suffixes and parents are those of pathlib.

    Passing it to a library that opens local files is a StorageError.
    """

    listed = False  # whether it comes from a listing of files, so that no request is needed

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise StorageError(
            f"{self} is a remote path, and a local file or folder is needed. Copy it, and pass the "
            "copy."
        )

    @property
    def protocol(self) -> str:
        """The name of the file system, e.g. s3."""
        return self.parts[0].removesuffix(":")

    @property
    def filesystem(self) -> Any:
        """The file system of fsspec. Not cached here: a forked process needs its own."""
        return _find_filesystem(self.protocol)

    @property
    def size(self) -> int:
        """The number of bytes in the file."""
        with _one_line_errors(self):
            return int(self.filesystem.size(str(self)))

    def _info(self) -> dict[str, Any]:
        """Return what the file system knows of the path, nothing if it does not exist."""
        try:
            with _one_line_errors(self):
                info: dict[str, Any] = self.filesystem.info(str(self))
                return info
        except FileNotFoundError:
            return {}

    def exists(self, **_: Any) -> bool:
        return self.listed or bool(self._info())

    def is_file(self, **_: Any) -> bool:
        return self.listed or self._info().get("type") == "file"

    def is_dir(self, **_: Any) -> bool:
        return not self.listed and self._info().get("type") == "directory"

    def resolve(self, strict: bool = False) -> "RemotePath":  # noqa: ARG002
        return self

    def absolute(self) -> "RemotePath":
        return self

    def iterdir(self) -> Iterator["RemotePath"]:  # type: ignore[override]
        with _one_line_errors(self):
            base = self.filesystem._strip_protocol(str(self))
            names = self.filesystem.ls(str(self), detail=False)
        # The console of S3 creates a folder as an empty file of that name, which lists itself.
        return iter([self / Path(name).name for name in names if name.rstrip("/") != base])

    def glob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:  # type: ignore[override]
        return self._find(pattern, maxdepth=pattern.count("/") + 1)

    def rglob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:  # type: ignore[override]
        return self._find(pattern)

    def _find(self, pattern: str, **depth: int) -> Iterator["RemotePath"]:
        """Yield the files that match a pattern. Unlike pathlib, it yields no folders."""
        with _one_line_errors(self):
            base = self.filesystem._strip_protocol(str(self))
            names = self.filesystem.find(str(self), **depth)
        for name in names:
            path = self / name.removeprefix(base).lstrip("/")
            if path.relative_to(self).match(pattern):
                path.listed = True
                yield path

    def read_bytes(self) -> bytes:
        return self.read_range(None, None)

    def read_range(self, start: int | None, end: int | None) -> bytes:
        """Return the bytes from `start` to before `end`."""
        with _one_line_errors(self):
            content: bytes = self.filesystem.cat_file(str(self), start=start, end=end)
            return content

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data: Any) -> int:
        """Write a small file, over an existing one. For large files use `upload`."""
        with _one_line_write_errors(self):
            self.filesystem.pipe_file(str(self), data)
        return len(data)

    def open(self, mode: str = "r", *_: Any, **options: Any) -> Any:
        """Open a file for reading. Text is downloaded at once, bytes block by block when read."""
        if mode in ("r", "rt"):
            return TextIOWrapper(BytesIO(self.read_bytes()), **options)
        if mode != "rb":
            raise StorageError(
                f"{self} cannot be opened for writing. Write a local file, and upload it."
            )
        with _one_line_errors(self):
            return self.filesystem.open(
                str(self), "rb", block_size=BLOCK_BYTES, cache_type="blockcache"
            )

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing. A folder of an object store exists as long as it has files."""

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with _one_line_errors(self):
                self.filesystem.rm_file(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def download(self, to: Path) -> Path:
        """Copy the file to a local one, and return its path."""
        to.parent.mkdir(parents=True, exist_ok=True)
        with _one_line_errors(self):
            self.filesystem.get_file(str(self), str(to))
        return to


def download_all(files: Sequence[RemotePath], base: RemotePath, to: Path) -> None:
    """Copy files of a folder into a local folder, concurrently where the file system can."""
    copies = [to / file.relative_to(base) for file in files]
    for copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
    if files:
        with _one_line_errors(base):
            base.filesystem.get([str(file) for file in files], [str(copy) for copy in copies])


def upload(file: Path, to: RemotePath) -> None:
    """Upload a local file atomically, over an existing one."""
    filesystem, temporary = to.filesystem, to
    if to.protocol not in ATOMIC:
        temporary = to.with_name(temporary_name(to.name))
    with _one_line_write_errors(to):
        try:
            filesystem.put_file(str(file), str(temporary))
            if temporary != to:
                filesystem.mv(str(temporary), str(to))
        except BaseException:
            if temporary != to and filesystem.exists(str(temporary)):
                filesystem.rm_file(str(temporary))
            raise


def upload_all(files: Sequence[Path], base: Path, to: RemotePath) -> None:
    """Upload files of a local folder concurrently. If it fails, some files may be incomplete."""
    names = [str(to / file.relative_to(base)) for file in files]
    if files:
        with _one_line_write_errors(to):
            to.filesystem.put([str(file) for file in files], names)


@contextmanager
def upload_when_done(path: RemotePath, *, replace: bool) -> Iterator[Path]:
    """Yield a local temporary file, which is uploaded to `path` at the end."""
    with temporary_folder() as folder:
        file = Path(folder) / path.name
        yield file
        if not replace and path.exists():
            raise StorageError(f"{path} already exists. Move it away, or choose another name.")
        upload(file, path)


@contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yield a local file: the file itself, or a temporary copy of a remote one."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with temporary_folder() as folder:
        yield path.download(Path(folder) / path.name)


def scratch_folder() -> Path:
    """Return a new local folder, which is removed when the process exits."""
    folder = make_temporary_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def check_remote_writable(path: RemotePath) -> None:
    """Raise if `path` cannot be written. A small file is written next to it, and removed."""
    name = f".caprmil-{uuid4().hex[:8]}"
    probe = path.with_name(name) if len(path.parts) > 2 else path / name  # parts: s3:, bucket, ...
    with _one_line_write_errors(path):
        probe.filesystem.pipe_file(str(probe), b"")
    probe.unlink(missing_ok=True)


def _find_filesystem(protocol: str) -> Any:
    import fsspec  # slow to import, and most paths are local

    try:
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError as problem:
        package = PACKAGES.get(protocol, "")
        remedy = f"Install {package or 'it'}: pip install {package or '...'}"
        if package in ("s3fs", "gcsfs"):
            remedy = f"Install it: pip install {package}, or pip install 'caprmil[remote]'"
        raise StorageError(
            f"{protocol}:// needs a package that is not installed ({problem}). {remedy}"
        ) from None
    except ValueError:
        raise StorageError(
            f"There is no file system for {protocol}://. Known: s3://, gs://, memory:// and the "
            "others of fsspec."
        ) from None


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a file system into a StorageError. FileNotFoundError stays one."""
    try:
        yield
    except (CaprmilError, MemoryError):
        raise
    except FileNotFoundError:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path)) from None
    except PermissionError as problem:
        raise StorageError(
            f"You have no access to {path} ({_reason(problem)}). Check the permissions, and the "
            "credentials in the environment."
        ) from problem
    except Exception as problem:  # each file system raises its own types
        raise StorageError(
            f"{path} cannot be reached ({_reason(problem)}). Check the network, the address, and "
            "the credentials in the environment."
        ) from problem


@contextmanager
def _one_line_write_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a file system into a StorageError, also that a bucket does not exist."""
    try:
        with _one_line_errors(path):
            yield
    except FileNotFoundError:
        bucket = "/".join(str(path).split("/")[:3])
        raise StorageError(
            f"{path} cannot be written: {bucket} does not exist. Create it, or check its name."
        ) from None


def _reason(problem: BaseException) -> str:
    return " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
