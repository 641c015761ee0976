"""The command line: parse, call, print. Imports of weight sit inside: --help stays quick."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caprmil import __version__
from caprmil.errors import CaprmilError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from caprmil.extraction import Extraction
    from caprmil.predictions import Predictions
    from caprmil.qc import Record

app = typer.Typer(
    name="caprmil",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting to change, e.g. train.epochs=5. May be repeated."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Features = Annotated[Path | None, typer.Option(help="Folder with the bags.")]
Slides = Annotated[list[Path], typer.Argument(help="Slides, or folders of them.")]
Scale = Annotated[
    float | None, typer.Option(help="Microns per pixel of the patches; default: the encoder's.")
]
Magnification = Annotated[
    float | None, typer.Option(help="The same as a nickname: 10 is 1.0 um/px, 20 is 0.5.")
]
Nominal = Annotated[
    bool, typer.Option("--nominal", help="Scale by nominal magnification, as TRIDENT does.")
]
Shape = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another setting, e.g. patches.px=256 or tissue.min_density=0.03."),
]
SlideScale = Annotated[
    float | None, typer.Option(help="Microns per pixel of the slides, instead of what they say.")
]
SlideTable = Annotated[
    Path | None, typer.Option(help="Take the slides of this CSV; a column mpp gives their scale.")
]
Drawn = Annotated[
    Path | None, typer.Option(help="GeoJSON of QuPath: a file, or a folder with one a slide.")
]
Weights = Annotated[Path | None, typer.Option(help="Local file or folder of encoder weights.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let an encoder run Python code of the hub.")
]
RunFolder = Annotated[Path, typer.Argument(help="A run that `caprmil train` made.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Slide-level learning in computational pathology."""


@app.command()
def encode(
    slides: Slides,
    out: Annotated[Path, typer.Option(help="Folder for the bags: a new one, or one to go on in.")],
    encoder: Annotated[
        str, typer.Option(help="See `caprmil encoders`; or timm:NAME, or package.module:function.")
    ] = "lite0",
    mpp: Scale = None,
    magnification: Magnification = None,
    nominal: Nominal = False,
    change: Shape = None,
    slide_mpp: SlideScale = None,
    table: SlideTable = None,
    regions: Drawn = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
    replace: Annotated[bool, typer.Option(help="Make bags of other settings again.")] = False,
    batch: Annotated[int, typer.Option(help="Patches at once; 0: by the device.", min=0)] = 0,
    workers: Annotated[int, typer.Option(help="Threads that read ahead.", min=1)] = 2,
    device: Device = "auto",
) -> None:
    """Turn slides into bags of features, with pictures of what was taken as tissue."""
    from caprmil import encoders, extraction
    from caprmil.runs import pick_device

    place = pick_device(device)
    loaded = encoders.load(
        encoder, weights=weights, device=place, trust_remote_code=trust_remote_code
    )
    config = extraction.configure(
        loaded, mpp=mpp, magnification=magnification, nominal=nominal, changes=change or []
    )
    job = extraction.Extraction(
        out=out,
        encoder=loaded,
        config=config,
        mpp=slide_mpp,
        regions=regions,
        replace=replace,
        batch=batch or (32 if place.type == "cpu" else 256),
        workers=workers,
    )
    _extract(job, slides, table)
    typer.echo(f"Train on them with: caprmil train LABELS.csv --features {out} --out runs/first")


@app.command()
def patch(
    slides: Slides,
    out: Annotated[Path, typer.Option(help="Folder for the pictures and the table.")],
    mpp: Scale = None,
    magnification: Magnification = None,
    nominal: Nominal = False,
    change: Shape = None,
    slide_mpp: SlideScale = None,
    table: SlideTable = None,
    regions: Drawn = None,
) -> None:
    """Find tissue and lay the grid, without encoding: pictures to look at before a long night."""
    from caprmil import extraction

    config = extraction.configure(
        None, mpp=mpp, magnification=magnification, nominal=nominal, changes=change or []
    )
    job = extraction.Extraction(
        out=out, encoder=None, config=config, mpp=slide_mpp, regions=regions
    )
    _extract(job, slides, table)


def _extract(job: "Extraction", slides: "Sequence[Path]", table: Path | None) -> None:
    from caprmil.extraction import listed
    from caprmil.progress import bar
    from caprmil.slides import find_slides

    found = find_slides(slides, outside=job.out)
    if table is not None:
        found, job.mpps = listed(found, table)
    with bar("Encoding" if job.encoder else "Looking") as step:
        records = job.run(found, progress=step)
    count = {state: sum(r.state == state for r in records) for state in ("done", "no tissue")}
    patches = sum(record.patches for record in records)
    typer.echo(f"{_slides(count['done'])} done, {patches:,} patches; {count['no tissue']} empty.")
    typer.echo(f"Written to {job.out}. Look at qc.csv, and at the pictures in qc/.")
    _tell([record for record in records if record.state == "failed"])
    if any(record.state == "failed" for record in records):
        raise typer.Exit(2)


def _slides(count: int) -> str:
    return f"{count} slide{'' if count == 1 else 's'}"


def _tell(failed: "Sequence[Record]") -> None:
    for record in failed:
        typer.secho(f"failed: {record.slide}: {record.reason}", err=True, fg="red")
    if failed:
        typer.secho("Put right what is said there; the same command tries them again.", err=True)


@app.command()
def convert(
    bags: Annotated[list[Path], typer.Argument(help="Bags of any tool, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder for the converted bags.")],
    to: Annotated[str, typer.Option(help="caprmil, trident, clam or stamp.")],
    slides: Annotated[
        list[Path] | None, typer.Option(help="Slides or folders of them, for what bags leave out.")
    ] = None,
    slide_mpp: SlideScale = None,
    patch_px: Annotated[
        int | None, typer.Option(help="Side of a patch as the encoder saw it.", min=1)
    ] = None,
    encoder: Annotated[str, typer.Option(help="Name of the encoder to write.")] = "",
    replace: Annotated[bool, typer.Option(help="Write over files of other bags.")] = False,
) -> None:
    """Write bags in the layout of another tool, or those of another tool in ours."""
    from caprmil import interchange
    from caprmil.cohort import find_bags
    from caprmil.progress import bar
    from caprmil.slides import find_slides

    found = find_bags(bags)
    with bar("Converting") as step:
        done = interchange.convert(
            found,
            out,
            to,
            slides=find_slides(slides) if slides else None,
            slide_mpp=slide_mpp,
            patch_px=patch_px,
            encoder=encoder or None,
            replace=replace,
            progress=step,
        )
    typer.echo(f"{len(done.written)} files written to {out} as {to}, {len(done.kept)} were there.")
    for name, reason in done.failed.items():
        typer.secho(f"failed: {name}: {reason}", err=True, fg="red")
    if done.failed:
        raise typer.Exit(2)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml), or a table of slides (.csv).")],
    out: Annotated[Path, typer.Option(help="Folder for the run: a new one, or one to resume.")],
    features: Features = None,
    change: Changes = None,
    device: Device = "auto",
) -> None:
    """Train a model on every fold of a cohort, and score each on its own test part."""
    from caprmil import training

    settings = training.read_recipe(recipe, features=features, changes=change or [])
    run = training.cross_validate(settings, out, device=device)
    typer.echo((run.folder / "scores.md").read_text())
    typer.echo(f"Written to {out}: scores.md, predictions.csv, curves.png, roc.png, folds/.")
    typer.echo(f"Predict new bags with: caprmil predict {out} BAGS --out predictions.csv")


@app.command()
def predict(
    run: RunFolder,
    inputs: Annotated[list[Path], typer.Argument(help="Slides or bags, or folders of them.")],
    out: Annotated[
        Path | None, typer.Option(help="CSV to write, a new one; default: only print.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="Keep the bags of slides here, to resume from.")
    ] = None,
    slide_mpp: SlideScale = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
    fold: Annotated[str, typer.Option(help="Ask the model of one fold; default: all.")] = "",
    force: Annotated[bool, typer.Option(help="Accept another encoder or scale.")] = False,
    device: Device = "auto",
) -> None:
    """Answer slides or bags: class probabilities, the mean over the folds' models."""
    from tempfile import TemporaryDirectory

    from caprmil import inference
    from caprmil.files import refuse_existing
    from caprmil.progress import bar
    from caprmil.runs import Run

    if out is not None:
        refuse_existing(out)
    trained = Run(run)
    with TemporaryDirectory(prefix="caprmil-") as passing:
        options: dict[str, Any] = {"force": force, "device": device}
        with bar("Encoding") as step:
            found, failed = inference.bags_of(
                trained,
                inputs,
                features or Path(passing),
                weights=weights,
                trust_remote_code=trust_remote_code,
                mpp=slide_mpp,
                progress=step,
                **options,
            )
        with bar("Predicting") as step:
            answers = trained.predict(found, fold=fold or None, **options, progress=step)
    if out is not None:
        answers.write(out)
    _answers(answers)
    more = " Here are the first 20." if len(answers) > 20 else ""
    typer.echo(f"{_slides(len(answers))} answered by {trained}.{more}")
    if out is not None:
        typer.echo(f"Written to {out}. With labels in it, score it with: caprmil evaluate {out}")
    _tell(failed)
    if len(answers) < len(found):
        typer.secho(f"{len(found) - len(answers)} bags could not be read.", err=True, fg="red")
    if failed or len(answers) < len(found):
        raise typer.Exit(2)


@app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(help="A run, or any CSV of predictions.")],
    cohort: Annotated[
        Path | None,
        typer.Option(help="Another table of slides, to score a run's models on."),
    ] = None,
    features: Features = None,
    label: Annotated[str, typer.Option(help="Column of the labels, if not recognised.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the predictions on the other table to this CSV."),
    ] = None,
    force: Annotated[bool, typer.Option(help="Accept another encoder or scale.")] = False,
    device: Device = "auto",
) -> None:
    """Score predictions: of a run, of a run's models on another cohort, or in any CSV."""
    from caprmil import predictions, runs
    from caprmil.errors import CohortError
    from caprmil.files import refuse_existing
    from caprmil.progress import bar

    of_table = not target.is_dir()
    if (of_table or cohort is None) and (features, out, force) != (None, None, False):
        raise CohortError("--features, --out and --force go with a run and --cohort TABLE.csv.")
    if of_table and cohort is not None:
        raise CohortError(f"--cohort is scored by the models of a run; {target} is a table.")
    if label and not of_table and cohort is None:
        raise CohortError("--label names a column of a CSV or of --cohort, not of a run.")
    if out is not None:
        refuse_existing(out)
    if of_table:
        table = predictions.Predictions.read(target, label=label or None)
    elif cohort is None:
        table = runs.Run(target).predictions
    else:
        with bar("Scoring") as step:
            options: dict[str, Any] = {"label": label or None, "force": force, "device": device}
            table = runs.Run(target).evaluate(cohort, features, **options, progress=step)
        if out is not None:
            table.write(out)
    typer.echo(predictions.summary(table).as_markdown())


@app.command()
def check(
    run: RunFolder,
    bags: Annotated[
        list[Path] | None,
        typer.Argument(help="Bags to measure on; default: some of the run's own."),
    ] = None,
    most: Annotated[int, typer.Option(help="Bags to measure on, at most.", min=1)] = 8,
) -> None:
    """Measure a model's promises on your own bags: the largest deviation of each."""
    from caprmil.checks import check as measure
    from caprmil.cohort import find_bags
    from caprmil.runs import Run

    trained = Run(run)
    paths = list(find_bags(bags).values()) if bags else trained.bag_paths()
    fold = trained.answering()[0].name
    findings = measure(trained.model(fold), paths[:most])
    rows = [
        [
            finding.promise,
            "not offered" if finding.deviation is None else f"{finding.deviation:.1e}",
            "yes" if finding.holds else "NO",
        ]
        for finding in findings
    ]
    _table(["promise", "largest deviation of a probability", "holds"], rows)
    typer.echo(f"Measured on {len(paths[:most])} bags with the model of {fold}.")
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


@app.command()
def models(
    in_dim: Annotated[int, typer.Option(help="Features of a patch.", min=1)] = 1024,
    n_classes: Annotated[int, typer.Option(help="Classes.", min=2)] = 2,
) -> None:
    """List the models, with their size and what 1,000 patches cost."""
    from caprmil import cost
    from caprmil.models import POOLS, create, list_models

    pools = [f"caprmil+{name}" for name in POOLS if name != "mean"]
    rows = []
    for name in [*list_models(), *pools]:
        model = create(name, in_dim, n_classes)
        gigaflops = cost.flops(model, 1000) / 1e9
        rows.append([name, type(model).__name__, f"{cost.parameters(model):,}", f"{gigaflops:.3f}"])
    _table(["name", "class", "parameters", "GFLOP, 1,000 patches"], rows)
    typer.echo("caprmil+NAME puts the context stack before any of these pools or models.")


@app.command()
def encoders() -> None:
    """List the patch encoders: what they answer, what they were made for, who may use them."""
    from caprmil.encoders import CARDS

    rows = []
    for card in CARDS.values():
        scale = "any" if card.mpp is None else f"{card.mpp:g}"
        gate = "gated" if card.gated else "open"
        source = card.hub or "in the package"
        rows.append([card.name, str(card.width), card.pooled, scale, gate, card.licence, source])
    _table(["name", "width", "features", "um/px", "weights", "licence", "from"], rows)
    typer.echo("Also timm:NAME, and package.module:function. More: docs/encoders.md")


@app.command()
def doctor() -> None:
    """Look at this machine before a long night: versions, devices, memory and disk."""
    from caprmil.doctor import examine

    findings = examine()
    _table(["what", "found", "remark"], [[f.what, f.found, f.remark] for f in findings])
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for slides, features and runs.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller slides.")] = False,
    device: Device = "auto",
) -> None:
    """Generate slides, encode them, cross-validate three models, answer new slides from pixels."""
    from caprmil import demo as show
    from caprmil.metrics import mean_and_spread

    plan = show.QUICK if quick else show.WHOLE
    cohort = plan.cohort
    typer.echo(
        f"{cohort.slides} generated slides of {cohort.width} x {cohort.height} px; in every second "
        f"one {cohort.tumour:.0%} of the tissue is tumour. "
        f"{'About two' if quick else 'Up to ten'} minutes on two cores."
    )
    results, answers = show.demo(out, plan=plan, device=device)
    rows = []
    for result in results:
        scores = [mean_and_spread(result.folds(name)) for name in ("auc", "ace", "accuracy")]
        cells = [f"{score.mean:.3f} ± {score.std:.3f}" for score in scores]
        rows.append([result.name, f"{result.parameters:,}", *cells])
    _table(["model", "parameters", "AUC", "ACE", "accuracy"], rows)
    typer.echo("Mean and standard deviation over folds, each model scored on its own test part.")
    typer.echo("Two new slides, from pixels to probabilities by CAPRMIL:")
    _answers(answers)
    typer.echo(f"Written to {out}: slides, features with pictures in qc/, a run for each model.")
    typer.echo("Your own slides: caprmil encode SLIDES --out FEATURES")


def _answers(answers: "Predictions") -> None:
    shown = zip(answers.slides[:20], answers.probabilities[:20], strict=True)
    rows = [[slide, *(f"{value:.4f}" for value in values)] for slide, values in shown]
    _table(["slide", *answers.classes], rows)


def _table(header: "Sequence[str]", rows: "Iterable[Sequence[str]]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)  # a name may hold brackets


def run() -> None:
    """Entry point: an error that a user can put right is one line, not a traceback."""
    try:
        app()
    except CaprmilError as problem:
        notes = "".join(f" ({note})" for note in getattr(problem, "__notes__", ()))
        typer.secho(f"error: {problem}{notes}", err=True, fg="red")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        resumes = {"train", "demo", "encode", "patch"} & set(sys.argv[1:2])
        more = " The same command goes on from here." if resumes else ""
        typer.secho(f"Stopped.{more}", err=True, fg="yellow")
        raise SystemExit(130) from None
