"""The command atlas: what the tokens of a run collect and do, over its cohort."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caprmil.cli.shared import Device, Force, MovedFeatures, RunFolder, app, open_run, show_table
from caprmil.errors import count

if TYPE_CHECKING:
    from caprmil.explain import TokenAtlas

SHOWN, MOST_GROUPS = 8, 3  # tokens and groups in the printed table


@app.command()
def atlas(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="A new folder; default: RUN/atlas.")] = None,
    features: MovedFeatures = None,
    slides: Annotated[
        Path | None,
        typer.Option(help="Folder of the slide files, if they were moved since they were encoded."),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of slides, drawn at random; default: all."),
    ] = None,
    top: Annotated[int, typer.Option(help="Typical patches per token.", min=1, max=64)] = 8,
    fold: Annotated[str, typer.Option(help="Show the tokens of the model of one fold.")] = "",
    force: Force = False,
    device: Device = "auto",
) -> None:
    """Show what each token collects, and what it does.

    Typical patches, usage per class, stability between folds, effect on the answer and redundancy
    of the tokens of CAPRMIL, over all slides of a run: one HTML page, a figure and tables.

    \b
    Examples:
      caprmil atlas runs/first
      caprmil atlas runs/first --most 50 --slides slides
    """
    from caprmil import explain
    from caprmil.errors import RunError
    from caprmil.explain.explanation_folder import new_folder
    from caprmil.io.progress import bar
    from caprmil.models.device import pick_device
    from caprmil.report import write_atlas
    from caprmil.report.atlas_page import verdict

    trained, folder, used = open_run(run, features), out or run / "atlas", pick_device(device)
    if slides is not None and not slides.is_dir():
        raise RunError(f"{slides} is not a folder. Name the folder of the run's slides.")
    with new_folder(folder) as temporary:
        with bar("Measuring tokens") as step:
            found = explain.make_atlas(
                trained,
                fold=fold or None,
                most=most,
                top=top,
                force=force,
                device=used,
                progress=step,
            )
        with bar("Reading patches") as step:
            pictures = explain.read_pictures(trained, found, pixels=slides, progress=step)
        example = explain.example_slide(trained, found, pixels=slides, device=used)
        names = write_atlas(temporary, trained, found, pictures, example)
    _print_tokens(found)
    for sentence in verdict(found):
        typer.echo(sentence)
    if found.left_out:
        slide, reason = next(iter(found.left_out.items()))
        typer.echo(f"Without {count(len(found.left_out), 'slide')}, e.g. {slide}: {reason}")
    if pictures.missing:
        slide, reason = next(iter(pictures.missing.items()))
        typer.echo(
            f"Without pictures of {count(len(pictures.missing), 'slide')}, e.g. {slide}: "
            f"{reason.rstrip('.')}. Pass their folder: --slides."
        )
    typer.echo(f"Written to {folder}: {', '.join(names)}. Open index.html in a browser.")


def _print_tokens(found: "TokenAtlas") -> None:
    """Print the tokens of the last block with the largest effects."""
    groups = tuple(found.groups) if 1 < len(found.groups) <= MOST_GROUPS else ()
    header = ["token", "usage", *(f"usage, {name}" for name in groups)]
    header += ["effect", *(f"effect, {name}" for name in groups), "matched"]
    rows = []
    for token in found.ranked[:SHOWN]:
        usage = [token.usage.overall, *(token.usage.groups if groups else ())]
        effect = [token.effect.overall, *(token.effect.groups if groups else ())]
        shares = [f"{each.mean:.1%}" for each in usage]
        falls = [f"{each.mean:+.4g}" for each in effect]
        rows.append([token.title.lower(), *shares, *falls, f"{token.stability:.2f}"])
    cohort = f"{count(len(found.slides), 'slide')} of {count(found.patients, 'patient')}"
    tokens = f"{count(len(found.last), 'token')} in the last block"
    typer.echo(f"{found.model}, {cohort}, {tokens}; the largest effects:")
    show_table(header, rows)
