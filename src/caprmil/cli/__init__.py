"""The command line: parse, call, print. Heavy imports are inside functions: --help is fast."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from caprmil import __version__
from caprmil.cli import (
    atlas_command,
    compare_commands,
    evaluate_command,
    experiment_commands,
    explain_command,
    export_command,
    faithfulness_command,
    init_command,
    paper_command,
    push_command,
    report_command,
    reproduce_command,
    run_commands,
    slide_commands,
    status_command,
    view_command,
)
from caprmil.cli.shared import Device, answers_table, app, show_table
from caprmil.cli.terminal import accept_any_text
from caprmil.errors import OUT_OF_MEMORY, CaprmilError, is_out_of_memory
from caprmil.io.atomic import CHECK_FOLDER, FORBIDDEN, FULL
from caprmil.io.leftovers import (
    NO_TEMPORARY_FOLDER,
    clear_temporary_folders,
    has_temporary_folder,
)

__all__ = [
    "app",
    "atlas_command",
    "compare_commands",
    "evaluate_command",
    "experiment_commands",
    "explain_command",
    "export_command",
    "faithfulness_command",
    "init_command",
    "paper_command",
    "push_command",
    "report_command",
    "reproduce_command",
    "run",
    "run_commands",
    "slide_commands",
    "status_command",
    "view_command",
]


STOPPED = {130: "", 143: " by SIGTERM"}
"""Exit codes after Ctrl-C, of typer, and after SIGTERM in a training, and what is said of them."""
RESUMED = {"train", "demo", "encode", "patch", "reproduce", "sweep"}


def _version(given: bool) -> None:
    if given:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Slide-level learning in computational pathology."""


@app.command()
def doctor() -> None:
    """Check this machine: versions, devices, memory and disk.

    \b
    Examples:
      caprmil doctor
      caprmil doctor > machine.txt
    """
    from caprmil.doctor import examine

    findings = examine()
    show_table(["what", "found", "remark"], [[f.what, f.found, f.remark] for f in findings])
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for slides, features and runs.")] = Path("demo"),
    full: Annotated[bool, typer.Option("--full", help="More and larger slides.")] = False,
    device: Device = "auto",
) -> None:
    """Generate slides and cross-validate three models on them.

    The slides are encoded, two new slides are predicted, and reports are written.

    \b
    Examples:
      caprmil demo
      caprmil demo --out demo-full --full
    """
    from caprmil import demo as show
    from caprmil.experiments.folder_lock import hold_folder
    from caprmil.io.paths import require_local
    from caprmil.targets.metric import mean_and_spread

    plan = show.FULL if full else show.SHORT
    cohort = plan.cohort
    typer.echo(
        f"{cohort.slides} generated slides of {cohort.width} x {cohort.height} px; in every second "
        f"one {cohort.tumour:.0%} of the tissue is tumour. "
        f"{'Up to ten' if full else 'Less than three'} minutes on two cores."
    )
    with hold_folder(require_local(out)):  # a second one waits, and finds everything done
        results, answers, reports = show.demo(out, plan=plan, device=device)
    target, rows = results[0].run.target, []
    metrics = [target.metric(name) for name in ("auc", "ace", "accuracy")]
    for result in results:
        scores = [mean_and_spread(result.folds(metric.name)) for metric in metrics]
        cells = [f"{score.mean:.3f} ± {score.std:.3f}" for score in scores]
        rows.append([result.name, f"{result.parameters:,}", *cells])
    show_table(["model", "parameters", *(metric.title for metric in metrics)], rows)
    typer.echo("Mean and standard deviation over folds, each model scored on its own test part.")
    typer.echo("Two new slides, from pixels to probabilities by CAPRMIL:")
    answers_table(answers)
    typer.echo(f"Written to {out}: slides, features with images in qc/, a run for each model.")
    typer.echo(f"Reports, to open in a browser: {', '.join(map(str, reports))}")
    typer.echo(f"All slides in a viewer: caprmil view {results[-1].run.folder}")
    typer.echo("Your own slides: caprmil encode SLIDES --out FEATURES")


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error that a user can correct is one line, not a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    accept_any_text()
    clear_temporary_folders()
    try:
        app(arguments)
    except CaprmilError as problem:
        notes = "".join(f" ({note})" for note in getattr(problem, "__notes__", ()))
        typer.secho(f"error: {problem}{notes}", err=True, fg="red")
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError, ImportError, OSError) as problem:
        if is_out_of_memory(problem):
            text = OUT_OF_MEMORY
        elif isinstance(problem, OSError) and problem.errno in (*FULL, *FORBIDDEN):
            action = "written" if problem.errno in FULL else "opened"
            reason = f"{problem.filename or 'A file'} cannot be {action} ({problem.strerror})"
            text = f"{reason}. {CHECK_FOLDER}"
        elif isinstance(problem, FileNotFoundError) and not has_temporary_folder():
            text = NO_TEMPORARY_FOLDER
        else:
            raise
        typer.secho(f"error: {text}", err=True, fg="red")
        raise SystemExit(2) from None
    except SystemExit as end:
        if end.code in STOPPED:
            more = " Repeat the command to resume." if {*arguments[:1]} & RESUMED else ""
            typer.secho(f"Stopped{STOPPED[end.code]}.{more}", err=True, fg="yellow")
        raise
