"""The server: it chooses a port, prints the address and runs until Ctrl-C."""

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
from caprmil.viewer.header_timeout import TimedProtocol
from caprmil.viewer.library import Library
from caprmil.viewer.security import AccessMiddleware, access_rules

PORT = 8765
MAX_TRIES = 50  # number of ports to try


def serve(
    library: Library,
    *,
    second: Library | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    names: Sequence[str] = (),
    browser: bool = False,
    show: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until Ctrl-C. The default port is the first free one from 8765.

    `second` is another run, to show side by side.
    """
    with listen(host, port) as sock:
        free_port = sock.getsockname()[1]
        rules = access_rules(host, free_port, names)
        address = url(host, free_port, rules.token)
        show(f"Open {address} (Ctrl-C stops the viewer).")
        if browser and _has_display():
            Timer(0.5, webbrowser.open, [address]).start()
        with suppress(KeyboardInterrupt):  # uvicorn raises it again at the end
            make_server(create(library, rules, second=second)).run(sockets=[sock])


def make_server(app: AccessMiddleware) -> uvicorn.Server:
    """Return the server of the application."""
    settings = uvicorn.Config(
        app,
        log_level="warning",  # an access log would print the token
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        http=TimedProtocol,
    )
    return uvicorn.Server(settings)


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket at the given port, or at the first free one."""
    problem: OSError | None = None
    for number in range(PORT, PORT + MAX_TRIES) if port is None else (port,):
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
            if os.name == "posix":  # on Windows it would share a port that is in use
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(128)
            return sock
        except OSError as taken:
            sock.close()
            problem = taken
    ports = f"Port {port}" if port is not None else f"Ports {PORT} to {PORT + MAX_TRIES - 1}"
    raise RunError(
        f"{ports} of {host} cannot be used ({problem.strerror if problem else ''}). "
        "Pass another with --port."
    )


def url(host: str, port: int, token: str | None) -> str:
    """Return the address to open. A browser cannot open 0.0.0.0, so it holds the machine's name."""
    name = socket.gethostname() if host.strip("[]") in ("0.0.0.0", "::") else host
    bracketed = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"http://{bracketed}:{port}/" + (f"?token={token}" if token else "")


def _has_display() -> bool:
    """Return whether a browser can open a window. Over ssh it would open in the terminal."""
    if platform.system() == "Linux":
        return any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return "SSH_CONNECTION" not in os.environ
