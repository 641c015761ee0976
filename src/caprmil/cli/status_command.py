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
    """Show what is done, running or failed, and why, from any machine."""
    from caprmil.experiments.status import read_status

    found = read_status(out)
    units = found.unfinished()
    if units:
        rows = [[unit.name, unit.state, unit.detail] for unit in units[:MOST]]
        show_table(["task", "state", "detail"], rows)
    if len(units) > MOST:
        typer.echo(f"And {len(units) - MOST} more.")
    counted = ", ".join(f"{count} {state}" for state, count in found.count().items())
    typer.echo(f"{out} holds {found.kind}: {counted or 'nothing is done yet'}.")
    if any(unit.state in ("failed", "stopped", "to do") for unit in units):
        typer.echo("The command that began it goes on with what is not done.")
