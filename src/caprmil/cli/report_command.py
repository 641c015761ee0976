"""The command report: HTML reports of slides and runs."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caprmil.cli.shared import (
    CovariateTable,
    Device,
    Force,
    MovedFeatures,
    Pixels,
    RunFolder,
    SlideScale,
    SlideVectors,
    Trust,
    Weights,
    app,
    end_with_failed,
    failed_records,
    open_run,
    typed,
)
from caprmil.errors import count, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from caprmil.runs.run import Run
    from caprmil.slides.qc import Record


@app.command()
def report(
    run: RunFolder,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SLIDE_OR_BAG]...",
            help="Slides of the run by name, bags, or slide files; default: the run itself.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A new file (.html) or folder; default: RUN/report, which is replaced."),
    ] = None,
    features: MovedFeatures = None,
    slide: Pixels = None,
    fold: Annotated[str, typer.Option(help="Explain the model of one fold; default: all.")] = "",
    slides: Annotated[
        int,
        typer.Option(
            help="For a run: number of worst mistakes, and of examples to show next to them.",
            min=0,
        ),
    ] = 4,
    table: CovariateTable = None,
    vectors: SlideVectors = None,
    slide_mpp: SlideScale = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    device: Device = "auto",
) -> None:
    """Write an HTML report of a slide or of a run.

    A report works offline. That of a run has its slides beside it, in slides/.

    \b
    Examples:
      caprmil report runs/first
      caprmil report runs/first slide_001
    """
    from caprmil.errors import RunError

    trained = open_run(run, features)
    if table is not None or vectors is not None:
        trained.add_covariates(table, vectors)
    options: dict[str, Any] = {"force": force, "device": device}
    if inputs:
        loading = {"weights": weights, "trust_remote_code": trust_remote_code, "mpp": slide_mpp}
        failed = _of_slides(trained, inputs, out, slide, fold, loading, options)
    elif fold:
        raise RunError("--fold is for reports of slides. The report of a run is about all folds.")
    else:
        _of_run(trained, out, slides, slide, options)
        failed = []
    given: dict[str, Any] = {"features": features, "table": table, "vectors": vectors}
    if not inputs:
        again = typed(**given, slide=slide, force=force)
        typer.echo(f"Open it in a browser. For one slide: caprmil report {run} SLIDE{again}")
    typer.echo(f"All slides in a viewer: caprmil view {run}{typed(**given, slides=slide)}")
    end_with_failed(failed)


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
    more = f", and {count(len(written), 'slide')} in {written[0].parent}" if written else ""
    typer.echo(f"Written to {path}{more}.")
    if written:
        named = reports.chosen_slides(run, slides)
        _show_missing(reports.without_pixels(run, named, pixels=pixels))


def _show_missing(names: "Sequence[str]") -> None:
    """Say which reports have no pictures, and what to do."""
    if names:
        typer.secho(
            f"Without pictures, because the slide file was not found: {shorten(names)}. If it was "
            "moved, name its folder: --slide FOLDER",
            err=True,
            fg="yellow",
        )


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
    from caprmil.errors import BagError
    from caprmil.explain import explain_slide
    from caprmil.io.new_files import check_new_files, new_files
    from caprmil.io.progress import bar

    if out is not None and out.suffix:
        check_new_files(out.parent, [out.name])  # now, and not after the encoding
    with bar("Encoding", eta=False) as step:
        references, failed = reports.find_or_encode(
            run, inputs, pixels=pixels, **loading, **options, progress=step
        )
    paths = reports.report_paths(run, references, out)
    problems: dict[str, BagError] = {}
    folder = next((path.parent for path in paths.values()), Path())  # none: no slide was encoded
    files = [path.name for path in paths.values()]
    own = out is None or not files
    with nullcontext(folder) if own else new_files(folder, files) as new, bar("Reporting") as step:
        for done, (name, reference) in enumerate(references.items(), 1):
            try:
                case = explain_slide(run, reference, fold=fold or None, **options)
                target = new / paths[name].name
                reports.write_slide_report(run, case, target, replace=out is None)
            except BagError as problem:  # one bag does not cost the others
                if len(references) == 1:
                    raise
                problems[name] = problem
            step(done, len(references), name)
    for name, path in paths.items():
        if name not in problems:
            typer.echo(f"Written to {path}.")
    bare = [name for name, each in references.items() if not each.has_pixels]
    if bare:
        _show_missing(bare)
        typer.echo("Open it in a browser.")
    else:
        typer.echo("Open it in a browser. The file is complete and can be sent.")
    return [*failed, *failed_records(problems)]
