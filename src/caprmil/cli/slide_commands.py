"""Commands on slides and their features: encode, patch, convert, encoders."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caprmil.cli.shared import (
    Device,
    Gpus,
    Ray,
    RayCommand,
    SlideScale,
    Trust,
    Weights,
    app,
    end_with_failed,
    find_executor,
    show_table,
)
from caprmil.errors import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from caprmil.executors import Executor
    from caprmil.features.extract import Extraction

Slides = Annotated[list[Path], typer.Argument(help="Slides, or folders of them.")]
Scale = Annotated[
    float | None, typer.Option(help="Microns per pixel of the patches; default: the encoder's.")
]
Magnification = Annotated[
    float | None, typer.Option(help="The scale as a magnification: 10 is 1.0 um/px, 20 is 0.5.")
]
Nominal = Annotated[
    bool, typer.Option("--nominal", help="Scale by nominal magnification, as TRIDENT does.")
]
Shape = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another setting, e.g. patches.px=256 or tissue.min_density=0.03.",
    ),
]
PatchPx = Annotated[
    int | None,
    typer.Option(help="Side of a patch in pixels at that scale; default: the encoder's.", min=1),
]
InputPx = Annotated[
    int | None,
    typer.Option(help="Side of the network's input, to which patches are resized.", min=16),
]
Whole = Annotated[
    bool, typer.Option("--whole", help="Patches of all of the picture: for cores and crops.")
]
SlideTable = Annotated[
    Path | None,
    typer.Option(help="Only the slides of this table; a column mpp has their scale."),
]
Drawn = Annotated[
    Path | None, typer.Option(help="GeoJSON of QuPath: a file, or a folder with one per slide.")
]


@app.command(cls=RayCommand)
def encode(
    slides: Slides,
    out: Annotated[Path, typer.Option(help="Folder for the bags: a new one, or one to resume.")],
    encoder: Annotated[
        str, typer.Option(help="See `caprmil encoders`; or timm:NAME, or package.module:function.")
    ] = "lite0",
    mpp: Scale = None,
    magnification: Magnification = None,
    nominal: Nominal = False,
    patch_px: PatchPx = None,
    input_px: InputPx = None,
    whole: Whole = False,
    change: Shape = None,
    slide_mpp: SlideScale = None,
    table: SlideTable = None,
    regions: Drawn = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
    replace: Annotated[bool, typer.Option(help="Replace bags with other settings.")] = False,
    batch: Annotated[int, typer.Option(help="Patches per batch; 0: by the device.", min=0)] = 0,
    workers: Annotated[int, typer.Option(help="Threads that read patches.", min=1)] = 2,
    shard: Annotated[
        str, typer.Option(help="Encode the I-th of N shares of the slides: I/N, e.g. 2/8.")
    ] = "1/1",
    device: Device = "auto",
    ray: Ray = "",
    gpus_per_worker: Gpus = 1.0,
) -> None:
    """Encode slides into bags of features.

    Images of the detected tissue are in qc/. Repeat the command to resume.

    \b
    Examples:
      caprmil encode slides --out features
      caprmil encode slides --out features-uni --encoder uni --table slides.csv
      caprmil encode cores --out features --whole --slide-mpp 0.5 --patch-px 256
    """
    from functools import partial

    from caprmil import encoders
    from caprmil.features import extract as extraction
    from caprmil.features import settings
    from caprmil.models.device import pick_device
    from caprmil.slides import selection

    target = pick_device("cpu" if ray else device)  # workers of Ray load it on their own device
    part = selection.parse_shard(shard)
    encoder = encoder if input_px is None else f"{encoder}@{input_px}"
    load = partial(encoders.load, encoder, weights=weights, trust_remote_code=trust_remote_code)
    loaded = load(device=target)
    config = settings.configure(
        loaded.card,
        mpp=mpp,
        magnification=magnification,
        nominal=nominal,
        patch_px=patch_px,
        whole=whole,
        changes=change or [],
    )
    job = extraction.Extraction(
        out=out,
        encoder=loaded,
        config=config,
        mpp=slide_mpp,
        regions=regions,
        replace=replace,
        batch=batch if batch or ray else extraction.default_batch(target.type),
        workers=workers,
        load_encoder=partial(load, device=device),
    )
    with find_executor(ray, device, gpus_per_worker, readers=workers) as executor:
        _extract(job, slides, table, part, executor)
    typer.echo(f"Train on them with: caprmil train LABELS.csv --features {out} --out runs/first")


@app.command()
def patch(
    slides: Slides,
    out: Annotated[Path, typer.Option(help="Folder for the images and the table.")],
    encoder: Annotated[
        str, typer.Option(help="Encoder that sets the scale and the patches.")
    ] = "lite0",
    mpp: Scale = None,
    magnification: Magnification = None,
    nominal: Nominal = False,
    patch_px: PatchPx = None,
    whole: Whole = False,
    change: Shape = None,
    slide_mpp: SlideScale = None,
    table: SlideTable = None,
    regions: Drawn = None,
) -> None:
    """Find tissue and patches of slides, without encoding.

    The images can be checked before a long run.

    \b
    Examples:
      caprmil patch slides --out check
      caprmil patch slides/slide_001.svs --out check-fine --mpp 0.5
    """
    from caprmil import encoders
    from caprmil.features import extract as extraction
    from caprmil.features import settings

    config = settings.configure(
        encoders.find(encoder),
        mpp=mpp,
        magnification=magnification,
        nominal=nominal,
        patch_px=patch_px,
        whole=whole,
        changes=change or [],
    )
    job = extraction.Extraction(
        out=out, encoder=None, config=config, mpp=slide_mpp, regions=regions
    )
    _extract(job, slides, table)


def _extract(
    job: "Extraction",
    slides: "Sequence[Path]",
    table: Path | None,
    part: tuple[int, int] = (1, 1),
    executor: "Executor | None" = None,
) -> None:
    from caprmil.io.progress import bar
    from caprmil.slides.selection import select_listed, select_shard
    from caprmil.slides.slide import find_slides

    found = find_slides(slides, exclude=job.out)
    if table is not None:
        found, job.mpps = select_listed(found, table)
    if part != (1, 1):
        found = select_shard(found, *part)
    with bar("Encoding" if job.encoder else "Finding tissue", eta=False) as step:
        records = job.run(found, progress=step, executor=executor)
    counts = {state: sum(r.state == state for r in records) for state in ("done", "no tissue")}
    patches = sum(record.patches for record in records)
    typer.echo(
        f"{count(counts['done'], 'slide')} done, {count(patches, 'patch')}; "
        f"{counts['no tissue']} without tissue."
    )
    if counts["no tissue"] and not job.config.whole:
        typer.echo("Cores and crops, which are tissue to their edges, need --whole.")
    typer.echo(f"Written to {job.out}. Check qc.csv and the images in qc/.")
    failed = [record for record in records if record.state == "failed"]
    if len(failed) > 1 and any("--slide-mpp" in record.reason for record in failed):
        typer.echo("Scales that differ between slides: --table TABLE with a column mpp.")
    end_with_failed(failed)


@app.command()
def convert(
    bags: Annotated[list[Path], typer.Argument(help="Bags of any tool, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder for the converted bags.")],
    to: Annotated[str, typer.Option(help="caprmil, trident, clam or stamp.")],
    slides: Annotated[
        list[Path] | None,
        typer.Option(help="Slides or folders of them, for missing metadata."),
    ] = None,
    slide_mpp: SlideScale = None,
    patch_px: Annotated[
        int | None, typer.Option(help="Side of a patch in pixels, as encoded.", min=1)
    ] = None,
    encoder: Annotated[str, typer.Option(help="Name of the encoder to write.")] = "",
    replace: Annotated[bool, typer.Option(help="Replace existing files.")] = False,
) -> None:
    """Convert bags from and to TRIDENT, CLAM and STAMP.

    \b
    Examples:
      caprmil convert features --to trident --out job
      caprmil convert h5_files --to caprmil --out features --slides slides
    """
    from caprmil.cohort.found_bags import find_bags
    from caprmil.features.convert import convert as convert_bags
    from caprmil.io.progress import bar
    from caprmil.slides.slide import find_slides

    found = find_bags(bags)
    with bar("Converting") as step:
        done = convert_bags(
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
    typer.echo(
        f"{count(len(done.written), 'file')} written to {out} as {to}, {len(done.kept)} existed "
        "already."
    )
    for name, reason in done.failed.items():
        typer.secho(f"failed: {name}: {reason}", err=True, fg="red")
    if done.failed:
        raise typer.Exit(2)


@app.command()
def encoders() -> None:
    """List the patch encoders.

    \b
    Examples:
      caprmil encoders
      caprmil encoders > encoders.txt
    """
    from caprmil.encoders import CARDS

    rows = []
    for card in CARDS.values():
        scale = "any" if card.mpp is None else f"{card.mpp:g}"
        licence = f"{card.licence}, gated" if card.gated else card.licence
        source = card.hub or "in the package"
        rows.append([card.name, str(card.width), card.pooled, scale, licence, source])
    show_table(["name", "width", "features", "um/px", "licence", "from"], rows)
    typer.echo("Gated weights are requested on the page of the encoder on the hub.")
    typer.echo("Also timm:NAME, and package.module:function.")
