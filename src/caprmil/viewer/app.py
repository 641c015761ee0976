"""The application: a page, and what it asks for. Read-only; every answer is of a known slide."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from caprmil.errors import CaprmilError
from caprmil.explain import browser as pages
from caprmil.viewer.library import Gone, Library
from caprmil.viewer.listing import describe_run, list_slides
from caprmil.viewer.security import Door, Guard

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

MOST_BYTES = 2**20  # of a question
SIZES = (16, 1024)  # pixels on a side of a patch
FOREVER = "private, max-age=86400, immutable"  # of what has its version in its address

SCRIPTS = (
    *("viewer.js", "stage.js", "list.js", "maps.js", "answer.js", "patches.js", "keys.js"),
    *("link.js", "words.js", "dom.js", "paint.js", "openseadragon.min.js"),
)
STATIC = {"viewer.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}


def create(library: Library, door: Door | None = None) -> Guard:
    """Return the viewer of a library as an ASGI application."""
    routes = Routes(library)
    app = Starlette(
        routes=routes.all(),
        exception_handlers={
            HTTPException: _refuse,
            Gone: _gone,
            CaprmilError: _damaged,
            OSError: _damaged,
            Exception: _mistake,
        },
        lifespan=routes.lifespan,
    )
    app.router.redirect_slashes = False
    return Guard(app, door or Door())


class Routes:
    """What can be asked. Work is done in threads: few for models, which use all cores anyway."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.thinking = ThreadPoolExecutor(2, "caprmil-explain")
        self.reading = ThreadPoolExecutor(4, "caprmil-tiles")
        self.leafing = ThreadPoolExecutor(2, "caprmil-pictures")  # they never keep a tile waiting
        self.slides = list_slides(library)
        self.static = {name: _read(name) for name in STATIC}
        self.page = _read("index.html")

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        for pool in (self.thinking, self.reading, self.leafing):
            pool.shutdown(wait=False, cancel_futures=True)

    def all(self) -> list[Route]:
        one = "/api/slides/{id}"
        return [
            Route("/", self.index),
            Route("/static/{name}", self.asset),
            Route("/api/run", self.about),
            Route("/api/slides", self.listing),
            Route(one, self.facts),
            Route(one + "/numbers", self.numbers),
            Route(one + "/tiles/{z}/{place}", self.tile),
            Route(one + "/patches/{row}", self.patch),
            Route(one + "/gallery.jpg", self.gallery),
            Route(one + "/thumbnail.jpg", self.thumbnail),
            Route(one + "/ask", self.ask, methods=["POST"]),
        ]

    async def index(self, _: Request) -> Response:
        return Response(self.page, media_type="text/html", headers={"Cache-Control": "no-cache"})

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.static:
            raise HTTPException(404, "There is no such file.")
        headers = {"Cache-Control": "no-cache"}  # a new version must not meet an old script
        return Response(self.static[name], media_type=STATIC[name], headers=headers)

    async def about(self, _: Request) -> Response:
        return _json(describe_run(self.library.run))

    async def listing(self, _: Request) -> Response:
        return _json({"slides": self.slides})

    async def facts(self, request: Request) -> Response:
        told = await _in(self.thinking, self.library.told, self._id(request))
        return _json(told.facts)

    async def numbers(self, request: Request) -> Response:
        told = await _in(self.thinking, self.library.told, self._id(request))
        tag = f'W/"{told.version}"'
        headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Accept-Encoding"}
        if tag in [each.strip() for each in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        if _takes_gzip(request.headers.get("accept-encoding", "")):
            headers["Content-Encoding"] = "gzip"
        data = told.packed if "Content-Encoding" in headers else told.data
        return Response(data, media_type="application/octet-stream", headers=headers)

    async def tile(self, request: Request) -> Response:
        key = self._id(request)
        match = re.fullmatch(r"([0-9]{1,9})_([0-9]{1,9})\.jpg", request.path_params["place"])
        if match is None:
            raise HTTPException(404, "A tile is called x_y.jpg.")
        zoom = _whole(request.path_params["z"], "A zoom")
        x, y = (int(part) for part in match.groups())
        data = await _in(self.reading, self.library.tile, key, zoom, x, y)
        return _picture(data, request, "The slide has no tile there.")

    async def patch(self, request: Request) -> Response:
        key = self._id(request)
        match = re.fullmatch(r"([0-9]{1,9})\.jpg", request.path_params["row"])
        if match is None:
            raise HTTPException(404, "A patch is called by its row, as in 12.jpg.")
        px = _whole(request.query_params.get("px", "224"), "px", status=400)
        if not SIZES[0] <= px <= SIZES[1]:
            raise HTTPException(400, f"px lies between {SIZES[0]} and {SIZES[1]}.")
        data = await _in(self.reading, self.library.patch, key, int(match[1]), px)
        return _picture(data, request, "The slide has no such patch.")

    async def gallery(self, request: Request) -> Response:
        data = await _in(self.leafing, self.library.gallery, self._id(request))
        return _picture(data, request)

    async def thumbnail(self, request: Request) -> Response:
        data = await _in(self.leafing, self.library.thumbnail, self._id(request))
        return _picture(data, request)

    async def ask(self, request: Request) -> Response:
        key = self._id(request)
        question = await _question(request)
        told = await _in(self.thinking, self.library.told, key)
        without = rows_of(question, told.facts["patches"])
        return _json(await _in(self.thinking, self.library.ask, key, without))

    def _id(self, request: Request) -> str:
        key: str = request.path_params["id"]
        if key not in self.library.entries:
            raise HTTPException(404, "There is no slide of that id.")
        return key


def rows_of(question: object, n: int) -> NDArray[np.bool_]:
    """Return which of n patches a question leaves out: {"without": [[first, end], ...]}."""
    spans = question.get("without") if isinstance(question, dict) else None
    if not isinstance(spans, list):
        raise HTTPException(400, 'Ask with {"without": [[first row, row after the last], ...]}.')
    for span in spans:
        whole = isinstance(span, list) and [type(edge) for edge in span] == [int, int]
        if not whole or not 0 <= span[0] < span[1] <= n:
            raise HTTPException(400, f"A range is two whole numbers in order, from 0 to {n}.")
    edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
    steps = np.bincount(edges[:, 0], minlength=n + 1) - np.bincount(edges[:, 1], minlength=n + 1)
    out = steps.cumsum()[:n] > 0  # ranges may overlap as they like, at no cost
    if out.all():
        raise HTTPException(400, "Nothing would be left of the slide. Leave one patch in.")
    return out


async def _question(request: Request) -> object:
    """Return the JSON of a request, if it is not too long and says what it is."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "Send JSON, with Content-Type: application/json.")
    said = request.headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", said):
        raise HTTPException(400, "Content-Length is no whole number.")
    too_long = HTTPException(413, f"A question has at most {MOST_BYTES:,} bytes.")
    if int(said) > MOST_BYTES:
        raise too_long
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                raise too_long
        return json.loads(body.decode("utf-8"))
    except ClientDisconnect:
        raise HTTPException(400, "The question broke off.") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "That is no JSON.") from None


async def _in(pool: ThreadPoolExecutor, work: Callable[..., T], *words: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *words))


def _whole(text: str, what: str, *, status: int = 404) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise HTTPException(status, f"{what} is a whole number.")
    return int(text)


def _takes_gzip(accepted: str) -> bool:
    wanted = [part.replace(" ", "").lower() for part in accepted.split(",")]
    return any(
        part.split(";")[0] == "gzip" and not re.search(r";q=0(\.0*)?$", part) for part in wanted
    )


def _picture(data: bytes | None, request: Request, absent: str = "") -> Response:
    if data is None:
        raise HTTPException(404, absent)
    headers = {"Cache-Control": FOREVER} if request.query_params.get("v") else None
    return Response(data, media_type="image/jpeg", headers=headers)


def _json(table: Mapping[str, Any], status: int = 200) -> Response:
    return JSONResponse(_plain(table), status)


def _plain(value: Any) -> Any:
    """Return a table without NaN and infinity, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(name: str) -> bytes:
    if name == "paint.js":
        return pages.asset(name).encode()
    folder = files("caprmil.viewer") / "static"
    return (
        folder / "vendor" / name if name.startswith("openseadragon") else folder / name
    ).read_bytes()


async def _refuse(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    return _json({"reason": problem.detail}, problem.status_code)


async def _gone(_: Request, problem: Exception) -> Response:
    return _json({"reason": _line(problem)}, 410)


async def _damaged(_: Request, problem: Exception) -> Response:
    return _json({"reason": _line(problem)}, 409)


async def _mistake(_: Request, problem: Exception) -> Response:
    said = f"{type(problem).__name__}: the viewer made a mistake. Its window says which."
    return _json({"reason": said}, 500)


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__
