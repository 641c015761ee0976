"""The web application: a page and its requests. It is read-only, and serves known slides only."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from caprmil.errors import CaprmilError, is_out_of_memory
from caprmil.explain import browser as pages
from caprmil.viewer.library import GoneError, Library
from caprmil.viewer.security import AccessMiddleware, AccessRules
from caprmil.viewer.slide_list import describe_run, list_slides

T = TypeVar("T")

MAX_BODY = 2**20  # bytes of a request
BODY_SECONDS = 60.0  # for the body of a request to arrive
PATCH_PX = (16, 1024)  # smallest and largest side of a patch
COMPRESSION = 5  # of 9: higher levels are slower and hardly smaller
TOO_LARGE = "This is too large for the free memory of the machine that runs the viewer."
IMMUTABLE = "private, max-age=86400, immutable"  # for addresses that hold a version

SCRIPTS = (
    *("viewer.js", "stage.js", "slide_list.js", "maps.js", "patches.js", "prediction_panel.js"),
    *("region_list.js", "patient_slides.js"),
    *("parts.js", "class_parts.js", "grade_parts.js", "label_parts.js", "several_parts.js"),
    *("survival_parts.js", "value_parts.js", "named_cells.js"),
    *("side_by_side.js", "pane.js"),
    *("keyboard.js", "url_state.js", "layer_text.js", "dom.js", "paint.js"),
    "openseadragon.min.js",
)
STYLES = ("viewer.css", "side_by_side.css")
STATIC = {**dict.fromkeys(STYLES, "text/css"), **dict.fromkeys(SCRIPTS, "text/javascript")}


def create(
    library: Library, rules: AccessRules | None = None, *, second: Library | None = None
) -> AccessMiddleware:
    """Return the viewer of a library as an ASGI application.

    `second` is another run, to show side by side with the first one.
    """
    beside = None if second is None else Routes(second)
    routes = Routes(library, second=second)
    app = Starlette(
        routes=[*routes.all(), *([Mount("/second", routes=beside.all())] if beside else [])],
        middleware=[Middleware(Compression, compresslevel=COMPRESSION)],
        exception_handlers={
            HTTPException: _refused,
            GoneError: _gone,
            CaprmilError: _damaged,
            OSError: _damaged,
            MemoryError: _too_large,
            Exception: _bug,
        },
        lifespan=partial(_lifespan, [routes, *([beside] if beside else [])]),
    )
    app.router.redirect_slashes = False
    return AccessMiddleware(app, rules or AccessRules())


class Compression(GZipMiddleware):
    """Starlette's compression, which would also compress for a client that sends gzip;q=0."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = scope["type"] == "http" and re.search(
            r"gzip\s*;\s*q=0(\.0*)?\s*(,|$)", Headers(scope=scope).get("accept-encoding", "")
        )
        await (self.app if refused else super().__call__)(scope, receive, send)


class Routes:
    """The requests of the page. The work is done in threads."""

    def __init__(self, library: Library, *, second: Library | None = None) -> None:
        self.library, self.second = library, second
        self.models = ThreadPoolExecutor(2, "caprmil-models")  # a model uses all cores anyway
        self.tiles = ThreadPoolExecutor(4, "caprmil-tiles")
        self.pictures = ThreadPoolExecutor(2, "caprmil-pictures")  # so that no tile waits for them
        self.slides = list_slides(library)
        self.static = {name: _read(name) for name in STATIC}
        self.pages = {name: _read(f"{name}.html") for name in ("index", "side_by_side")}

    def stop(self) -> None:
        for pool in (self.models, self.tiles, self.pictures):
            pool.shutdown(wait=False, cancel_futures=True)

    def all(self) -> list[Route]:
        slide = "/api/slides/{id}"
        return [
            Route("/", self.index_page),
            Route("/compare", self.side_by_side_page),
            Route("/static/{name}", self.static_file),
            Route("/api/run", self.run),
            Route("/api/slides", self.slide_list),
            Route(slide, self.facts),
            Route(slide + "/numbers", self.numbers),
            Route(slide + "/regions", self.regions),
            Route(slide + "/tiles/{zoom}/{name}", self.tile),
            Route(slide + "/patches/{name}", self.patch),
            Route(slide + "/gallery.jpg", self.gallery),
            Route(slide + "/thumbnail.jpg", self.thumbnail),
            Route(slide + "/predict", self.predict, methods=["POST"]),
        ]

    async def index_page(self, _: Request) -> Response:
        return _html(self.pages["index"])

    async def side_by_side_page(self, _: Request) -> Response:
        return _html(self.pages["side_by_side"])

    async def static_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.static:
            raise HTTPException(404, "There is no such file.")
        headers = {"Cache-Control": "no-cache"}  # an old script must not meet a new version
        return Response(self.static[name], media_type=STATIC[name], headers=headers)

    async def run(self, _: Request) -> Response:
        beside = self.second.run.folder.resolve().name if self.second else None
        return _json({**describe_run(self.library.run), "second": beside})

    async def slide_list(self, _: Request) -> Response:
        return _json({"slides": self.slides})

    async def facts(self, request: Request) -> Response:
        explained = await _in(self.models, self.library.explained, self._id(request))
        return _json(explained.facts)

    async def numbers(self, request: Request) -> Response:
        explained = await _in(self.models, self.library.explained, self._id(request))
        tag = f'W/"{explained.version}"'
        headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
        known = request.headers.get("if-none-match", "").split(",")
        if tag in [each.strip() for each in known]:
            return Response(status_code=304, headers={**headers, "Vary": "Accept-Encoding"})
        return Response(explained.data, media_type="application/octet-stream", headers=headers)

    async def regions(self, request: Request) -> Response:
        return _json(await _in(self.models, self.library.regions, self._id(request)))

    async def tile(self, request: Request) -> Response:
        key = self._id(request)
        match = re.fullmatch(r"([0-9]{1,9})_([0-9]{1,9})\.jpg", request.path_params["name"])
        if match is None:
            raise HTTPException(404, "The name of a tile is x_y.jpg.")
        zoom = _integer(request.path_params["zoom"], "The zoom")
        x, y = (int(part) for part in match.groups())
        data = await _in(self.tiles, self.library.tile, key, zoom, x, y)
        return _picture(data, request, "The slide has no such tile.")

    async def patch(self, request: Request) -> Response:
        key = self._id(request)
        match = re.fullmatch(r"([0-9]{1,9})\.jpg", request.path_params["name"])
        if match is None:
            raise HTTPException(404, "The name of a patch is its row, such as 12.jpg.")
        px = _integer(request.query_params.get("px", "224"), "px", status=400)
        if not PATCH_PX[0] <= px <= PATCH_PX[1]:
            raise HTTPException(400, f"px must be between {PATCH_PX[0]} and {PATCH_PX[1]}.")
        data = await _in(self.tiles, self.library.patch, key, int(match[1]), px)
        return _picture(data, request, "The slide has no such patch.")

    async def gallery(self, request: Request) -> Response:
        data = await _in(self.pictures, self.library.gallery, self._id(request))
        return _picture(data, request)

    async def thumbnail(self, request: Request) -> Response:
        data = await _in(self.pictures, self.library.thumbnail, self._id(request))
        return _picture(data, request)

    async def predict(self, request: Request) -> Response:
        key = self._id(request)
        body = await _read_json(request)
        explained = await _in(self.models, self.library.explained, key)
        removed = removed_rows(body, explained.facts["patches"])
        tokens = removed_tokens(body, explained.facts["tokens"])
        return _json(await _in(self.models, self.library.predict_without, key, removed, tokens))

    def _id(self, request: Request) -> str:
        key: str = request.path_params["id"]
        if key not in self.library.entries:
            raise HTTPException(404, "There is no slide with that id.")
        return key


@asynccontextmanager
async def _lifespan(routes: Sequence[Routes], _: Starlette) -> AsyncIterator[None]:
    yield
    for each in routes:
        each.stop()


def removed_rows(body: object, n: int) -> NDArray[np.bool_]:
    """Return which of n patches a request removes: {"without": [[first, end], ...]}."""
    ranges = body.get("without") if isinstance(body, dict) else None
    if not isinstance(ranges, list):
        raise HTTPException(400, 'Send {"without": [[first row, row after the last], ...]}.')
    for each in ranges:
        integers = isinstance(each, list) and [type(end) for end in each] == [int, int]
        if not integers or not 0 <= each[0] < each[1] <= n:
            raise HTTPException(400, f"A range is two integers in order, from 0 to {n}.")
    ends = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    steps = np.bincount(ends[:, 0], minlength=n + 1) - np.bincount(ends[:, 1], minlength=n + 1)
    removed = steps.cumsum()[:n] > 0  # any number of overlapping ranges costs the same
    if removed.all():
        raise HTTPException(400, "No patch would be left of the slide. Keep at least one.")
    return removed


def removed_tokens(body: object, tokens: Mapping[str, Any] | None) -> NDArray[np.bool_] | None:
    """Return which tokens a request removes: {"tokens": [[block, head, token], ...]}, from 0."""
    given = body.get("tokens", []) if isinstance(body, dict) else []
    if given == []:
        return None
    if tokens is None:
        raise HTTPException(400, "The model of this slide has no tokens.")
    shape = tuple(tokens[name] for name in ("blocks", "heads", "tokens"))
    removed = np.zeros(shape, dtype=bool)
    refused = HTTPException(400, f"A token is [block, head, token], each below {shape}.")
    if not isinstance(given, list):
        raise refused
    for each in given:
        if not isinstance(each, list) or [type(number) for number in each] != [int] * 3:
            raise refused
        if not all(0 <= number < size for number, size in zip(each, shape, strict=True)):
            raise refused
        removed[tuple(each)] = True
    return removed


async def _read_json(request: Request) -> object:
    """Return the JSON of a request, unless it is too long or of another type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "Send JSON, with Content-Type: application/json.")
    length = request.headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", length):
        raise HTTPException(400, "Content-Length is not a whole number.")
    too_long = HTTPException(413, f"A request may have at most {MAX_BODY:,} bytes.")
    if int(length) > MAX_BODY:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise too_long
        return json.loads(body.decode("utf-8"))
    except TimeoutError:
        raise HTTPException(408, "The request took too long to arrive.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The request is incomplete.") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "The request is not valid JSON.") from None


async def _in(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: object) -> T:
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *arguments))
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
    raise HTTPException(413, TOO_LARGE)  # here, without the error and all that it refers to


def _integer(text: str, what: str, *, status: int = 404) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise HTTPException(status, f"{what} must be a whole number.")
    return int(text)


def _picture(data: bytes | None, request: Request, missing: str = "") -> Response:
    if data is None:
        raise HTTPException(404, missing)
    headers = {"Cache-Control": IMMUTABLE} if request.query_params.get("v") else None
    return Response(data, media_type="image/jpeg", headers=headers)


def _html(page: bytes) -> Response:
    return Response(page, media_type="text/html", headers={"Cache-Control": "no-cache"})


def _json(table: Mapping[str, Any], status: int = 200) -> Response:
    return JSONResponse(_finite(table), status)


def _finite(value: Any) -> Any:
    """Return a value with null for NaN and infinity, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(name: str) -> bytes:
    if name == "paint.js":
        return pages.asset(name).encode()
    folder = files("caprmil.viewer") / "static"
    return (
        folder / "vendor" / name if name.startswith("openseadragon") else folder / name
    ).read_bytes()


async def _refused(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    return _json({"reason": problem.detail}, problem.status_code)


async def _gone(_: Request, problem: Exception) -> Response:
    return _json({"reason": _line(problem)}, 410)


async def _damaged(_: Request, problem: Exception) -> Response:
    return _json({"reason": _line(problem)}, 409)


async def _too_large(_: Request, _problem: Exception) -> Response:
    return _json({"reason": TOO_LARGE}, 413)


async def _bug(_: Request, problem: Exception) -> Response:
    reason = f"Error in the viewer: {type(problem).__name__}. See the terminal of `caprmil view`."
    return _json({"reason": reason}, 500)


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__
