"""The command paper: the paper's tables with what was run."""

from pathlib import Path
from typing import Annotated

import typer

from caprmil.cli.shared import app


@app.command()
def paper(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Folders that reproduce, sweep and cost wrote, or folders above them.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the page, tables and figures.")],
) -> None:
    """Gather runs into the paper's tables and plots.

    Nothing is trained. What was not run is blank. The page is one file that works offline.

    \b
    Examples:
      caprmil paper runs --out tables
      caprmil paper runs sweeps cost --out tables
    """
    from caprmil.errors import CaprmilError
    from caprmil.experiments.gathered_runs import gather
    from caprmil.io.new_files import check_new_files
    from caprmil.report.paper_page import write_paper

    if out.is_file():
        raise CaprmilError(f"{out} is a file. The page, tables and figures need a folder.")
    check_new_files(out, ["index.html"])  # now, and not after the reading
    gathered = gather(runs)
    written = write_paper(gathered, out)
    for number, source in enumerate(gathered.sources(), 1):
        typer.echo(f"[{number}] {source}")
    for note in gathered.notes:
        typer.echo(f"- {note}")
    names = ", ".join(str(path.relative_to(out)) for path in written if path.suffix != ".svg")
    typer.echo(f"Written to {out}: {names}.")
    typer.echo(f"Open {out / 'index.html'} in a browser. The file is complete and can be sent.")
