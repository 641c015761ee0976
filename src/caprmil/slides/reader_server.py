"""The server process that forks a process for each slide, and what is sent between them.

It imports what slides need once, and has one thread, so that forking is safe and fast. It ends when
its socket is closed, also by the death of the main process; its children end with it.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import pyvips

from caprmil.errors import SlideError
from caprmil.slides.readers import ReadError, SlideFile, as_rgb

MIN_MEMORY = 4 * 2**30
"""What the process of a slide may allocate at least, in bytes, and otherwise half of the memory. A
slide needs less than 200 MB, an image that cannot be decoded in parts as much as its pixels."""

BLOCK = struct.Struct("<5q")  # a request: level, x, y, width, height
LENGTH = struct.Struct("<q")  # bytes of the text that follows; in an answer, 0: pixels follow

_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def serve(descriptor: int) -> None:
    """Fork a process for each connection that is received, until the socket is closed."""
    server = socket.socket(fileno=descriptor)
    with suppress(pyvips.Error):  # libvips initialises its loaders once, not for each slide
        pyvips.Image.new_from_buffer(b"no image", "")
    as_rgb(pyvips.Image.black(1, 1, bands=3))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave no zombies
    gc.freeze()
    while received := socket.recv_fds(server, 1, 2)[1]:
        connection, stderr = received
        try:
            child = os.fork()
        except OSError as problem:
            os.write(stderr, f"no process for it: {problem}".encode())
        else:
            if child == 0:
                server.close()
                _serve_slide(connection, stderr)
                os._exit(0)
        for each in received:
            os.close(each)


def _serve_slide(connection: int, stderr: int) -> None:
    """Open the slide that the first message names, and serve its blocks to each connection."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(stderr, 2)
    os.close(stderr)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max(MIN_MEMORY, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    control = socket.socket(fileno=connection)
    request = json.loads(receive_text(control))
    path = Path(request["path"])
    try:
        slide = SlideFile(path, fast=request["fast"])
    except Exception as problem:  # whatever a damaged file causes
        send_text(control, json.dumps({"error": _describe(path, problem)}))
        return
    send_text(control, json.dumps(asdict(slide.metadata)))
    while received := socket.recv_fds(control, 1, 1)[1]:
        blocks = socket.socket(fileno=received[0])
        Thread(target=_serve_blocks, args=(slide, blocks), daemon=True).start()


def _serve_blocks(slide: SlideFile, connection: socket.socket) -> None:
    """Answer each request with the pixels of a block, or the reason why it cannot be read."""
    try:
        while True:
            area = BLOCK.unpack(receive(connection, BLOCK.size))
            try:
                pixels = slide.fetch(*area)
            except Exception as problem:
                cause = str(problem) if isinstance(problem, ReadError) else repr(problem)
                send_text(connection, cause or "no message")
                continue
            connection.sendall(LENGTH.pack(0))
            connection.sendall(pixels.data.cast("B"))
    except (OSError, EOFError):
        connection.close()


def _describe(path: Path, problem: Exception) -> str:
    if isinstance(problem, SlideError):
        return str(problem)
    return f"{path} cannot be opened ({problem!r}). It is damaged. Copy it again."


def send_text(connection: socket.socket, text: str) -> None:
    """Send a text that is not empty, with its length."""
    data = text.encode(errors="replace")
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_text(connection: socket.socket) -> str:
    """Return a text that was sent with its length."""
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
    return receive(connection, length).decode()


def receive(connection: socket.socket, length: int) -> bytes:
    """Return `length` bytes; raise EOFError if the other process is gone."""
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer; raise EOFError if the other process is gone."""
    while len(buffer):
        count = connection.recv_into(buffer)
        if not count:
            raise EOFError
        buffer = buffer[count:]
