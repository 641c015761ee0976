"""The commands that wrote a folder, one per line in commands.txt."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from caprmil.io.atomic import write_text

COMMANDS = "commands.txt"


def record_command(folder: Path, words: Sequence[str]) -> None:
    """Add a command to those of a folder, if it is not among them."""
    line, known = shlex.join(["caprmil", *words]), read_commands(folder)
    if line not in known:
        text = "".join(f"{each}\n" for each in [*known, line])
        write_text(folder / COMMANDS, text, replace=True)


def read_commands(folder: Path) -> list[str]:
    """Return the commands that wrote a folder: none, if they were not recorded."""
    path = folder / COMMANDS
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
