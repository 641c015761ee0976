"""The viewer in a browser: a server in this process, and a page with its requests and errors."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from caprmil.viewer import Library, create
from caprmil.viewer.server import listen, make_server

READY = "body[data-state=ready]"

Open = Callable[..., "Tab"]


class Tab:
    """A page, its requests, and its errors."""

    def __init__(self, page: Any, base: str, shots: Path) -> None:
        self.page, self.base, self.shots = page, base, shots
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.pending = 0
        page.on("request", self._requested)
        page.on("requestfinished", lambda r: r.url.startswith("data:") or self._responded())
        page.on("pageerror", lambda problem: self.errors.append(str(problem)))
        page.on("requestfailed", self._failed)
        page.on("console", self._check_console)
        page.on("response", lambda r: self._check_status(r.status, r.url))

    def _requested(self, request: Any) -> None:
        if not request.url.startswith("data:"):
            self.requests.append(request.url)
            self.pending += 1

    def _responded(self) -> None:
        self.pending -= 1

    def _failed(self, request: Any) -> None:
        self._responded()
        if request.failure != "net::ERR_ABORTED":  # another slide was opened meanwhile
            self.errors.append(f"{request.url}: {request.failure}")

    def _check_console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _check_status(self, status: int, url: str) -> None:
        if status >= 400:
            self.errors.append(f"{status} {url}")

    def go(self, hash_: str = "") -> "Tab":
        self.page.goto(self.base + hash_)
        self.page.wait_for_selector(READY)
        self.settle()
        return self

    def settle(self) -> None:
        """Wait until no request is pending, and the address is written."""
        while True:
            before = len(self.requests)
            self.page.wait_for_timeout(300)
            if self.pending == 0 and len(self.requests) == before:
                return

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def text(self, id_: str) -> str:
        return str(self.page.inner_text(f"#{id_}"))

    @property
    def state(self) -> dict[str, str]:
        _, _, hash_ = self.page.url.partition("#")
        return dict(part.split("=", 1) for part in hash_.split("&") if part)

    @property
    def zoom(self) -> float:
        return float(self.state["v"].split(",")[2])

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point of the slide in the window, from the address."""
        centre_x, centre_y, zoom = map(float, self.state["v"].split(","))
        box = self.page.locator("#stage").bounding_box()
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        return middle[0] + (x - centre_x) * zoom, middle[1] + (y - centre_y) * zoom

    def draw(self, *points: tuple[float, float]) -> None:
        mouse = self.page.mouse
        mouse.move(*self.at(*points[0]))
        mouse.down()
        for point in (*points[1:], points[0]):
            mouse.move(*self.at(*point), steps=3)
        mouse.up()

    def pixels(self, name: str) -> Any:
        """Return the pixels of the stage, and save a screenshot of the page."""
        self.page.screenshot(path=self.shots / f"{name}.png")
        picture = self.page.locator("#stage").screenshot()
        return np.asarray(Image.open(BytesIO(picture)).convert("RGB")).astype(float)

    def wait(self, condition: str) -> None:
        self.page.wait_for_function(condition)

    def wait_for_slide(self, key: str) -> None:
        self.wait(f"() => location.hash.includes('{key}') && document.querySelector('{READY}')")

    def wait_for_prediction(self, text: str) -> None:
        self.wait(f"() => document.querySelector('#prediction').innerText.includes('{text}')")


@contextmanager
def serving(library: Library, second: Library | None = None) -> Iterator[str]:
    """Serve a library, and yield the address of the viewer. `second` is shown beside it."""
    with listen("127.0.0.1", None) as sock:
        running = make_server(create(library, second=second))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
        running.should_exit = True
        thread.join(timeout=20)


@contextmanager
def open_tabs(chromium: Any, address: str, shots: Path) -> Iterator[Open]:
    """Yield a function that opens pages. At the end, none of them may have an error."""
    tabs: list[Tab] = []
    contexts: list[Any] = []

    def make(width: int = 1280, height: int = 800, **options: Any) -> Tab:
        size = {"width": width, "height": height}
        context = chromium.new_context(viewport=size, reduced_motion="reduce", **options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        tabs.append(Tab(context.new_page(), address, shots))
        return tabs[-1]

    yield make
    errors = [line for tab in tabs for line in tab.errors]
    for context in contexts:
        context.close()
    assert errors == []
