"""Hostile requests to the viewer, on the loopback address only, and damaged runs behind it.

No answer may be of 5xx, no request may hang, and afterwards the viewer must still answer.
"""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from children import BrokenPromiseError, Case, start, wait
from corpus import Corpus, quick_scoring
from damaged_files import Damaged, Readers, run_files
from mutations import VALUES, WORDS, damage, damage_bytes
from other_runs import SmallRun, main_run, other_runs

REQUESTS, PER_CASE = 2000, 100
DAMAGED_RUNS = 400
SECONDS = 60.0
ANSWER_SECONDS = 10.0
HEADER_SECONDS = 60.0  # within which a viewer must close a connection that sends no request

METHODS = (
    "GET",
    "GET",
    "GET",
    "POST",
    "HEAD",
    "PUT",
    "DELETE",
    "OPTIONS",
    "get",
    "TRACE",
    "X" * 99,
)
HEADERS = (
    *("Accept-Encoding: gzip;q=0", "If-None-Match: *", "If-None-Match: W/x,,,", "Range: bytes=9-1"),
    *(
        "Origin: null",
        "Origin: http://[",
        "Sec-Fetch-Site: cross-site",
        "Cookie: \x7f=;;=",
        "X: \xff",
    ),
    *(
        "Transfer-Encoding: chunked",
        "Content-Length: -1",
        "Content-Length: 99999999999",
        "Expect: x",
    ),
    *("Content-Type: application/json; charset=\x01", "Upgrade: websocket", "Host: evil.example"),
    *(f"Cookie: {'a' * 5000}", f"X-Forwarded-For: {'1.1.1.1,' * 500}", " folded", "no colon"),
)


def cases(corpus: Corpus, _: Path, scale: float) -> Iterator[Case]:
    """Yield requests in groups, each to a viewer of its own, and damaged runs."""
    for number in range(max(1, round(REQUESTS * scale / PER_CASE))):
        name = f"requests/viewer/{number}"
        yield Case(name, _group(corpus, number), SECONDS, alone=True, attempts=PER_CASE)
    if scale >= 1:
        yield Case("requests/half-sent", _half_sent(corpus), 2 * HEADER_SECONDS, alone=True)
    for share, runs in ((0.6, [main_run(corpus)]), (0.4, other_runs(corpus))):
        files = [(each, seed) for each in runs for seed in run_files(each.run)]
        wanted = max(1, round(DAMAGED_RUNS * scale * share)) if files else 0
        step = max(1, len(files) // wanted) if wanted else 1
        for number in range(wanted):
            small, seed = files[number * step % len(files)]
            name = f"requests/{small.kind}/{seed.name}/{number}"
            run = _damaged_run(corpus, small, seed, number)
            yield Case(name, run, SECONDS, attempts=len(TARGETS) + 1)


def _group(corpus: Corpus, number: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        random = Random(number)
        with Viewer(corpus, folder) as viewer:
            for count in range(PER_CASE):
                request = hostile(random, viewer.key)
                status = viewer.send(request)
                if status >= 500:
                    raise BrokenPromiseError(f"request {count}: {status} for {request[:300]!r}")
            viewer.check()

    return run


def _half_sent(corpus: Corpus) -> Callable[[Path], None]:
    """Return the case of clients that open a connection and never finish their request."""

    def run(folder: Path) -> None:
        with Viewer(corpus, folder) as viewer:
            open_sockets = [viewer.connect() for _ in range(20)]
            for number, client in enumerate(open_sockets):
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n"[: number * 2])
            end = time.monotonic() + HEADER_SECONDS
            for client in open_sockets:
                client.settimeout(max(0.1, end - time.monotonic()))
                try:
                    while client.recv(4096):
                        pass
                except TimeoutError:
                    raise BrokenPromiseError("a request that never ends is waited for") from None
                except OSError:
                    continue
            viewer.check()

    return run


class Viewer:
    """A viewer of the run of the corpus, in a process of its own."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        self.corpus, self.output = corpus, folder / "viewer.txt"

    def __enter__(self) -> "Viewer":
        from caprmil.viewer.library import identify

        self.key = identify("slide_001")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.pid = start(self._serve, self.output)
        for _ in range(600):
            try:
                self.connect().close()
                break
            except OSError:
                time.sleep(0.05)
        return self

    def _serve(self) -> None:
        from caprmil.runs.run import Run
        from caprmil.viewer import Library, serve

        serve(Library(Run(self.corpus.run), device="cpu"), port=self.port)

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        wait(self.pid)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_SECONDS)

    def send(self, request: bytes) -> int:
        """Return the status of an answer; 0 if the connection was closed without one."""
        answer = b""
        with self.connect() as client:
            try:
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
                while b"\r\n" not in answer and (data := client.recv(4096)):
                    answer += data
            except TimeoutError:
                raise BrokenPromiseError(f"no answer to {request[:200]!r}") from None
            except OSError:
                pass
        words = answer.split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0

    def check(self) -> None:
        """Check that the viewer still answers, and that nothing was printed."""
        if self.send(b"GET /api/run HTTP/1.1\r\nHost: localhost\r\n\r\n") != 200:
            raise BrokenPromiseError(f"the viewer is gone: {self.output.read_text()[-300:]}")
        if "Traceback" in self.output.read_text():
            raise BrokenPromiseError(f"prints a traceback: {self.output.read_text()[-600:]}")


def hostile(random: Random, key: str) -> bytes:
    """Return a request that a browser would not send."""
    method, target = random.choice(METHODS), _target(random, key)
    body = b""
    headers = ["Host: localhost"] if random.random() < 0.9 else []
    if method == "POST" or random.random() < 0.1:
        body = _body(random)
        headers.append("Content-Type: application/json")
        if random.random() < 0.9:
            headers.append(f"Content-Length: {len(body) + random.choice((0, 0, 0, 0, -1, 5))}")
    headers += random.sample(HEADERS, random.choice((0, 0, 1, 2)))
    version = random.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9.9", ""))
    lines = [f"{method} {target} {version}", *headers, "Connection: close", "", ""]
    request = "\r\n".join(lines).encode("latin-1", "replace") + body
    return damage_bytes(request, random) if random.random() < 0.1 else request


def _target(random: Random, key: str) -> str:
    slide = f"/api/slides/{key}"
    odd = random.choice((*WORDS, "%00", "%2e%2e%2f" * 5, "..;/", "9" * 30, "-1", "1e3", "é", "%ff"))
    odd = odd if random.random() < 0.5 else quote(odd)
    numbers = [random.choice(("0", "1", "7", "99", "999999999", "9999999999", odd)) for _ in "zxy"]
    found = (
        *("/", f"/{odd}", f"/static/{odd}", "/static/../app.py", "/api/run", f"/api/{odd}"),
        *(slide, f"/api/slides/{odd}", f"{slide}/numbers", f"{slide}/regions", f"{slide}/{odd}"),
        f"{slide}/tiles/{numbers[0]}/{numbers[1]}_{numbers[2]}.jpg",
        f"{slide}/patches/{numbers[0]}.jpg?px={numbers[1]}",
        *(f"{slide}/gallery.jpg?v={odd}", f"{slide}/thumbnail.jpg", f"{slide}/predict"),
        *(f"http://evil.example{slide}", "*", f"{slide}?{odd}={odd}", f"{slide}//", "a" * 9000),
        *(f"{slide}/predict", f"{slide}/predict"),
    )
    return random.choice(found).replace(" ", "+").replace("\r", "").replace("\n", "")


def _body(random: Random) -> bytes:
    if random.random() < 0.2:
        return random.choice((b"[" * 50_000, b"{" * 9, b"\xff\xfe", b"9" * 5000, b"", b" " * 2**20))
    ranges: Any = [[random.choice((0, 1, 2, -1, 2**70)), random.choice((1, 3, 10**9))]]
    content: Any = {"without": random.choice((ranges, [], *VALUES))}
    if random.random() < 0.5:
        content["tokens"] = random.choice(([[0, 0, 0]], [[0, 0]], [[-1, 0, 99]], *VALUES))
    text = json.dumps(content)
    return damage(text.encode(), ".json", random) if random.random() < 0.5 else text.encode()


# Damaged runs

BODY = json.dumps({"without": [[0, 1]]}).encode()
TARGETS = ("/", "/api/run", "/api/slides", "{}", "{}/numbers", "{}/regions", "{}/patches/0.jpg")


def _damaged_run(
    corpus: Corpus, small: SmallRun, seed: Path, number: int
) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        from caprmil.errors import CaprmilError
        from caprmil.runs.run import Run
        from caprmil.viewer import Library, create
        from caprmil.viewer.library import identify

        random = Random(f"{seed.name}/{number}")
        path = folder / seed.name
        path.write_bytes(damage(seed.read_bytes(), seed.suffix, random))
        damaged = Readers(corpus).replaced(small.run, Damaged(path, seed, random))
        with quick_scoring():
            try:
                app = create(Library(Run(damaged), device="cpu"))
            except CaprmilError:
                return
            slide = f"/api/slides/{identify(small.slide)}"
            asked = [(each.format(slide), b"") for each in TARGETS]
            for target, body in (*asked, (f"{slide}/predict", BODY)):
                if (status := asyncio.run(_ask(app, target, body))) >= 500:
                    raise BrokenPromiseError(f"{status} for {target}")

    return run


async def _ask(app: Any, target: str, body: bytes = b"") -> int:
    """Return the status of a request in this process. An error in the viewer is raised here."""
    method, kind = "POST" if body else "GET", (b"content-type", b"application/json")
    scope = {"type": "http", "http_version": "1.1", "method": method, "scheme": "http"}
    scope |= {"path": target, "raw_path": target.encode(), "root_path": "", "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost"), kind], "client": ("127.0.0.1", 5)}
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app({**scope, "server": ("127.0.0.1", 8765)}, receive, send)
    return statuses[0]
