"""The command reproduce: the benchmarks of the paper."""

from pathlib import Path
from typing import Annotated

import typer

from caprmil.cli.recipe_options import Changes
from caprmil.cli.shared import (
    Device,
    Gpus,
    Ray,
    RayCommand,
    app,
    command_words,
    find_executor,
    show_table,
)


@app.command(cls=RayCommand)
def reproduce(
    protocol: Annotated[str, typer.Argument(help="camelyon16, tcga-nsclc, panda or bracs.")],
    features: Annotated[Path | None, typer.Option(help="Folder with the bags.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Table of slides and labels.")] = None,
    models: Annotated[str, typer.Option(help="Models, separated by commas, or all.")] = "caprmil",
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs and tables. Default: runs/PROTOCOL.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Try it on a small generated cohort.")
    ] = False,
    change: Changes = None,
    device: Device = "auto",
    ray: Ray = "",
    gpus_per_worker: Gpus = 1.0,
) -> None:
    """Run a benchmark of the paper.

    The figures are compared with those of the paper.

    \b
    Examples:
      caprmil reproduce panda --rehearse
      caprmil reproduce camelyon16 --features features --labels labels.csv --models all
    """
    from caprmil.errors import CohortError
    from caprmil.experiments import reproduce as protocols
    from caprmil.experiments.command_log import record_command
    from caprmil.experiments.folder_lock import hold_folder
    from caprmil.experiments.reproduce.reproduction import PROTOCOL_FILE
    from caprmil.io.paths import require_local
    from caprmil.synthetic import BenchmarkCohort

    protocols.find_protocol(protocol)
    chosen, changes = protocols.choose_models(models), change or []
    out = out or Path("runs") / (f"{protocol}-rehearsal" if rehearse else protocol)
    if rehearse and (features or labels):
        raise CohortError("--rehearse generates its own bags: leave out --features and --labels.")
    if not rehearse and (features is None or labels is None):
        raise CohortError("Pass --features DIR and --labels TABLE.csv, or --rehearse to try it.")
    with hold_folder(require_local(out)):
        if rehearse:
            labels = BenchmarkCohort(protocol=protocol).write(out / "stand-in")
            features = labels.parent / "features"
            changes = [*protocols.REHEARSAL, *changes]
            typer.echo("A rehearsal on generated bags: its figures mean nothing.")
        assert labels is not None
        assert features is not None
        try:
            with find_executor(ray, device, gpus_per_worker) as executor:
                result = protocols.reproduce(
                    protocol,
                    labels,
                    features,
                    chosen,
                    out,
                    changes=changes,
                    device=device,
                    executor=executor,
                )
        finally:
            if (out / PROTOCOL_FILE).exists():  # a run may be finished though another one failed
                record_command(out, command_words())
    rows = result.rows()
    show_table(list(rows[0]), [list(row.values()) for row in rows])
    for note in (result.features, *result.notes):
        typer.echo(f"- {note}")
    typer.echo(f"Written to {out}: table.md, table.csv, table.tex, and a run for each model.")
    if len(chosen) > 1:
        folders = " ".join(str(out / model) for model in chosen)
        typer.echo(f"Which differences are real: caprmil compare {folders}")
    typer.echo(f"The paper's tables with these runs: caprmil paper {out} --out tables")
