"""The command export: models as files that run without caprmil."""

from pathlib import Path
from typing import Annotated

import typer

from caprmil.cli.shared import RunFolder, app, show_table


@app.command()
def export(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="onnx, pt2 (torch.export) or torchscript.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder, or a file for one model; default: RUN/export.")
    ] = None,
    fold: Annotated[str, typer.Option(help="Export the model of one fold; default: all.")] = "",
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="One file that predicts the mean of all folds.")
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the model to change, e.g. draws=0."
        ),
    ] = None,
) -> None:
    """Export models to files that run without caprmil.

    Each file is compared with its model before it is kept.

    \b
    Examples:
      caprmil export runs/first --to onnx
      caprmil export runs/first --to pt2 --ensemble --out model.pt2
    """
    from caprmil import export as exports
    from caprmil.io.progress import bar
    from caprmil.runs.run import Run

    trained = Run(run)
    with bar("Exporting") as step:
        written = exports.export_run(
            trained,
            to,
            out or run / "export",
            fold=fold or None,
            ensemble=ensemble,
            changes=exports.parse_changes(change or []),
            progress=step,
        )
    rows = [
        [str(each.path), f"{each.path.stat().st_size / 1e6:.1f}", f"{each.deviation:.1e}"]
        for each in written
    ]
    show_table(["written", "MB", f"largest deviation of a {trained.target.number_name}"], rows)
    sizes = ", ".join(f"{size:,}" for size in exports.SIZES)
    typer.echo(f"Compared with torch on bags of {sizes} patches.")
    width, columns = trained.facts.in_dim, written[0].metadata.get("covariates", [])
    more = ""
    if columns:
        numbers = sum(column["width"] for column in columns)
        more = f", and covariates of ({numbers},), encoded as caprmil.json says,"
    typer.echo(f"To run it, with features of (patches, {width}){more} in float32:")
    typer.echo("\n".join(f"    {line}" for line in written[0].usage.splitlines()))
