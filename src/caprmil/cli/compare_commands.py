"""Commands on scores of runs: compare, calibrate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caprmil.cli.markdown_text import show_markdown
from caprmil.cli.shared import RunFolder, app, name_runs, show_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from caprmil.evaluation.differences import Comparison
    from caprmil.evaluation.predictions import Predictions


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Runs, or CSVs of predictions.")],
    against: Annotated[
        Path | None, typer.Option(help="Compare each with this one only; default: all pairs.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="One of several targets. Runs with that target alone can be named too."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for comparison.csv and .md, with all metrics.")
    ] = None,
) -> None:
    """Test which differences between runs are real.

    Each run is also compared with its baselines. A run of several targets is compared with one of
    a single target by the target they share.

    \b
    Examples:
      caprmil compare runs/caprmil runs/abmil
      caprmil compare runs/first --against runs/abmil --out comparison
    """
    from caprmil.errors import CohortError
    from caprmil.evaluation import comparison
    from caprmil.evaluation.shared_target import match_targets
    from caprmil.io.atomic import write_text
    from caprmil.io.new_files import check_new_files, new_files

    names = name_runs([*runs, *([against] if against and against not in runs else [])])
    tables, baselines = match_targets(*_read(names), target)
    reference = [names[against]] if against else []
    if len(tables) == 1 and not any(baselines.values()):
        raise CohortError(
            f"{runs[0]} has no baselines. Name a second run or CSV to compare it with."
        )
    files = ("comparison.csv", "comparison.md")
    if out is not None:
        check_new_files(out, files)
    text, found = "", None
    if len(tables) > 1:
        found = comparison.compare(tables, against=reference)
        metrics = [metric for table in tables.values() for metric in table.target.metrics.values()]
        printed = frozenset(metric.name for metric in metrics if metric.printed)
        _show(found, found.sentences(printed), printed)
        text += f"# Comparison\n\n{found.as_markdown()}"
    for name, own in baselines.items():
        if own:
            tested = comparison.compare_with_baselines(name, tables[name], own)
            lines = list(tested.warnings()) or [f"{name} beats every baseline."]
            _show(tested, lines, group_by=("first", "metric"))
            text += "\n\n".join([f"\n# {name} and its baselines", *lines, tested.as_markdown()])
    if out is not None:
        with new_files(out, files) as folder:
            if found is not None:
                found.write(folder / "comparison.csv")
            write_text(folder / "comparison.md", text.lstrip("\n"))
        typer.echo(f"Written to {out}.")


def _read(
    names: dict[Path, str],
) -> tuple[dict[str, "Predictions"], dict[str, dict[str, "Predictions"]]]:
    """Return the predictions of each run or CSV, and its baselines, if there are any."""
    from caprmil.evaluation.predictions import Predictions

    tables, baselines = {}, {}
    for path, name in names.items():
        if path.is_dir():
            from caprmil.runs.run import Run  # loads torch, which CSVs do not need

            run = Run(path)
            tables[name], baselines[name] = run.predictions, run.baselines
        else:
            tables[name] = Predictions.read(path)
    return tables, baselines


def _show(
    found: "Comparison",
    sentences: "Iterable[str]",
    names: frozenset[str] | None = None,
    *,
    group_by: tuple[str, str] = ("first", "second"),
) -> None:
    """Print a table for each value of the columns `group_by`."""
    typer.echo(found.size())
    groups: dict[str, list[dict[str, str]]] = {}
    for row in found.as_rows(names):
        title = "    ".join(f"{name}: {row.pop(name)}" for name in group_by)
        groups.setdefault(title, []).append(row)
        del row["p"]  # the corrected one is shown; the file has both
    for title, rows in groups.items():
        typer.echo(title)
        show_table(list(rows[0]), [list(row.values()) for row in rows])
    typer.echo("\n".join([*sentences, *(f"Note: {note}" for note in found.notes), ""]))


@app.command()
def calibrate(
    run: RunFolder,
) -> None:
    """Measure the calibration of a run.

    Errors are shown before and after a correction that is fitted to the validation part of each
    fold: a temperature for classes, grades and labels, a line for numbers, a factor of all hazards
    for survival.

    \b
    Examples:
      caprmil calibrate runs/first
      caprmil calibrate runs/abmil
    """
    from caprmil import figures
    from caprmil.evaluation import calibration
    from caprmil.io.atomic import remove_leftovers, write_text
    from caprmil.io.json_files import as_json
    from caprmil.runs.run import Run, reliability_file
    from caprmil.runs.scores import CALIBRATION

    trained = Run(run)
    found = calibration.calibrate_each(trained.predictions, trained.validation, every=True)
    figure_of = {reliability_file(name): own.draw() for name, own in found.items()}
    drawn = {file: figure for file, figure in figure_of.items() if figure is not None}
    written = [name for name in (CALIBRATION, *drawn) if not (run / name).exists()]
    for name in written:
        remove_leftovers(run / name)
    for name, own in found.items():
        show_markdown("\n\n".join(filter(None, (name, own.as_markdown()))))
    if CALIBRATION in written:
        write_text(run / CALIBRATION, as_json(calibration.as_file(found)))
    for name, figure in drawn.items():
        if name in written:
            figures.save(figure, run / name)
    if written:
        typer.echo(f"Written to {run}: {', '.join(written)}.")
    for name in drawn:
        typer.echo(f"The reliability diagram is {run / name}.")
