"""The command faithfulness: how far the predictions of a run follow each map."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caprmil.cli.shared import (
    Device,
    Force,
    MovedFeatures,
    RunFolder,
    app,
    end_with_failed,
    failed_records,
    open_run,
    show_table,
)
from caprmil.errors import BagError, count, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from caprmil.explain import Faithfulness

SHOWN = 12  # slides with a panel in slides.png


@app.command()
def faithfulness(
    run: RunFolder,
    slides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Slides of the run, or bags; default: slides that a model has not seen."
        ),
    ] = None,
    features: MovedFeatures = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default: RUN/faithfulness.")] = None,
    most: Annotated[
        int, typer.Option(min=1, help="Maximum number of slides, drawn at random.")
    ] = 20,
    only: Annotated[
        str | None, typer.Option("--class", help="Only slides that are predicted as this class.")
    ] = None,
    force: Force = False,
    device: Device = "auto",
) -> None:
    """Measure which map the predictions follow.

    Patches are removed in the order of each map, and the slide is predicted again.

    \b
    Examples:
      caprmil faithfulness runs/first --most 10
      caprmil faithfulness runs/first slide_001 slide_002 --out removed
    """
    from caprmil import explain, figures
    from caprmil.errors import RunError, UnknownNameError
    from caprmil.explain.explanation_folder import new_folder
    from caprmil.io.atomic import check_new, write_text
    from caprmil.io.json_files import as_json
    from caprmil.io.paths import is_remote
    from caprmil.io.progress import bar
    from caprmil.models.device import pick_device

    trained, folder = open_run(run, features), out or run / "faithfulness"
    check_new(folder)
    if only is not None and not trained.target.has_classes:
        raise RunError(f"{run} predicts {trained.target.in_words}, without classes. Omit --class.")
    if only is not None and only not in trained.target.names:
        raise UnknownNameError(f"class in {run}", only, trained.target.names)
    unseen = trained.unseen_slides()
    names = list(slides) if slides else _shuffled(unseen)
    if not names:
        raise RunError(f"The models of {run} have seen all its slides. Name other bags.")
    references = [
        explain.locate_slide(trained, name) for name in (names if slides or only else names[:most])
    ]
    found: list[Faithfulness] = []
    failed: dict[str, BagError] = {}
    with bar("Removing patches") as step:
        wanted = min(most, len(references))
        measured = explain.measure_faithfulness(
            trained,
            references,
            only=None if only is None else trained.target.names.index(only),
            force=force,
            device=pick_device(device),
            progress=lambda done, total: step(len(found) + done / total, wanted, "slides"),
            failed=failed,
        )
        for each in measured:
            found.append(each)
            if len(found) == wanted:
                break
    if not found and failed:
        raise next(iter(failed.values()))
    if not found:
        raise RunError(f"None of {count(len(names), 'slide')} is predicted as {only}.")
    summary = explain.summarise_faithfulness(found, trained.patients)
    typer.echo(_conditions(found, only=only, of=len(names)))
    show_table(summary.header, summary.rows())
    typer.echo(summary.verdict())
    known = [each.slide for each in found if each.slide in trained.bags]
    seen = [name for name in known if name not in unseen]
    if seen:
        typer.echo(f"Note: all models saw {count(len(seen), 'slide')} of these in training.")
    with nullcontext(folder) if is_remote(folder) else new_folder(folder) as new:
        write_text(new / "faithfulness.csv", _table(found))
        slide_by_slide = {"slides_by_name": {each.slide: each.as_dict() for each in found}}
        write_text(new / "faithfulness.json", as_json({**summary.as_dict(), **slide_by_slide}))
        figures.save(summary.draw(), new / "faithfulness.png")
        slide_panels = [each.panel() for each in found[:SHOWN]]
        figures.save(figures.deletion_curves(slide_panels), new / "slides.png")
    typer.echo(f"Written to {folder}: faithfulness.png, .csv and .json; slides.png.")
    end_with_failed(failed_records(failed))


def _shuffled(names: "Sequence[str]") -> list[str]:
    import numpy as np

    return [names[index] for index in np.random.default_rng(0).permutation(len(names))]


def _conditions(found: "Sequence[Faithfulness]", *, only: str | None, of: int) -> str:
    methods = " or ".join(sorted({each.method for each in found}))
    target = found[0].target
    followed = "its predicted class" if target.has_classes else found[0].followed
    of_text = f" predicted as {only}" if only else f", each for {followed}"
    return (
        f"{found[0].model}, evidence: {methods}. {count(len(found), 'slide')}{of_text}; drawn from "
        f"{of}. Area between the curves, least relevant first minus most relevant first:"
    )


def _table(found: "Sequence[Faithfulness]") -> str:
    import csv
    from io import StringIO

    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    target = found[0].target
    areas_of = ["area", f"area_in_{plural(target.output_name)}"][: 2 if target.saturates else 1]
    table.writerow(["slide", "fold", target.contrast_name, "patches", "map", *areas_of])
    for each in found:
        for name, curves in each.curves.items():
            areas = [f"{curves.area:.6f}", f"{curves.contrast_area:.6f}"][: len(areas_of)]
            table.writerow([each.slide, each.fold, each.followed, each.patches, name, *areas])
    return text.getvalue()
