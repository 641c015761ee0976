"""Clients that send slowly: their connections are closed, on loopback, and others are served."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator

import pytest

from caprmil.viewer import Library
from caprmil.viewer import app as viewer_app
from caprmil.viewer.header_timeout import TimedProtocol
from viewer_requests import FIRST
from viewer_tab import serving

LIMIT = 0.4  # seconds


@pytest.fixture(scope="module")
def address(library: Library) -> Iterator[tuple[str, int]]:
    """The host and port of a viewer with short time limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimedProtocol, "seconds", LIMIT)
        patch.setattr(viewer_app, "BODY_SECONDS", LIMIT)
        with serving(library) as url:
            port = int(url.rstrip("/").rpartition(":")[2])
            _wait_for(port)
            yield "127.0.0.1", port


def _wait_for(port: int) -> None:
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(f"GET /api/run HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            if client.recv(100):
                return
        time.sleep(0.05)


def _head(port: int, path: str = "/api/run", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode()


def _seconds_until_closed(client: socket.socket, pause: float = 0.05) -> float:
    """Send a byte of a header now and then, until the server closes the connection."""
    start = time.monotonic()
    client.settimeout(pause)
    while time.monotonic() - start < 10:
        try:
            client.sendall(b"x")
            if not client.recv(100):
                return time.monotonic() - start
        except TimeoutError:
            continue
        except OSError:
            return time.monotonic() - start
    return float("inf")


def test_a_client_whose_headers_do_not_end_is_disconnected(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as client:
        client.sendall(_head(address[1]) + b"X-Slow: ")
        assert LIMIT / 2 < _seconds_until_closed(client) < 10 * LIMIT


def test_a_client_that_sends_nothing_is_disconnected(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=5) as client:
        assert client.recv(100) == b""


def test_the_second_request_of_a_connection_has_the_same_limit(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=5) as client:
        client.sendall(_head(address[1]) + b"\r\n")
        assert b" 200 " in client.recv(9999)
        client.sendall(_head(address[1]) + b"X-Slow: ")
        assert _seconds_until_closed(client) < 10 * LIMIT


def test_a_body_that_does_not_end_is_refused_with_a_sentence(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=5) as client:
        head = _head(address[1], f"/api/slides/{FIRST}/predict", "POST")
        origin = f"Origin: http://127.0.0.1:{address[1]}\r\n".encode()
        kind = b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        client.sendall(head + origin + kind)
        reply = b""
        while not reply.endswith(b"}"):
            reply += client.recv(9999)
        assert b" 408 " in reply.split(b"\r\n")[0]
        assert "too long" in json.loads(reply.split(b"\r\n\r\n")[-1])["reason"]


def test_others_are_served_while_many_clients_are_slow(address: tuple[str, int]) -> None:
    slow = [socket.create_connection(address) for _ in range(50)]
    for client in slow:
        client.sendall(_head(address[1]))
    with socket.create_connection(address, timeout=5) as client:
        client.sendall(_head(address[1]) + b"\r\n")
        assert b" 200 " in client.recv(9999)
    for client in slow:
        client.settimeout(10 * LIMIT)
        assert client.recv(100) == b""
        client.close()


def test_a_slow_answer_is_not_cut(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = viewer_app._in

    async def slow(*arguments: object) -> object:
        await asyncio.sleep(2 * LIMIT)
        return await original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(viewer_app, "_in", slow)
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(_head(address[1], f"/api/slides/{FIRST}") + b"\r\n")
        assert b" 200 " in client.recv(9999)
