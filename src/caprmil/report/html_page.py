"""HTML pages: each is one file with everything it needs, and it loads nothing from the network.

Pages are made from the templates in `templates`, which escape all text that is not `Markup`. A
content security policy in the page's head allows our own script and style only, and only pictures
that are in the file.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from caprmil.errors import count
from caprmil.report.text_format import percent, share, signed

EMPTY = Markup("")


@cache
def environment() -> Environment:
    """Return the settings of all templates; `count`, `percent`, ... are filters in them."""
    made = Environment(
        loader=PackageLoader("caprmil.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (count, percent, share, signed):
        made.filters[function.__name__] = function
    return made


def render(template: str, **values: object) -> Markup:
    """Return a template with its values filled in; every value must be given."""
    return Markup(environment().get_template(template).render(values))


def page(
    template: str,
    *,
    title: str,
    scripts: Iterable[str],
    facts: Mapping[str, Any] | None = None,
    data: bytes = b"",
    **values: object,
) -> str:
    """Return a whole page. Scripts find `facts` as JSON and `data` in base64, by these ids."""
    style, script = asset("report.css"), "\n".join([*scripts, asset("scrolling.js")])
    text = render(
        template,
        title=title,
        policy=_policy(script, style),
        style=_inline(style, "style"),
        script=_inline(script, "script"),
        facts=as_json(facts or {}),
        data=b64encode(data).decode("ascii"),
        **values,
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a file name may not be valid Unicode


def asset(name: str) -> str:
    """Return a script or style sheet of the reports."""
    return (files("caprmil.report") / "static" / name).read_text(encoding="utf-8")


def as_json(table: Mapping[str, Any]) -> Markup:
    """Return JSON for a script element. No name in it can end the element."""
    return htmlsafe_json_dumps(table, dumps=json.dumps, allow_nan=False, separators=(",", ":"))


def data_url(data: bytes, kind: str = "image/jpeg") -> str:
    """Return a picture as an address that holds it."""
    return f"data:{kind};base64,{b64encode(data).decode('ascii')}"


def _policy(script: str, style: str) -> str:
    """Return what a page may do: run this script and style, show pictures that are in it."""
    return (
        f"default-src 'none'; img-src data:; script-src '{digest(script)}'; "
        f"style-src '{digest(style)}'; base-uri 'none'; form-action 'none'"
    )


def digest(code: str) -> str:
    """Return the hash by which a policy allows a script or style."""
    return f"sha256-{b64encode(sha256(code.encode('utf-8')).digest()).decode('ascii')}"


def _inline(code: str, name: str) -> Markup:
    if f"</{name}" in code.lower():
        raise ValueError(f"Our own {name} would end its element.")
    return Markup(code)
