"""The hook of the site: pages that are made at build time, and links that leave the folder docs."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "website"), str(ROOT / "src")]

import command_reference  # noqa: E402
import notebook_pages  # noqa: E402
import recipe_page  # noqa: E402
import setting_reference  # noqa: E402
import site_links  # noqa: E402

SHIM = "https://unpkg.com/iframe-worker/shim"
"""A script of the theme, with which search works on pages that are opened from the disk."""

FOREIGN = re.compile(
    r"""<(?:script|img|iframe|link rel="(?:stylesheet|preconnect|preload)")[^>]*="https?://[^>]*>"""
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the addresses: pyproject.toml has them in one place."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    config.site_url = address["documentation"] or None
    config.repo_url = address["repository"] or None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made at build time."""
    missing = setting_reference.undocumented(ROOT / "src")
    if missing:
        raise PluginError(f"Settings without a meaning: {', '.join(missing)}")
    pages: dict[str, str | bytes] = {
        "commands.md": command_reference.page(),
        "settings.md": setting_reference.page(ROOT / "src"),
        "recipes.md": recipe_page.page(ROOT),
        **notebook_pages.pages(ROOT / "docs" / "notebooks"),
    }
    for source, name in site_links.COPIED.items():
        pages[name] = (ROOT / source).read_text(encoding="utf-8")
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to files of the repository at the pages that the site has of them."""
    return site_links.site_links(markdown, page.file.src_uri)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load nothing from another host: the script is in the folder `vendor`."""
    return _finish(output, _to_root(page.url), page.url)


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Do the same for pages that are not in the navigation, such as 404.html."""
    if not template_name.endswith(".html"):
        return output_content
    return _finish(output_content, "", template_name)


def _to_root(url: str) -> str:
    return "../" * url.count("/")


def _finish(output: str, root: str, name: str) -> str:
    """Replace the script of another host, and give the dialog of the search a name."""
    output = output.replace(SHIM, f"{root}vendor/iframe-worker.js")
    output = output.replace('role="dialog">', 'role="dialog" aria-label="Search">')
    foreign = FOREIGN.search(output)
    if foreign:
        raise PluginError(f"{name} loads something from another host: {foreign[0]}")
    return output
