"""Several cells as one text, `name=cell; name=cell`, and back. Empty cells are left out."""

import re
from collections.abc import Iterable, Mapping

FIELD = re.compile(r'\s*(?:"((?:[^"]|"")*)"|([^;]*))(?:;|$)')


def join_cells(cells: Mapping[str, str]) -> str:
    """Return cells by name as one text; quoted where one has a semicolon or a quote."""
    return "; ".join(_quoted(f"{name}={cell}") for name, cell in cells.items() if cell)


def split_cells(text: str, names: Iterable[str]) -> dict[str, str]:
    """Return the cell of each name; raise ValueError if the text is not of this form."""
    found = dict.fromkeys(names, "")
    for quoted, plain in FIELD.findall(text):
        if not (field := quoted.replace('""', '"') or plain):
            continue  # the end
        own = next((name for name in found if field.startswith(f"{name}=")), None)
        if own is None:
            raise ValueError(f"'{field}' is not one of {', '.join(found)}, with its label.")
        found[own] = field[len(own) + 1 :]
    return found


def _quoted(field: str) -> str:
    if {";", '"'} & set(field) or field != field.strip():
        return '"' + field.replace('"', '""') + '"'
    return field
