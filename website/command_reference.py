"""The reference of the commands, from the Typer application."""

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from caprmil.cli import app
from caprmil.cli.command_help import GROUPS

HEAD = """# Commands

The option `--help` of a command prints the same. Every path may be a URL ([storage](storage.md)).
The exit code is 0 if all is well, 1 if a check or verdict is negative, and 2 if something is wrong
with the input. Then one line says what to do. Commands that were interrupted are resumed by the
same command.
"""


def page() -> str:
    """Return the page in Markdown: a section for each group, a part for each command."""
    group: Any = get_command(app)
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts.extend(_command(f"caprmil {name}", name, group.commands[name]))
    return "\n".join(parts)


def _command(title: str, anchor: str, command: Any) -> Iterator[str]:
    yield f"### {title} {{ #{anchor} }}\n"
    text, _, example = (command.help or "").partition("\b\n")
    yield _paragraphs(text)
    yield _usage(title, command)
    rows = [_row(each) for each in command.params if not getattr(each, "hidden", False)]
    if rows:
        yield "| | meaning | default |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    if example:
        lines = re.sub(r"^Examples?:\n", "", example).splitlines()
        yield "```sh\n" + "\n".join(line.removeprefix("  ") for line in lines).strip() + "\n```\n"
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(f"{title} {name}", f"{anchor}-{name}", inner)


def _paragraphs(text: str) -> str:
    return "\n\n".join(_plain(part) for part in re.split(r"\n\s*\n", text.strip())) + "\n"


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("<", "&lt;").replace("*", r"\*")


def _usage(title: str, command: Any) -> str:
    words = [each for each in command.params if each.param_type_name == "argument"]
    shown = " ".join(_argument(each) for each in words)
    return f"```text\n{title} {f'{shown} ' if shown else ''}[OPTIONS]\n```\n"


def _argument(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_argument(parameter)}`"
    else:
        name = ", ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
    meaning = _plain(getattr(parameter, "help", None) or "").replace("|", r"\|")
    return f"| {name} | {meaning} | {_default(parameter)} |"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value in ("", [], ()) or callable(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value}`"
