"""Links of pages: those to files of the repository point at the pages that the site has of them."""

import re
from posixpath import dirname, join, normpath, relpath

COPIED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "RELEASING.md": "releasing.md",
}
"""Pages of the repository that are pages of the site too."""

LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)\s]+)\)")
RECIPE = re.compile(r"recipes/([\w-]+)\.toml")


def site_links(markdown: str, page: str) -> str:
    """Return a page with links as the site needs them. `page` is its path in the site."""
    sources = {name: source for source, name in COPIED.items()}
    folder = dirname(sources.get(page, f"docs/{page}"))

    def replace(link: re.Match[str]) -> str:
        path, mark, anchor = link[1].partition("#")
        file = normpath(join(folder, path))  # in the repository
        if recipe := RECIPE.fullmatch(file):
            target, mark, anchor = "recipes.md", "#", recipe[1]
        elif file in COPIED:
            target = COPIED[file]
        elif file.startswith("docs/"):
            target = file.removeprefix("docs/")
        else:
            return link[0]
        return f"]({relpath(target, dirname(page) or '.')}{mark}{anchor})"

    return LINK.sub(replace, markdown)
