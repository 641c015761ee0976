"""The command evaluate: scores of a run or a table, and external validation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caprmil.cli.markdown_text import show_markdown
from caprmil.cli.shared import (
    Device,
    Features,
    Force,
    SlideVectors,
    app,
    end_with_failed,
    failed_records,
    show_table,
)
from caprmil.errors import BagError

if TYPE_CHECKING:
    from caprmil.runs.external import ExternalValidation


@app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(help="A run, or any CSV of predictions.")],
    cohort: Annotated[
        Path | None,
        typer.Option(help="Another table of slides, to score a run's models on."),
    ] = None,
    features: Features = None,
    label: Annotated[str, typer.Option(help="Column of the labels, if not recognised.")] = "",
    vectors: SlideVectors = None,
    recalibrate: Annotated[
        int | None,
        typer.Option(help="Recalibrate on this number of slides, and score the others."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the draws of patients and of slides.", min=0)
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="With --cohort: a folder for page and tables, or a CSV of predictions."),
    ] = None,
    force: Force = False,
    device: Device = "auto",
) -> None:
    """Score a run, or any table of predictions.

    With --cohort, the models of a run are scored on another cohort, beside their cross-validation;
    how the cohorts differ is measured.

    \b
    Examples:
      caprmil evaluate runs/first
      caprmil evaluate runs/first --cohort external.csv --features external --out validation
    """
    from caprmil.errors import CohortError
    from caprmil.evaluation.predictions import Predictions
    from caprmil.evaluation.score_summary import summary
    from caprmil.runs.run import Run

    of_table = not target.is_dir()
    if of_table and cohort is not None:
        what = "is a table" if target.exists() else "does not exist"
        raise CohortError(f"--cohort is scored by the models of a run; {target} {what}.")
    outside = (features or None, vectors, out, recalibrate, force)
    if cohort is None and outside != (None, None, None, None, False):
        raise CohortError(
            "--features, --vectors, --recalibrate, --out and --force need a run and --cohort "
            "TABLE.csv."
        )
    if label and not of_table and cohort is None:
        raise CohortError("--label names a column of a CSV or of --cohort, not of a run.")
    if cohort is not None:
        options: dict[str, Any] = {"label": label or None, "vectors": vectors, "force": force}
        options |= {"recalibrate_on": recalibrate, "seed": seed, "device": device}
        _external(Run(target), cohort, features or None, out, options)
        return
    table = Predictions.read(target, label=label or None) if of_table else Run(target).predictions
    show_markdown(summary(table).as_markdown())


def _external(
    run: Any,
    cohort: Path,
    features: list[Path] | None,
    out: Path | None,
    options: dict[str, Any],
) -> None:
    """Validate a run on another cohort, print what was found and write it."""
    from caprmil.io.atomic import check_new
    from caprmil.io.new_files import check_new_files
    from caprmil.io.progress import bar
    from caprmil.report.external_page import FILES, write_external
    from caprmil.runs.external import validate_external

    is_csv = out is not None and out.suffix.lower() == ".csv"
    if out is not None:
        if is_csv:
            check_new(out)
        else:
            check_new_files(out, FILES)
    failed, written = dict[str, BagError](), list[Path]()
    with bar("Scoring") as step:
        found = validate_external(run, cohort, features, **options, progress=step, failed=failed)
    if out is not None and is_csv:
        found.predictions.write(out)
    elif out is not None:
        written = write_external(found, out)
    _print(found)
    if out is not None:
        names = "" if is_csv else f": {', '.join(path.name for path in written)}"
        typer.echo(f"Written to {out}{names}.")
    end_with_failed(failed_records(failed))


def _print(found: "ExternalValidation") -> None:
    from caprmil.evaluation.external_scores import score_rows

    typer.echo(found.size())
    show_table(*score_rows([each for each in found.scores if each.printed]))
    if found.recalibrated is not None:
        typer.echo("Recalibrated, on the slides that it was not fitted to:")
        show_table(*found.recalibrated.as_rows())
    typer.echo("\n".join([*found.sentences(), *(f"Note: {note}" for note in found.notes)]))
