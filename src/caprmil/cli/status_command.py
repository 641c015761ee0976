"""The command status: the progress of a long command."""

from pathlib import Path
from typing import Annotated

import typer

from caprmil.cli.shared import app, show_table

MOST = 50  # rows of the table


@app.command()
def status(
    out: Annotated[Path, typer.Argument(help="The --out of a command: bags, a run, a sweep, ...")],
) -> None:
    """Show what is done, running or failed in a folder.

    It works on every machine that has the folder.

    \b
    Examples:
      caprmil status runs/first
      caprmil status features
    """
    from caprmil.experiments.status import read_status

    found = read_status(out)
    tasks = found.unfinished()
    if tasks:
        rows = [[task.name, task.state, task.detail] for task in tasks[:MOST]]
        show_table(["task", "state", "detail"], rows)
    if len(tasks) > MOST:
        typer.echo(f"And {len(tasks) - MOST} more.")
    counted = ", ".join(f"{count} {state}" for state, count in found.count().items())
    typer.echo(f"{out} holds {found.kind}: {counted or 'nothing is done yet'}.")
    if any(task.state in ("failed", "stopped", "to do") for task in tasks):
        typer.echo("Repeat the command that made this folder to resume.")
