"""The recipes that the package has, on one page."""

from pathlib import Path

HEAD = """# Recipes

A recipe has all settings of a run. What it leaves out has the default of the
[settings](settings.md). `--set train.epochs=5` changes one setting on the command line.
"""


def page(root: Path) -> str:
    """Return the page in Markdown, with a section for each recipe."""
    folders = [root / "src/caprmil/recipes", root / "recipes"]
    folder = next(folder for folder in folders if any(folder.glob("*.toml")))
    parts = [
        f"## {path.stem}\n\n```toml\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"
        for path in sorted(folder.glob("*.toml"))
    ]
    return "\n".join([HEAD, *parts])
