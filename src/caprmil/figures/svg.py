"""SVG text of a figure, to be placed inside an HTML page.

The page decides the font and the colour of text and axes. The text holds no style sheet and no
style attribute, so a page whose content security policy forbids inline styles shows it as it is.
"""

import re
from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from caprmil.figures.style import BLACK, BLUE, GREY, GRID, settle

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

TITLE = "title: "  # begins the id of an artist that has a tooltip
SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"

# Black and grey take the colour of the page's text, so that they can be seen on a dark page too.
# The blue is dim there: a page may set a lighter one. White is only the edge of markers and bars.
PAGE_COLOURS = {
    BLUE.lower(): (f"var(--figure-blue, {BLUE})", None),
    BLACK.lower(): ("currentColor", None),
    GREY.lower(): ("currentColor", "0.65"),
    GRID.lower(): ("currentColor", "0.13"),
    "#ffffff": ("none", None),
}
ATTRIBUTES = frozenset(
    {"fill", "stroke", "opacity", "text-anchor"}
    | {f"{name}-opacity" for name in ("fill", "stroke")}
    | {f"stroke-{name}" for name in ("width", "linecap", "linejoin", "dasharray", "dashoffset")}
    | {f"font-{name}" for name in ("size", "weight", "style")}
)


def add_tooltip(artist: "Artist", text: str) -> None:
    """Give a line or marker a tooltip in the SVG."""
    artist.set_gid(TITLE + text)


def as_svg(figure: "Figure", *, alt: str) -> str:
    """Return a figure as the text of an <svg> element; `alt` describes it to a screen reader.

    Text stays text. The element has a viewBox and no size: the page sets its width. Ids are unique
    among figures.
    """
    from matplotlib import rc_context

    settle(figure)
    data = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "caprmil"}):
        figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})
    root = ET.fromstring(data.getvalue())
    prefix = sha256(data.getvalue()).hexdigest()[:8]
    used = set(re.findall(rb'(?:url\(#|href="#)([^)"]+)', data.getvalue()))
    ids = {name.decode(): f"f{prefix}-{number}" for number, name in enumerate(sorted(used))}
    page = ET.Element("svg", {"viewBox": root.get("viewBox", ""), "class": "figure"})
    page.attrib |= {"role": "img", "aria-label": alt, "stroke-linejoin": "round"}
    page.set("xmlns", SVG.strip("{}"))
    for child in root:
        page.extend(_simplify(child, ids))
    return ET.tostring(page, encoding="unicode")


def _simplify(element: ET.Element, ids: dict[str, str]) -> list[ET.Element]:
    """Return an element without styles, unused ids and empty groups."""
    tag = element.tag.removeprefix(SVG)
    if tag in ("metadata", "style"):
        return []
    found = ET.Element(tag)
    if tag in ("text", "tspan"):  # HTML joins spaces, unless they cannot be broken
        found.text = (element.text or "").replace("  ", " \N{NO-BREAK SPACE}")
    for name, value in element.attrib.items():
        if name == "id":
            if value.startswith(TITLE):
                ET.SubElement(found, "title").text = value.removeprefix(TITLE)
            elif value in ids:
                found.set("id", ids[value])
        elif name == "style":
            found.attrib.update(_attributes(value))
        elif name in ("href", f"{XLINK}href"):
            found.set("href", f"#{ids[value[1:]]}" if value[1:] in ids else value)
        elif name == "clip-path":
            found.set(name, f"url(#{ids[value[5:-1]]})")
        elif name == "d":
            found.set("d", _shorten(value))
        elif not value.startswith("rotate(-0 "):
            found.set(name, _shorten(value) if name in ("x", "y") else value)
    if tag == "text" and "fill" not in found.attrib:
        found.set("fill", "currentColor")
    for child in element:
        found.extend(_simplify(child, ids))
    if tag in ("g", "defs") and not found.attrib and (not len(found) or found[0].tag != "title"):
        return list(found) if tag == "g" else [found] * bool(len(found))
    return [found]


def _attributes(style: str) -> dict[str, str]:
    """Return a style as presentation attributes, without the font's family."""
    given = dict(part.strip().split(": ", 1) for part in style.split(";") if part.strip())
    if font := given.pop("font", ""):  # Matplotlib before 3.10 writes one property for all of it
        size = re.search(r"([\d.]+)px", font)
        given |= {"font-size": f"{size[1]}px"} if size else {}
        given |= {"font-weight": "bold"} if re.search(r"\b(bold|700)\b", font) else {}
    found = {name: value for name, value in given.items() if name in ATTRIBUTES}
    for name in ("fill", "stroke"):
        if found.get(name) in PAGE_COLOURS:
            found[name], opacity = PAGE_COLOURS[found[name]]
            if opacity is not None:
                found.setdefault(f"{name}-opacity", opacity)
    return found


def _shorten(text: str) -> str:
    """Return path data or a coordinate with two decimals."""
    rounded = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}", text)
    return " ".join(rounded.split())
