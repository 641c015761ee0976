"""The help of commands: groups in the order of work, and colours where the terminal has them."""

import os
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

GROUPS = {
    "Data": ("patch", "encode", "convert", "encoders"),
    "Train": ("init", "train", "sweep", "reproduce", "status"),
    "Judge": ("evaluate", "compare", "calibrate", "check", "cost", "paper"),
    "Understand": ("explain", "faithfulness", "atlas", "report", "view"),
    "Ship": ("predict", "export", "push"),
    "Help": ("doctor", "models", "demo"),
}
"""The commands by group, in the order of `caprmil --help`: that of the work."""

HELP_NAMES = ["-h", "--help"]
HELP_OPTIONS = {"help_option_names": HELP_NAMES}


class CommandHelp(TyperCommand):
    """A command with its help in colours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        show_help(ctx, args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, in_colours(formatter))


class GroupHelp(TyperGroup):
    """The commands, listed in groups. A summary is never cut."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, in_colours(formatter))

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return [name for names in GROUPS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            rows = [(name.ljust(width), _summary(self.commands[name])) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text("caprmil COMMAND -h has the options and two examples.")


def show_help(ctx: Any, args: Sequence[str]) -> None:
    """Print the help and exit if it is asked for. To parse this option, typer loads pydantic."""
    if not ctx.resilient_parsing and not {*HELP_NAMES}.isdisjoint(args):
        typer.echo(ctx.get_help())
        ctx.exit()


def _summary(command: Any) -> str:
    return str(command.help).partition("\n")[0]


def in_colours(formatter: Any) -> Any:
    """Let a formatter write headings and names in colours. A pipe or a file gets plain text."""
    if os.environ.get("NO_COLOR"):
        return formatter
    write_heading, write_dl = formatter.write_heading, formatter.write_dl

    def heading(text: str) -> None:
        write_heading(typer.style(text, fg="yellow", bold=True))

    def definitions(rows: Sequence[tuple[str, str]], **layout: Any) -> None:
        write_dl([(typer.style(name, fg="cyan", bold=True), text) for name, text in rows], **layout)

    formatter.write_heading, formatter.write_dl = heading, definitions
    return formatter
