"""Executed notebooks as pages: their Markdown, code, and the outputs that they were saved with."""

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

STYLE = re.compile(r"<style scoped>.*?</style>\n", re.DOTALL)  # of a table of pandas
SHELL = re.compile(r"^```\w+\n%%sh\n", re.MULTILINE)
NOTEBOOK = re.compile(r"\]\(([\w-]+)\.ipynb\)")


def pages(folder: Path) -> dict[str, str | bytes]:
    """Return pages and pictures by their paths in the site."""
    made: dict[str, str | bytes] = {}
    for path in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        notebook.metadata["language_info"] = {"name": "python"}
        text, resources = MarkdownExporter().from_notebook_node(notebook)
        for name, content in resources["outputs"].items():
            made[f"notebooks/{path.stem}-{name}"] = content
            text = text.replace(f"({name})", f"({path.stem}-{name})")
        text = SHELL.sub("```sh\n", STYLE.sub("", text))
        text = text.replace('<table border="1" class="dataframe">', "<table>")
        text = text.replace("![png](", "![The picture that this cell shows](")
        made[f"notebooks/{path.stem}.md"] = NOTEBOOK.sub(r"](\1.md)", text)
    return made
