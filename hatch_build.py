"""Metadata that depend on the public address of the repository: project URLs and README links.

The address is in one place, `[tool.hatch.metadata.hooks.custom]` in pyproject.toml. While it is
empty, the package has no URLs, and the links of the README stay relative.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {"Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
RELATIVE = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)]+)\)")


class AddressHook(MetadataHookInterface):
    """Adds `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = str(self.config.get("repository", "")).rstrip("/")
        documentation = str(self.config.get("documentation", "")).rstrip("/")
        version = self.config.get("tag", "main")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository:
            text = absolute_links(text, repository, version)
            metadata["urls"] = {
                "Source": repository,
                "Issues": f"{repository}/issues",
                **{name: f"{repository}/blob/{version}/{path}" for name, path in PAGES.items()},
                **({"Documentation": documentation} if documentation else {}),
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute_links(text: str, repository: str, version: str) -> str:
    """Return Markdown with absolute links: `raw` for images, `blob` for pages."""

    def replace(link: re.Match[str]) -> str:
        image, title, path = link.groups()
        kind = "raw" if image else "blob"
        title = RELATIVE.sub(replace, title)  # a badge: an image in a link
        return f"{image}[{title}]({repository}/{kind}/{version}/{path})"

    return RELATIVE.sub(replace, text)
