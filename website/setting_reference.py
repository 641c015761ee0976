"""The reference of all settings, read from the source without importing it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe
from model_settings import meaning

HEAD = """# Settings

A recipe is a TOML file with these tables; so is `recipe.toml` in a run. On the command line,
`--set TABLE.KEY=VALUE` changes one setting: `--set train.epochs=5`, `--set
'target.classes=["low", "high"]'`. A setting that does not exist is an error, and the nearest one
is named.
"""
RECIPE = "training.recipe.Recipe"
ENCODE = (
    ("Extraction", "", "features.settings.ExtractionConfig"),
    ("patches", "patches.", "slides.patches.PatchConfig"),
    ("tissue", "tissue.", "slides.tissue.TissueConfig"),
)
SET_BY_FIT = ("mean", "std", "hazard")


@dataclass(frozen=True)
class Setting:
    """A row of a table."""

    name: str
    type: str
    default: str | None
    meaning: str


def page(source: Path) -> str:
    """Return the page in Markdown."""
    package = griffe.load("caprmil", search_paths=[source], resolve_aliases=True)
    parts = [HEAD, "## Recipes\n"]
    parts.extend(_section("A recipe", package[RECIPE]))
    tables = dict(_tables(package))
    parts.extend(_section("[data]", tables.pop("data")))
    parts.append("## What is predicted: [target]\n")
    parts.append("`kind` chooses the target. The other settings are those of the kind.\n")
    for name, kind in _registry(package, "targets.kinds.TARGETS"):
        parts.extend(_section(f'kind = "{name}"', kind))
    parts.append("## Models: [model]\n")
    parts.append("`name` chooses the model. The other settings are those of the model.\n")
    for name, kind in _registry(package, "models.registry.MODELS"):
        parts.extend(_section(f'name = "{name}"', kind, arguments=True))
    parts.append("### Pools\n")
    parts.append('`pool = "gated"`, or with settings `pool = { name = "gated", dim = 64 }`.\n')
    for name, kind in _registry(package, "models.pooling.POOLS"):
        parts.extend(_section(f'pool "{name}"', kind, arguments=True, level=4))
    parts.append("## Splits, training and the other tables\n")
    for name, kind in tables.items():
        parts.extend(_section(f"[{name}]", kind))
    parts.append("## Slides and patches: caprmil encode --set\n")
    for title, prefix, path in ENCODE:
        parts.extend(_section(title, _class(package, path), prefix))
    return "\n".join(parts)


def undocumented(source: Path) -> list[str]:
    """Return the settings without a meaning: no docstring, or a model that says nothing of it."""
    package = griffe.load("caprmil", search_paths=[source], resolve_aliases=True)
    kinds = [package[RECIPE], *dict(_tables(package)).values()]
    kinds += [_class(package, path) for _, _, path in ENCODE]
    kinds += [kind for _, kind in _registry(package, "targets.kinds.TARGETS")]
    rows = [(kind, row) for kind in kinds for row in _fields(kind)]
    for path in ("models.registry.MODELS", "models.pooling.POOLS"):
        rows += [(kind, row) for _, kind in _registry(package, path) for row in _arguments(kind)]
    return [f"{kind.path}.{row.name}" for kind, row in rows if not row.meaning]


def _tables(package: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tables of a recipe that have one kind of settings, and their dataclasses."""
    recipe = package[RECIPE]
    for name, member in recipe.members.items():
        found = re.match(r"\w+Config", str(getattr(member, "annotation", "")))
        if found and found[0] != "ModelConfig":
            yield name, _class(recipe.module, found[0])


def _class(package: Any, path: str) -> Any:
    found = package[path]
    return found.final_target if found.is_alias else found


def _registry(package: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield names and classes of a dictionary in the source, e.g. MODELS."""
    table = package[path]
    for key, value in zip(table.value.keys, table.value.values, strict=True):
        yield str(key).strip("'\""), _class(table.parent, str(value))


def _section(
    title: str, kind: Any, prefix: str = "", *, arguments: bool = False, level: int = 3
) -> Iterator[str]:
    yield f"{'#' * level} {title}\n".replace("[", r"\[")
    if kind.docstring:
        yield _text(kind.docstring.value) + "\n"
    rows = list(_arguments(kind) if arguments else _fields(kind))
    if not rows:
        yield "No settings.\n"
        return
    meanings = any(row.meaning for row in rows)
    yield "| setting | type | default |" + (" meaning |" if meanings else "")
    yield "| --- | --- | --- |" + (" --- |" if meanings else "")
    for row in rows:
        default = "required" if row.default is None else f"`{_cell(row.default)}`"
        default = "" if row.default == "" else default
        line = f"| `{prefix}{row.name}` | {_cell(row.type)} | {default} |"
        yield line + (f" {_cell(row.meaning)} |" if meanings else "")
    yield ""


def _fields(kind: Any) -> Iterator[Setting]:
    """Yield the fields of a dataclass, those of its bases first."""
    members: dict[str, Any] = {}
    for base in [*reversed(kind.mro()), kind]:
        members.update(base.members)
    for name, member in members.items():
        if not member.is_attribute or "instance-attribute" not in member.labels:
            continue
        if name in SET_BY_FIT:
            continue
        if member.annotation is None or str(member.annotation).startswith("ClassVar"):
            continue
        meaning = _line(member.docstring.value) if member.docstring else ""
        if "not in a recipe" in meaning:
            continue
        yield Setting(name, _type(member), _default(member), meaning)


def _arguments(kind: Any) -> Iterator[Setting]:
    """Yield the keyword-only arguments of a constructor."""
    for each in [kind, *kind.mro()]:
        if "__init__" in each.members:
            for parameter in each.members["__init__"].parameters:
                if parameter.kind is griffe.ParameterKind.keyword_only:
                    yield Setting(
                        parameter.name,
                        _in_words(str(parameter.annotation)),
                        _toml(str(parameter.default)),
                        meaning(kind.name, parameter.name),
                    )
            return


def _type(member: Any) -> str:
    return _in_words(_resolved(member, str(member.annotation)))


def _in_words(text: str) -> str:
    """Return a type in words: the allowed values of a Literal, without None."""
    text = re.sub(r"Literal\[([^]]*)\]", lambda found: found[1].replace("'", '"'), text)
    text = re.sub(r"dict\[.*\]", "table", text)
    text = re.sub(r"tuple\[(\w+), \.\.\.\]", r"list of \1", text)
    text = re.sub(r"\b(\w+Config|Target)\b", "table", text)
    words = {"str": "text", "bool": "true or false", "int": "integer", "float": "number"}
    text = text.removesuffix(" | None")
    return re.sub(r"\b(str|bool|int|float)\b", lambda found: words[found[0]], text)


def _resolved(member: Any, text: str) -> str:
    """Return the value of a name in the module of a member, e.g. of a constant or an alias."""
    if not text.isidentifier() or text in ("str", "bool", "int", "float", "None", "True", "False"):
        return text
    try:
        found = member.module[text]
    except KeyError:
        return text
    found = found.final_target if found.is_alias else found
    value = getattr(found, "value", None)
    return text if value is None else str(value)


def _default(member: Any) -> str | None:
    value = member.value
    text = None if value is None else _resolved(member, str(value))
    if text is None or not text.startswith("field("):
        return _toml(text)
    found = re.search(r"default=([^,)]+)", text)
    factory = re.search(r"default_factory=(lambda: )?(.*?)(?:, metadata=.*)?\)$", text)
    if found:
        return _toml(_resolved(member, found[1]))
    if factory is None:
        return None
    return _toml(factory[2]) if factory[1] else ""


def _toml(text: str | None) -> str | None:
    """Return a value of Python as a recipe has it; nothing for None."""
    words = {"None": "", "True": "true", "False": "false", "()": "[]"}
    return text if text is None else words.get(text, text.replace("'", '"'))


def _line(text: str) -> str:
    return _linked(re.sub(r"\s+", " ", text).strip())


def _linked(text: str) -> str:
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _text(docstring: str) -> str:
    """Return a docstring in Markdown: examples in code blocks."""
    docstring = _linked(docstring)
    return re.sub(r"(?m)((?:^(?:>>>|\.\.\.) .*\n?)+)", r"```python\n\1```\n", docstring)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
