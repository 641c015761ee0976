"""The parts of the documentation site that need none of its packages."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from caprmil.models import MODELS, POOLS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def website(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "website")


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.usefixtures("website")
def test_every_setting_of_a_model_or_pool_has_a_meaning_in_the_reference() -> None:
    known = module("model_settings")
    used = set()
    for kind in (*MODELS.values(), *POOLS.values()):
        if not kind.__module__.startswith("caprmil."):
            continue
        for each in inspect.signature(kind).parameters.values():
            if each.kind is each.KEYWORD_ONLY:
                assert known.meaning(kind.__name__, each.name), f"{kind.__name__}.{each.name}"
                used |= {each.name, f"{kind.__name__}.{each.name}"}
    assert set(known.MEANINGS) <= used


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("start.md", "slides.md#tissue", "slides.md#tissue"),
        ("start.md", "../CONTRIBUTING.md", "contributing.md"),
        ("start.md", "../recipes/abmil.toml", "recipes.md#abmil"),
        ("notebooks/a.md", "../learning.md", "../learning.md"),
        ("notebooks/a.md", "b.md", "b.md"),
        ("notebooks/a.md", "../../CHANGELOG.md#x", "../changelog.md#x"),
        ("contributing.md", "docs/slides.md", "slides.md"),
        ("contributing.md", "RELEASING.md", "releasing.md"),
        ("changelog.md", "recipes/abmil.toml", "recipes.md#abmil"),
        ("start.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("start.md", "#there", "#there"),
        ("contributing.md", "pyproject.toml", "pyproject.toml"),
    ],
)
@pytest.mark.usefixtures("website")
def test_links_of_a_page_point_at_the_pages_of_the_site(
    page: str, link: str, expected: str
) -> None:
    assert module("site_links").site_links(f"[x]({link})", page) == f"[x]({expected})"


def test_a_warning_of_the_site_is_an_error() -> None:
    """The option --quiet of MkDocs hides warnings from its strict mode."""
    (line,) = re.findall(r"^.*mkdocs build.*$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "quiet" not in line
    assert re.search(r"^strict: true$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
