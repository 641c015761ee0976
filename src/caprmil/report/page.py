"""A page: one HTML file with all that it needs in it, and nothing that reaches out of it.

Text becomes part of a page through `tag` and `fill` alone, and these escape whatever is not marked
as `Html`. A policy in the page's head lets only our own script and style run, and only pictures
that are in the file load.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from hashlib import sha256
from html import escape as escaped
from importlib.resources import files
from string import Template
from typing import Any


class Html(str):
    """Text that is HTML already. Any other text is escaped on its way into a page."""

    __slots__ = ()


EMPTY = Html("")
VOID = frozenset({"br", "img", "input", "hr"})


def text(value: object) -> Html:
    """Return a value as HTML; a file's name may hold what is no Unicode, too."""
    if isinstance(value, Html):
        return value
    if value is None:
        return EMPTY
    return Html(escaped(str(value).encode("utf-8", "replace").decode("utf-8")))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """Return an element. Attributes: class_ is class, data_row is data-row; None is left out."""
    said = []
    for key, value in attributes.items():
        word = key.rstrip("_").replace("_", "-")
        if value is True:
            said.append(f" {word}")
        elif value is not None and value is not False:
            said.append(f' {word}="{text(value)}"')
    opening = f"<{name}{''.join(said)}>"
    if name in VOID:
        return Html(opening)
    return Html(f"{opening}{join(children)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(text(between).join(text(part) for part in parts))


def fill(template: str, **parts: object) -> Html:
    """Return one of our templates with its places filled; every place must be."""
    own = {name: text(part) for name, part in parts.items()}
    return Html(Template(asset(template)).substitute(own))


def asset(name: str) -> str:
    """Return a template, script or style sheet of the reports."""
    return (files("caprmil.report") / "static" / name).read_text(encoding="utf-8")


def page(
    title: str,
    body: Html,
    *,
    scripts: Iterable[str],
    facts: Mapping[str, Any] | None = None,
    data: bytes = b"",
) -> str:
    """Return a whole page. Scripts find `facts` as JSON and `data` in base64, by these ids."""
    style, code = asset("report.css"), "\n".join(scripts)
    return fill(
        "page.html",
        title=title,
        policy=_policy(code, style),
        style=_inside(style, "style"),
        body=body,
        facts=as_json(facts or {}),
        data=Html(b64encode(data).decode("ascii")),
        script=_inside(code, "script"),
    )


def as_json(table: Mapping[str, Any]) -> Html:
    """Return JSON that no name in it can end: `<`, `>` and `&` are written as escapes."""
    words = json.dumps(table, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        words = words.replace(sign, f"\\u{ord(sign):04x}")
    return Html(words)


def data_url(data: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{b64encode(data).decode('ascii')}"


def _policy(script: str, style: str) -> str:
    """Return what a page may do: run this script and style, show pictures it brought along."""
    return (
        f"default-src 'none'; img-src data:; script-src '{_digest(script)}'; "
        f"style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    )


def _digest(code: str) -> str:
    return f"sha256-{b64encode(sha256(code.encode('utf-8')).digest()).decode('ascii')}"


def _inside(code: str, name: str) -> Html:
    if f"</{name}" in code.lower():
        raise ValueError(f"Our own {name} would end itself.")
    return Html(code)
