"""Access to the viewer, and the security headers of every response.

On a loopback address the Host header must be a loopback name. Otherwise a foreign web page could
reach the viewer under a name of its own that resolves to this machine (DNS rebinding). On any other
address the viewer requires a token.
"""

import ipaddress
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from caprmil.errors import RunError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})

HEADERS = {
    # frame-ancestors 'self': only a notebook behind the same proxy may show the page in a frame.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """Which requests are allowed: by the name of the host, or by a token."""

    hosts: Collection[str] | None = LOOPBACK  # None: any name, with a token
    token: str | None = None
    cookie: str = "caprmil"  # ports of one host share cookies, so each port has its own name


def access_rules(host: str, port: int, names: Collection[str] = ()) -> AccessRules:
    """Return the rules for an address: host names on a loopback address, else a new token.

    `names` are the host names of a proxy in front of the viewer.
    """
    if patterns := [name for name in names if "*" in name]:
        raise RunError(f"{patterns[0]} is not the name of a proxy. Pass --proxy-host without a *.")
    if is_loopback(host):
        return AccessRules(hosts=LOOPBACK | {name.lower() for name in (host, *names)})
    return AccessRules(hosts=None, token=secrets.token_urlsafe(24), cookie=f"caprmil_{port}")


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class AccessMiddleware:
    """Refuses requests that are not allowed, and adds the headers to every response."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        has_query_token = self._has_query_token(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
                if has_query_token:
                    headers.append("Set-Cookie", self._cookie())
            await send(message)

        refusal = await self._refusal(scope, has_query_token=has_query_token)
        if refusal is not None:
            status, reason = refusal
            response = JSONResponse({"reason": reason}, status)
            await response(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)

    async def _refusal(self, scope: Scope, *, has_query_token: bool) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return 400, "A request needs exactly one Host header."
        if self.rules.hosts is not None and not await is_trusted(scope, self.rules.hosts):
            return 421, (
                "This page is served for localhost only. Open it by that name. Behind a proxy, "
                "start the viewer with --proxy-host and the name of the proxy."
            )
        if not (has_query_token or self._has_cookie_token(headers)):
            return 403, "The token is missing. Open the whole address that `caprmil view` printed."
        if not _is_same_origin(scope, headers, hosts[0]):
            return (
                403,
                "The request came from another page. Only the viewer's own page may send it.",
            )
        return None

    def _has_query_token(self, scope: Scope) -> bool:
        if self.rules.token is None:
            return False
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return any(_is_equal(each, self.rules.token) for each in given)

    def _has_cookie_token(self, headers: Headers) -> bool:
        if self.rules.token is None:
            return True
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load("; ".join(headers.getlist("cookie")))
        except CookieError:
            return False
        given = cookies.get(self.rules.cookie)
        return given is not None and _is_equal(given.value, self.rules.token)

    def _cookie(self) -> str:
        # Without a path it is valid for the folder of the page, behind any prefix of a proxy.
        return f"{self.rules.cookie}={self.rules.token}; HttpOnly; SameSite=Strict"


async def is_trusted(scope: Scope, hosts: Collection[str]) -> bool:
    """Return whether Starlette's TrustedHostMiddleware lets a request pass.

    Only its decision is used: its response does not say what to do, and comes without our headers.
    """
    passed = False

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        nonlocal passed
        passed = True

    async def ignore(_: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    check = TrustedHostMiddleware(app, allowed_hosts=list(hosts), www_redirect=False)
    await check(scope, receive, ignore)
    return passed


def _is_same_origin(scope: Scope, headers: Headers, host: str) -> bool:
    """Return whether our own page sent a request, as far as the browser says.

    Any page may link to ours.
    """
    if scope["method"] in ("GET", "HEAD") and "/api/" not in scope["path"]:
        return True
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == host.strip().lower()
    except ValueError:
        return False


def _is_equal(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())
