"""The command view: a run in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from caprmil.cli.shared import CovariateTable, Device, RunFolder, SlideVectors, app


@app.command()
def view(
    run: RunFolder,
    slides: Annotated[
        Path | None,
        typer.Option(help="A slide or a folder of slides; default: the paths that were encoded."),
    ] = None,
    bags: Annotated[
        list[Path] | None,
        typer.Option(help="A bag or a folder of bags to show as well. May be repeated."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. All but 127.0.0.1 need a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="Port; default: the first free one from 8765.", min=1, max=65535),
    ] = None,
    proxy_host: Annotated[
        list[str] | None,
        typer.Option(help="Name of a proxy in front, e.g. hub.example.org. May be repeated."),
    ] = None,
    table: CovariateTable = None,
    vectors: SlideVectors = None,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    device: Device = "auto",
) -> None:
    """Show the slides of a run in a browser.

    Maps, patches, and predictions without a region.

    \b
    Example:
      caprmil view runs/first
    """
    from caprmil.runs.run import Run
    from caprmil.viewer import Library, serve

    opened = Run(run)
    if table is not None or vectors is not None:
        opened.add_covariates(table, vectors)
    library = Library(opened, pixels=slides, extra=bags or (), device=device)
    serve(
        library,
        host=host,
        port=port,
        names=proxy_host or (),
        browser=browser,
        show=typer.echo,
    )
    typer.echo("Stopped.")
