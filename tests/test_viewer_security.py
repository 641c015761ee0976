"""Access to the viewer, and that no request can break it."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caprmil.errors import RunError
from caprmil.viewer import Library, create
from caprmil.viewer.security import HEADERS, AccessMiddleware, access_rules, is_loopback
from viewer_requests import BARE, FIRST, Reply, call, predict

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def app(library: Library) -> AccessMiddleware:
    return create(library)


# Access


@pytest.mark.parametrize(
    ("target", "method"),
    [
        *(("/", "GET"), ("/static/viewer.js", "GET"), ("/static/none", "GET"), ("/api/run", "GET")),
        *((f"/api/slides/{FIRST}", "GET"), (f"/api/slides/{FIRST}/numbers", "GET")),
        *((f"/api/slides/{FIRST}/tiles/0/0_0.jpg", "GET"), ("/nowhere", "GET"), ("/", "DELETE")),
        *((f"/api/slides/{FIRST}/predict", "POST"), (f"/api/slides/{FIRST}/predict", "GET")),
    ],
)
def test_every_response_has_the_headers(app: AccessMiddleware, target: str, method: str) -> None:
    for host in ("localhost", "evil.example"):
        reply = call(app, target, method, b"", ("host", host))
        for name, value in HEADERS.items():
            assert reply.headers[name.lower()] == value
        assert reply.headers["cache-control"]
        assert "server" not in reply.headers


def test_a_bug_is_reported_in_one_line_without_a_traceback(
    app: AccessMiddleware, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "explained", lambda _: {}["secret"])
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    path = f"/api/slides/{FIRST}"
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "root_path": ""}
    with pytest.raises(KeyError):  # it is raised again, for the terminal of the viewer
        asyncio.run(app({**scope, "headers": [(b"host", b"localhost")]}, receive, send))
    assert sent[0]["status"] == 500
    assert b"secret" not in sent[1]["body"]
    assert b"Traceback" not in sent[1]["body"]


@pytest.mark.parametrize(
    "problem",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")],
)
def test_a_slide_that_memory_cannot_hold_is_refused_in_one_line(
    app: AccessMiddleware,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
) -> None:
    def fail(*_: object) -> None:
        raise problem

    for name in ("explained", "regions", "tile", "thumbnail", "gallery", "patch"):
        monkeypatch.setattr(library, name, fail)
    for rest in ("", "/numbers", "/regions", "/tiles/0/0_0.jpg", "/thumbnail.jpg", "/gallery.jpg"):
        reply = call(app, f"/api/slides/{FIRST}{rest}")
        assert (reply.status, "free memory" in reply.json["reason"]) == (413, True)
    assert predict(app, FIRST, {"without": [[0, 1]]}).status == 413
    monkeypatch.undo()
    assert call(app, f"/api/slides/{FIRST}").status == 200  # the next request is answered


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:9"]
)
def test_loopback_names_are_allowed_at_any_port(app: AccessMiddleware, host: str) -> None:
    assert call(app, "/api/run", "GET", b"", ("host", host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::2]"),
        *("localhost:80@evil", "localhost:x", "[::1", "127.0.0.1, evil", "0.0.0.0"),
    ],
)
def test_other_names_are_refused(app: AccessMiddleware, host: str) -> None:
    assert call(app, "/", "GET", b"", ("host", host)).status == 421


def test_two_host_headers_are_refused(app: AccessMiddleware) -> None:
    two = (("host", "localhost"), ("host", "evil.example"))
    assert call(app, "/", "GET", b"", *two).status == 400


def test_the_name_of_a_proxy_can_be_allowed(library: Library) -> None:
    app = create(library, access_rules("127.0.0.1", 8765, ["Hub.example.org"]))
    assert call(app, "/api/run", "GET", b"", ("host", "hub.example.org:443")).status == 200
    assert call(app, "/api/run", "GET", b"", ("host", "evil.example")).status == 421


@pytest.mark.parametrize("name", ["*", "*.example.org"])
def test_a_pattern_is_not_the_name_of_a_proxy(name: str) -> None:
    with pytest.raises(RunError, match="--proxy-host without"):
        access_rules("127.0.0.1", 8765, [name])


def test_a_refusal_says_what_to_do(app: AccessMiddleware) -> None:
    reply = call(app, "/", "GET", b"", ("host", "evil.example"))
    assert "--proxy-host" in reply.json["reason"]


def test_any_loopback_address_is_allowed_as_its_own_name(library: Library) -> None:
    app = create(library, access_rules("127.0.0.2", 8765))
    assert call(app, "/api/run", "GET", b"", ("host", "127.0.0.2:8765")).status == 200
    assert call(app, "/api/run", "GET", b"", ("host", "127.0.0.3:8765")).status == 421


def test_other_addresses_require_a_token_once(library: Library) -> None:
    rules = access_rules("0.0.0.0", 8765)
    app = create(library, rules)
    host = ("host", "pathology.example:8765")
    assert rules.token is not None
    assert call(app, "/", "GET", b"", host).status == 403
    assert call(app, "/?token=wrong", "GET", b"", host).status == 403
    assert call(app, "/?token=%ff&token=", "GET", b"", host).status == 403
    allowed = call(app, f"/?token={rules.token}", "GET", b"", host)
    cookie = allowed.headers["set-cookie"]
    assert allowed.status == 200
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    mine = ("cookie", f"other=1; {cookie.partition(';')[0]}")
    again = call(app, "/api/run", "GET", b"", host, mine)
    assert again.status == 200
    assert "set-cookie" not in again.headers
    for cookies in (f"{rules.cookie}=wrong", f"{rules.cookie}=", "x=" + rules.token, ";;=;"):
        assert call(app, "/api/run", "GET", b"", host, ("cookie", cookies)).status == 403
    assert access_rules("0.0.0.0", 8765).token != rules.token


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (("origin", "http://127.0.0.1:8765"), True),
        (("origin", "http://evil.example"), False),
        (("origin", "null"), False),
        (("origin", "http://[bad"), False),
        (("sec-fetch-site", "same-origin"), True),
        (("sec-fetch-site", "cross-site"), False),
        (("sec-fetch-site", "same-site"), False),
    ],
)
def test_only_our_own_page_may_send_requests(
    app: AccessMiddleware, header: tuple[str, str], allowed: bool
) -> None:
    headers = (("content-type", "application/json"), header)
    reply = call(app, f"/api/slides/{FIRST}/predict", "POST", b'{"without": []}', *headers)
    assert reply.status == (200 if allowed else 403)
    assert call(app, "/", "GET", b"", header).status == 200  # any page may link to ours


def test_a_websocket_is_closed(app: AccessMiddleware) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(app({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True)),
        *(("localhost", True), ("0.0.0.0", False), ("192.168.1.4", False), ("::", False)),
        ("example.org", False),
    ],
)
def test_loopback_addresses_need_no_token(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    assert (access_rules(host, 1).token is None) is expected


# Malformed requests

MALFORMED = (
    *("..%2f..%2fetc%2fpasswd", "../../etc/passwd", "%2e%2e/%2e%2e", "....//", "%00", "a%00b"),
    *("%ff%fe", "%c0%ae%c0%ae", "☃", "%E2%98%83", "\\..\\..", "C:%5c", "file:///etc/passwd", "~"),
    *("-1", "-0", "+1", "1e9", "1.5", "NaN", "inf", "0x10", "٣", "１", "1_0", "9" * 10, "9" * 5000),
    *(
        "10" * 30,
        "null",
        "None",
        "[]",
        "{}",
        "'",
        '"',
        "<script>",
        "%0d%0aX: y",
        "*",
        "?",
        "#",
        " ",
    ),
    *(FIRST.upper(), FIRST + "0", FIRST[:-1], "slide_000", "..", ".", "", "/", "//", "%25%32%65"),
)
SHAPES = (
    *("/{}", "/static/{}", "/static/vendor/{}", "/api/{}", "/api/slides/{}", "/api/run/{}"),
    *("/api/slides/{}/numbers", "/api/slides/{}/tiles/0/0_0.jpg", "/api/slides/{}/predict"),
    *(f"/api/slides/{FIRST}/" + "{}", f"/api/slides/{FIRST}/tiles/" + "{}/0_0.jpg"),
    *(f"/api/slides/{FIRST}/tiles/0/" + "{}", f"/api/slides/{FIRST}/tiles/0/" + "{}_0.jpg"),
    *(f"/api/slides/{FIRST}/tiles/0/0_" + "{}.jpg", f"/api/slides/{FIRST}/patches/" + "{}.jpg"),
    *(f"/api/slides/{FIRST}/patches/" + "{}", f"/api/slides/{FIRST}/patches/0.jpg?px=" + "{}"),
)


def is_handled(reply: Reply) -> bool:
    if reply.status == 200:
        return True
    return 400 <= reply.status < 500 and (reply.body == b"" or bool(reply.json["reason"]))


@pytest.mark.parametrize("shape", SHAPES)
def test_malformed_paths_are_refused(app: AccessMiddleware, shape: str) -> None:
    for word in MALFORMED:
        reply = call(app, shape.format(word))
        assert is_handled(reply), (word, reply.status)
        if "patches/{}" in shape or "tiles" in shape or "static" in shape:
            assert b"root:" not in reply.body


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO", "HEAD"]
)
def test_other_methods_are_refused(app: AccessMiddleware, method: str) -> None:
    for target in ("/", "/api/run", "/api/slides", f"/api/slides/{FIRST}", "/static/viewer.js"):
        reply = call(app, target, method)
        assert reply.status == (200 if method == "HEAD" else 405)
    assert call(app, f"/api/slides/{FIRST}/predict", method).status in (405, 415)


words = st.one_of(
    st.sampled_from(MALFORMED),
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(str),
    st.text(max_size=20),
    st.sampled_from([FIRST, BARE, "api", "slides", "tiles", "numbers", "patches", "0", "0_0.jpg"]),
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(words, max_size=7), words, st.sampled_from(["GET", "POST", "HEAD"]), st.binary())
def test_any_request_gets_a_response(
    app: AccessMiddleware, parts: list[str], query: str, method: str, body: bytes
) -> None:
    path = "/".join(["", *parts]).replace("?", "%3f")
    target = f"{path}?px={query}&token={query}"
    safe = target.encode("utf-8", "surrogatepass").decode("latin-1")
    assert is_handled(call(app, safe, method, body, ("content-type", "application/json")))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=12,
    )
)
def test_any_json_gets_a_response(app: AccessMiddleware, body: object) -> None:
    assert is_handled(predict(app, FIRST, body))
    assert is_handled(predict(app, FIRST, {"without": body}))
