"""Commands that show why: explain."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caprmil.cli.shared import Device, SlideScale, Trust, Weights, app, show_table
from caprmil.io.paths import as_path

if TYPE_CHECKING:
    from caprmil.explain import ExplainedSlide, Method, SlideReference
    from caprmil.explain.explanation import Explanation
    from caprmil.runs.run import Run

WAYS: "dict[str, Method]" = {
    "exact": "exact",
    "gradients": "integrated gradients",
    "perturbation": "perturbation",
}


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="A run that `caprmil train` made.")],
    what: Annotated[
        str, typer.Argument(metavar="SLIDE_OR_BAG", help="A slide of the run by name, or a file.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to make; default: RUN/explain/SLIDE.")
    ] = None,
    slide: Annotated[
        Path | None, typer.Option(help="The slide's file or its folder, for pixels.")
    ] = None,
    fold: Annotated[str, typer.Option(help="Ask the model of one fold.")] = "",
    head: Annotated[
        int | None,
        typer.Option(
            help="Head to draw, from 1; 0: the mean; default: whose tokens differ most.", min=0
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Patches of a gallery.", min=1, max=64)] = 8,
    method: Annotated[
        str,
        typer.Option(help="exact, gradients or perturbation; default: exact, or else gradients."),
    ] = "",
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Write the table of patches as Parquet too.")
    ] = False,
    slide_mpp: SlideScale = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
    force: Annotated[bool, typer.Option(help="Accept another encoder or scale.")] = False,
    device: Device = "auto",
) -> None:
    """Show why: maps of evidence, attention and tokens, with the patches that carry them."""
    from caprmil.errors import UnknownNameError
    from caprmil.explain import explain_slide
    from caprmil.explain.explanation_folder import new_folder, write_explanation
    from caprmil.io.progress import bar
    from caprmil.runs.run import Run

    if method and method not in WAYS:
        raise UnknownNameError("method", method, WAYS)
    trained = Run(run)
    folder = out or run / "explain" / _name(what)
    with new_folder(folder) as passing:
        loading = {"weights": weights, "trust_remote_code": trust_remote_code, "mpp": slide_mpp}
        options: dict[str, Any] = {"force": force, "device": device}
        subject = _subject(trained, what, slide, passing / "features", **loading, **options)
        with bar("Explaining") as step:
            way = WAYS.get(method)
            case = explain_slide(
                trained, subject, fold=fold or None, method=way, **options, progress=step
            )
        if passing in subject.bag.parents:  # from here on it is called by its final place
            kept = folder / subject.bag.relative_to(passing)
            case = replace(case, reference=replace(subject, bag=kept))
        with bar("Drawing") as step:
            left_out = write_explanation(
                passing, case, trained, head=head, top=top, parquet=parquet, progress=step
            )
    _report(case)
    for reason in left_out:
        typer.echo(f"Without {reason}.")
    # Where the slide was encoded, its bag is there now: nothing needs to be encoded again.
    again = case.reference.bag if folder in case.reference.bag.parents else what
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    typer.echo(f"Written to {folder}: {', '.join(names)}.")
    if "patches.geojson" in names:
        typer.echo(
            "Drag patches.geojson onto the slide in QuPath: Measure > Show measurement maps."
        )
    typer.echo(f"One page of it: caprmil report {run} {again}. Look around: caprmil view {run}")


def _name(what: str) -> str:
    from caprmil.slides.slide import slide_name_of

    return slide_name_of(as_path(what))


def _subject(
    run: "Run", what: str, pixels: Path | None, features: Path, **options: Any
) -> "SlideReference":
    """Find a slide of the run or a bag; a slide's file is encoded, unless its bag is known."""
    from caprmil.explain import locate_slide
    from caprmil.io.progress import bar
    from caprmil.runs import predict as inference
    from caprmil.slides.names import SLIDE_SUFFIXES

    file = as_path(what)
    slide = file.suffix.lower() in SLIDE_SUFFIXES or (file.is_dir() and any(file.glob("*.dcm")))
    if what in run.paths or not (slide and file.exists()):
        return locate_slide(run, what, pixels=pixels)
    name = _name(what)
    if name in run.paths and as_path(run.paths[name]).exists():
        known = locate_slide(run, name)
        if known.pixels is not None and known.pixels.resolve() == file.resolve():
            return known
    with bar("Encoding") as step:
        found, _ = inference.bags_of(run, [file], features, **options, progress=step)
    return locate_slide(run, found[name], pixels=pixels or file)


def _report(case: "ExplainedSlide") -> None:
    """Print the answer, how its logits add up, and what the tokens have."""
    from caprmil.explain.explanation_figures import METHOD_DESCRIPTIONS

    told, answer = case.explanation, case.answer
    truth = "" if case.label is None else f" (label: {case.label})"
    models = len(answer.by_fold)
    known = "" if answer.unseen else " that saw it in training"
    typer.echo(
        f"{case.name}: {told.target.show(answer.mean)}{truth}, by {models} "
        f"model{'' if models == 1 else 's'}{known}. Explained: {told.model} of {told.fold}, "
        f"{len(told):,} patches."
    )
    sums = told.evidence.astype("float64").sum(axis=0)
    rows = [
        [name, f"{p:.4f}", f"{total:+.4f}", f"{rest:+.4f}", f"{logit:+.4f}"]
        for name, p, total, rest, logit in zip(
            told.names, told.answer, sums, told.rest, told.logits, strict=True
        )
    ]
    header = ["output", told.target.answer_name, "sum of evidence", "+ rest", "= logit"]
    show_table(header, rows)
    more = f"It misses the logit by {told.gap:.1e}."
    if told.method == "perturbation":
        more = "These need not add up: the rest is what is missing."
    typer.echo(f"Evidence is {METHOD_DESCRIPTIONS[told.method]}. {more}")
    if told.assignments is not None:
        _report_tokens(told)


def _report_tokens(told: "Explanation") -> None:
    usage, undecided = told.usage[-1], told.uncertainty[-1].mean(axis=1)
    header = ["head", *(f"token {token + 1}" for token in range(usage.shape[1])), "undecided"]
    rows = [
        [str(head + 1), *(f"{share:.1%}" for share in shares), f"{undecided[head]:.2f}"]
        for head, shares in enumerate(usage.tolist())
    ]
    rows.append(
        ["mean", *(f"{share:.1%}" for share in usage.mean(axis=0)), f"{undecided.mean():.2f}"]
    )
    show_table(header, rows)
