"""Security: who may ask, and the headers that every answer carries.

On a loopback address the Host header must be a loopback name, or a web page elsewhere could reach
us by a name of its own that leads here (DNS rebinding). On any other address a token is asked for.
"""

import ipaddress
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})

HEADERS = {
    # frame-ancestors 'self': a notebook behind the same proxy may show the page, nobody else.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, kw_only=True)
class Door:
    """Who is let in: by the name they call us, or by a token."""

    names: Collection[str] | None = LOOPBACK  # None: any name, since a token is asked for
    token: str | None = None
    cookie: str = "caprmil"  # ports share cookies, so each has a name of its own


def door(host: str, port: int, names: Collection[str] = ()) -> Door:
    """Return the door for an address: by name on a loopback one, elsewhere with a new token.

    `names` are what a proxy in front is called by.
    """
    if is_loopback(host):
        return Door(names=LOOPBACK | {name.lower() for name in (host, *names)})
    return Door(names=None, token=secrets.token_urlsafe(24), cookie=f"caprmil_{port}")


def is_loopback(host: str) -> bool:
    """Tell whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Stands before the application: refuses who may not ask, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        bringing = self._token_in_query(scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                own.update(HEADERS)
                own.setdefault("Cache-Control", "no-store")
                if bringing:
                    own.append("Set-Cookie", self._as_cookie())
            await send(message)

        refused = self._refuse(scope, headers, bringing=bringing)
        if refused is not None:
            status, reason = refused
            await JSONResponse({"reason": reason}, status)(scope, receive, answer)
            return
        await self.app(scope, receive, answer)

    def _refuse(self, scope: Scope, headers: Headers, *, bringing: bool) -> tuple[int, str] | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return 400, "A request has one Host header."
        name = _name(hosts[0])
        if self.door.names is not None and name not in self.door.names:
            return 421, (
                "This page answers to localhost only. Open it by that name; behind a proxy, start "
                "it with --proxy-host and the proxy's name."
            )
        if not (bringing or self._token_in_cookie(headers)):
            return 403, "A token is missing. Open the whole address that `caprmil view` printed."
        if not _own(scope, headers, hosts[0]):
            return 403, "Another page asked. Only the viewer's own page may."
        return None

    def _token_in_query(self, scope: Scope) -> bool:
        if self.door.token is None:
            return False
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return any(_same(each, self.door.token) for each in given)

    def _token_in_cookie(self, headers: Headers) -> bool:
        if self.door.token is None:
            return True
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load("; ".join(headers.getlist("cookie")))
        except CookieError:
            return False
        given = jar.get(self.door.cookie)
        return given is not None and _same(given.value, self.door.token)

    def _as_cookie(self) -> str:
        # Without a path it is kept for the folder of the page, which is right behind any prefix.
        return f"{self.door.cookie}={self.door.token}; HttpOnly; SameSite=Strict"


def _name(host: str) -> str:
    """Return the name of a Host header without its port, or nothing if it is none."""
    host = host.strip().lower()
    end = host.find("]") + 1 if host.startswith("[") else host.find(":")
    name, port = (host, "") if end < 1 else (host[:end], host[end:])
    return name if port == "" or (port[1:].isascii() and port[1:].isdigit()) else ""


def _own(scope: Scope, headers: Headers, host: str) -> bool:
    """Tell whether our own page asks, as far as a browser says. Any page may link to ours."""
    if scope["method"] in ("GET", "HEAD") and not scope["path"].startswith("/api/"):
        return True
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == host.strip().lower()
    except ValueError:
        return False


def _same(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())
