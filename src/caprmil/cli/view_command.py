"""The command view: a run in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from caprmil.cli.shared import (
    CovariateTable,
    Device,
    MovedFeatures,
    RunFolder,
    SlideVectors,
    app,
    open_run,
)


@app.command()
def view(
    run: RunFolder,
    slides: Annotated[
        Path | None,
        typer.Option(help="A slide or a folder of slides; default: the paths that were encoded."),
    ] = None,
    features: MovedFeatures = None,
    bags: Annotated[
        list[Path] | None,
        typer.Option(help="A bag or a folder of bags to show as well. May be repeated."),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(help="A second run, to show side by side with this one on the same slide."),
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
    Examples:
      caprmil view runs/first
      caprmil view runs/first --slides slides --port 8001
      caprmil view runs/first --beside runs/second
    """
    from caprmil.viewer import Library, serve

    opened = open_run(run, features)
    if table is not None or vectors is not None:
        opened.add_covariates(table, vectors)
    library = Library(opened, pixels=slides, extra=bags or (), device=device)
    second = None
    if beside is not None:
        second = Library(open_run(beside, None), pixels=slides, device=device)
    serve(
        library,
        second=second,
        host=host,
        port=port,
        names=proxy_host or (),
        browser=browser,
        show=typer.echo,
    )
    typer.echo("Stopped.")
