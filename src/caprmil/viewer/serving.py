"""Serving: a port, an address to open, and an end at Ctrl-C."""

import os
import platform
import socket
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Timer

import uvicorn

from caprmil.errors import RunError
from caprmil.viewer.app import create
from caprmil.viewer.library import Library
from caprmil.viewer.security import door

PORT = 8765
TRIES = 50  # ports from there on


def serve(
    library: Library,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    names: Sequence[str] = (),
    browser: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until Ctrl-C. Without a port, the first free one from 8765 on is taken."""
    with listen(host, port) as sock:
        own = sock.getsockname()[1]
        entrance = door(host, own, names)
        address = url(host, own, entrance.token)
        settings = uvicorn.Config(
            create(library, entrance),
            log_level="warning",  # an access log would print the token
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        say(f"Look at {address} (Ctrl-C stops).")
        if browser and _has_display():
            Timer(0.5, webbrowser.open, [address]).start()
        with suppress(KeyboardInterrupt):  # uvicorn raises it again when all is closed
            uvicorn.Server(settings).run(sockets=[sock])


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket at a port: the one given, or the first that is free."""
    problem: OSError | None = None
    for number in range(PORT, PORT + TRIES) if port is None else (port,):
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host.strip("[]"), number, type=socket.SOCK_STREAM
            )[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as unknown:
            raise RunError(
                f"There is no address {host} on this machine ({unknown.strerror}). "
                "Pass --host 127.0.0.1, or 0.0.0.0 for all addresses."
            ) from None
        try:
            if os.name == "posix":  # elsewhere it would share a port that is taken
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(128)
            return sock
        except OSError as taken:
            sock.close()
            problem = taken
    which = f"Port {port}" if port is not None else f"Every port from {PORT} to {PORT + TRIES - 1}"
    raise RunError(
        f"{which} of {host} cannot be had ({problem.strerror if problem else ''}). "
        "Pass another with --port."
    )


def url(host: str, port: int, token: str | None) -> str:
    """Return the address to open. One cannot open 0.0.0.0, so it has this machine's name."""
    name = socket.gethostname() if host.strip("[]") in ("0.0.0.0", "::") else host
    bracketed = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"http://{bracketed}:{port}/" + (f"?token={token}" if token else "")


def _has_display() -> bool:
    """Tell whether a browser has a window to open in; over ssh it would be one in the terminal."""
    if platform.system() == "Linux":
        return any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return "SSH_CONNECTION" not in os.environ
