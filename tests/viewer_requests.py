"""Requests to the viewer in this process, and slides for its tests."""

import asyncio
import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyvips
import tifffile
from PIL import Image

from caprmil.viewer.library import identify
from caprmil.viewer.security import AccessMiddleware

FIRST, SECOND, BARE = (identify(f"slide_00{n}") for n in range(3))
HOST = ("host", "127.0.0.1:8765")


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def pixels(self) -> Any:
        return np.asarray(Image.open(BytesIO(self.body)).convert("RGB"))


def call(
    app: AccessMiddleware,
    target: str,
    method: str = "GET",
    body: bytes = b"",
    *headers: tuple[str, str],
) -> Reply:
    """Send a request as uvicorn does, but in this process, so that an error is raised here."""
    path, _, query = target.partition("?")
    given = headers if any(name == "host" for name, _ in headers) else (HOST, *headers)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 8765),
    }
    sent: list[Any] = []
    chunks = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(chunks, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    start = next(m for m in sent if m["type"] == "http.response.start")
    data = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    names = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
    return Reply(start["status"], names, data)


def predict(app: AccessMiddleware, key: str, body: object) -> Reply:
    data = json.dumps(body).encode()
    return call(
        app, f"/api/slides/{key}/predict", "POST", data, ("content-type", "application/json")
    )


def texture(width: int, height: int) -> Any:
    """Return waves that differ at every position."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 37) + np.sin(y / 61), np.cos(y / 43), np.sin((x + y) / 53)]
    return (128 + 45 * np.stack(waves, axis=-1)).astype(np.uint8)


def rounded_down(path: Path, image: Any) -> Path:
    """Write a pyramid whose sizes are rounded down, as libvips does."""
    whole = pyvips.Image.new_from_array(image).copy(xres=4000, yres=4000)
    whole.tiffsave(str(path), tile=True, tile_width=128, tile_height=128, pyramid=True)
    return path


def rounded_up(path: Path, image: Any) -> Path:
    """Write a pyramid of every second pixel, whose sizes are rounded up."""
    with tifffile.TiffWriter(path) as file:
        for level in range(4):
            small = np.ascontiguousarray(image[:: 2**level, :: 2**level])
            options: dict[str, Any] = {"photometric": "rgb", "tile": (128, 128), "metadata": None}
            file.write(small, subfiletype=int(level > 0), resolution=(40000, 40000), **options)
    return path
