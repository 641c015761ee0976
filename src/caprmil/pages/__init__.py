"""Pages: what report and viewer share in the browser, the numbers of a case and their painting."""

from importlib.resources import files

from caprmil.pages.numbers import Numbers, pack

__all__ = ["Numbers", "asset", "pack"]


def asset(name: str) -> str:
    """Return a script or style sheet that pages share."""
    return (files("caprmil.pages") / "static" / name).read_text(encoding="utf-8")
