"""A slide file that is open in a process of its own, so that a crash costs this slide only.

OpenSlide, libvips and the libraries below them are written in C. A damaged file can abort them, and
with them the process. So a server process (`reader_server`), which starts with the first slide,
forks a process for each slide, and pixels are sent back over a socket. This also gives each slide
libvips' error buffer, which is global, for itself. Forking needs Linux: elsewhere, slides are read
in the process of the caller.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np

from caprmil.errors import SlideError
from caprmil.slides.image_header import check_header
from caprmil.slides.reader_server import (
    BLOCK,
    LENGTH,
    receive,
    receive_into,
    receive_text,
    send_text,
)
from caprmil.slides.readers import Pixels, ReadError, SlideFile, SlideMetadata

TIMEOUT = 300.0  # seconds for one block; a whole image that has no pyramid takes less
ISOLATED = sys.platform == "linux" and bool(sys.executable)
"""Whether slides are read in processes of their own."""


def open_slide_file(path: Path, *, fast: bool = True) -> "IsolatedFile | SlideFile":
    """Open a slide file; raise SlideError if its header or its content is damaged."""
    check_header(path)
    return IsolatedFile(path, fast=fast) if ISOLATED else SlideFile(path, fast=fast)


class IsolatedFile:
    """A slide file that is open in another process. It may be read from several threads."""

    def __init__(self, path: Path, *, fast: bool = True) -> None:
        self._stderr = _memory_file()  # where the other process writes why it crashed
        self._control = _server.connect(self._stderr)
        self._control.settimeout(TIMEOUT)
        self._idle: list[socket.socket] = []  # connections, one for each thread that reads
        self._lock = Lock()
        self._finalizer = weakref.finalize(self, _close, self._control, self._idle, self._stderr)
        try:
            send_text(self._control, json.dumps({"path": str(path.absolute()), "fast": fast}))
            answer = json.loads(receive_text(self._control))
        except (OSError, EOFError) as problem:
            cause = self._cause(problem)
            self.close()
            raise SlideError(
                f"{path} cannot be opened ({cause}). It is damaged. Copy it again."
            ) from None
        if "error" in answer:
            self.close()
            raise SlideError(answer["error"].replace(str(path.absolute()), str(path)))
        sizes = [(width, height) for width, height in answer.pop("sizes")]
        self.metadata = SlideMetadata(sizes=sizes, **answer)

    def fetch(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """Return a block that lies inside a level; raise ReadError if it cannot be read."""
        try:
            with self._connection() as connection:
                connection.sendall(BLOCK.pack(level, x, y, width, height))
                (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
                if not length:
                    pixels = np.empty((height, width, 3), dtype=np.uint8)
                    receive_into(connection, pixels.data.cast("B"))
                    return pixels
                problem = receive(connection, length).decode()
        except (OSError, EOFError) as gone:
            raise ReadError(self._cause(gone)) from None
        raise ReadError(problem)

    def close(self) -> None:
        """Close the file, and end its process."""
        self._finalizer()

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """Yield a connection that no other thread uses. After an error it is not used again."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT)
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours

    def _cause(self, problem: Exception) -> str:
        """Return why the other process did not answer: from the last line that it wrote."""
        if isinstance(problem, TimeoutError):
            return f"no answer within {TIMEOUT:.0f} seconds"
        if self._stderr.closed:
            return "it is closed"
        words = _last_line(self._stderr) or _server.last_line() or "no message"
        return f"the library that reads it crashed: {words[:300].rstrip('.')}"


def process_ids() -> list[int]:
    """Return the ids of the server and of the processes of open slides, for measurements."""
    if (server := _server.process) is None:
        return []
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
    return [server.pid, *map(int, children.split())]


def _memory_file() -> IO[bytes]:
    """Return a file in memory: the disk may be full."""
    return os.fdopen(os.memfd_create("stderr"), "rb+")


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _close(control: socket.socket, idle: list[socket.socket], stderr: IO[bytes]) -> None:
    for connection in (control, *idle):
        connection.close()
    stderr.close()


class _Server:
    """The process that forks a process for each slide. It ends with this process."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.socket: socket.socket | None = None
        self.stderr: IO[bytes] | None = None

    def connect(self, stderr: IO[bytes]) -> socket.socket:
        """Return a connection to a new process, which writes its errors to `stderr`."""
        ours, theirs = socket.socketpair()
        with theirs, self.lock:
            for _ in range(2):  # it is started, or started again if it was killed
                self.socket = self.socket or self._start()
                with suppress(OSError):
                    socket.send_fds(self.socket, [b"+"], [theirs.fileno(), stderr.fileno()])
                    break
                self.stop()
        return ours

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        code = f"from caprmil.slides.reader_server import serve; serve({theirs.fileno()})"
        path = os.pathsep.join(entry or "." for entry in sys.path)
        self.stderr = self.stderr or _memory_file()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],  # -P: without the working directory
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.stderr,
                start_new_session=True,  # Ctrl-C is for the main process
            )
        return ours

    def last_line(self) -> str:
        """Return why the server ended, if it wrote it."""
        return _last_line(self.stderr) if self.stderr else ""

    def stop(self) -> None:
        """End the process, and with it those of all slides."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def forget(self) -> None:
        """Leave the process to the one that this process was forked from."""
        if self.socket is not None:
            self.socket.close()
        if self.process is not None:
            self.process.returncode = 0  # it is not a child of this process
        self.lock, self.socket, self.process = Lock(), None, None


_server = _Server()
atexit.register(_server.stop)
os.register_at_fork(after_in_child=_server.forget)
