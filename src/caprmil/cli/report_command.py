"""The command that writes reports: report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caprmil.cli.shared import Device, SlideScale, Trust, Weights, app, slides_text, tell

if TYPE_CHECKING:
    from caprmil.runs.run import Run
    from caprmil.slides.qc import Record


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run that `caprmil train` made.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SLIDE_OR_BAG]...",
            help="Slides of the run by name, bags, or slide files; default: the run itself.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A new file (.html) or folder; default: RUN/report, made anew."),
    ] = None,
    slide: Annotated[
        Path | None, typer.Option(help="The slide's own file, or a folder to find it in.")
    ] = None,
    fold: Annotated[str, typer.Option(help="Ask the model of one fold; default: all.")] = "",
    slides: Annotated[
        int,
        typer.Option(
            help="With a run: so many of its worst mistakes, and the surest of each class.",
            min=0,
        ),
    ] = 4,
    slide_mpp: SlideScale = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
    force: Annotated[bool, typer.Option(help="Accept another encoder or scale.")] = False,
    device: Device = "auto",
) -> None:
    """Write a report of slides, or of a whole run: one HTML file that opens anywhere."""
    from caprmil.errors import RunError
    from caprmil.runs.run import Run

    trained = Run(run)
    options: dict[str, Any] = {"force": force, "device": device}
    if inputs:
        loading = {"weights": weights, "trust_remote_code": trust_remote_code, "mpp": slide_mpp}
        failed = _of_slides(trained, inputs, out, slide, fold, loading, options)
    elif fold:
        raise RunError("--fold goes with slides; the report of a run is of all its folds.")
    else:
        _of_run(trained, out, slides, slide, options)
        failed = []
    typer.echo(f"Look around with: caprmil view {run}")
    tell(failed)
    if failed:
        raise typer.Exit(2)


def _of_run(
    run: "Run", out: Path | None, slides: int, pixels: Path | None, options: dict[str, Any]
) -> None:
    from caprmil import report as reports
    from caprmil.io.progress import bar

    with bar("Reporting") as step:
        path, written, missing = reports.write_run_report(
            run, out=out, slides=slides, pixels=pixels, **options, progress=step
        )
    for line in missing:
        typer.secho(f"no report of {line}", err=True, fg="yellow")
    more = f", and {slides_text(len(written))} in {written[0].parent}" if written else ""
    typer.echo(f"Written to {path}{more}.")
    typer.echo(f"Open it in a browser. Any one slide: caprmil report {run.folder} SLIDE")


def _of_slides(
    run: "Run",
    inputs: list[str],
    out: Path | None,
    pixels: Path | None,
    fold: str,
    loading: dict[str, Any],
    options: dict[str, Any],
) -> "list[Record]":
    from caprmil import report as reports
    from caprmil.explain import explain_slide
    from caprmil.io.atomic import check_new
    from caprmil.io.progress import bar

    if out is not None and out.suffix:
        check_new(out)  # now, and not after the encoding
    with bar("Encoding") as step:
        subjects, failed = reports.find_or_encode(
            run, inputs, pixels=pixels, **loading, **options, progress=step
        )
    places = reports.report_paths(run, subjects, out)
    with bar("Reporting") as step:
        for done, (name, subject) in enumerate(subjects.items(), 1):
            case = explain_slide(run, subject, fold=fold or None, **options)
            reports.write_slide_report(run, case, places[name], replace=out is None)
            step(done, len(subjects), name)
    for path in places.values():
        typer.echo(f"Written to {path}.")
    typer.echo("Open it in a browser, or send it: it needs nothing but itself.")
    return failed
