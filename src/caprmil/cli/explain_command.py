"""The command explain: figures and tables of one slide."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caprmil.cli.shared import (
    CovariateTable,
    Device,
    Force,
    MovedFeatures,
    Pixels,
    RunFolder,
    SlideScale,
    SlideVectors,
    Trust,
    Weights,
    app,
    open_run,
    show_table,
    typed,
)
from caprmil.errors import count
from caprmil.io.paths import as_path

if TYPE_CHECKING:
    from caprmil.explain import ExplainedSlide, Method, RegionEffects, SlideReference
    from caprmil.explain.explanation import Explanation
    from caprmil.runs.run import Run

METHODS: "dict[str, Method]" = {
    "exact": "exact",
    "gradients": "integrated gradients",
    "perturbation": "perturbation",
}
PRINTED = 3  # regions of each sign


@app.command()
def explain(
    run: RunFolder,
    what: Annotated[
        str,
        typer.Argument(
            metavar="SLIDE_OR_BAG",
            help="A slide (or patient) of the run by name, or a file; for a new patient, a folder.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="A new folder; default: RUN/explain/SLIDE.")
    ] = None,
    features: MovedFeatures = None,
    slide: Pixels = None,
    fold: Annotated[str, typer.Option(help="Explain the model of one fold.")] = "",
    head: Annotated[
        int | None,
        typer.Option(
            help="Head to draw, from 1; 0: the mean; default: the most informative.", min=0
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Patches per gallery.", min=1, max=64)] = 8,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            help="A map to draw, the first one first: sampled-influence, influence, "
            "integrated-gradients, evidence, ...; default: the most faithful one of the run.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="Evidence: exact, gradients or perturbation; default: exact, or else gradients."
        ),
    ] = "",
    implant: Annotated[
        str,
        typer.Option(
            metavar="REGION",
            help="Add this part of the slide to the one of --into, and predict both: a GeoJSON "
            "file, x,y,width,height in level-0 pixels, top:N or top:5%.",
        ),
    ] = "",
    into: Annotated[
        str, typer.Option(metavar="SLIDE_OR_BAG", help="The slide that --implant is added to.")
    ] = "",
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Write the table of patches as Parquet too.")
    ] = False,
    table: CovariateTable = None,
    vectors: SlideVectors = None,
    slide_mpp: SlideScale = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    device: Device = "auto",
) -> None:
    """Write the maps and top patches of a slide.

    Maps of influence, evidence, attention and tokens, and the effect of the regions that they mark,
    as figures, tables and GeoJSON for QuPath.

    \b
    Examples:
      caprmil explain runs/first slide_001
      caprmil explain runs/first slide_001 --implant top:5% --into slide_002
    """
    from caprmil.errors import CaprmilError, UnknownNameError
    from caprmil.explain import KINDS, explain_slide
    from caprmil.explain.explanation_folder import new_folder, write_explanation
    from caprmil.features.bag_files import move, paths_of
    from caprmil.io.progress import bar

    if method and method not in METHODS:
        raise UnknownNameError("method", method, METHODS)
    kinds = {kind.key: name for name, kind in KINDS.items() if name != "gradients"}
    for each in maps or ():
        if each not in kinds:
            raise UnknownNameError("map", each, kinds)
    chosen = [kinds[each] for each in maps or ()]
    trained = open_run(run, features)
    if table is not None or vectors is not None:
        trained.add_covariates(table, vectors)
    loading = {"weights": weights, "trust_remote_code": trust_remote_code, "mpp": slide_mpp}
    options: dict[str, Any] = {"force": force, "device": device}
    if implant or into:
        if not (implant and into) or method or parquet or head is not None or len(chosen) > 1:
            raise CaprmilError(
                "--implant REGION and --into SLIDE belong together, without --method, --head, "
                "--parquet or a second --map."
            )
        folder = out or run / "explain" / f"{_name(what)}-into-{_name(into)}"
        first = chosen[0] if chosen else None
        _implant(trained, what, implant, into, folder, slide, fold, first, loading, options)
        return
    folder = out or run / "explain" / _name(what)
    with new_folder(folder) as temporary:
        reference = _find_or_encode(
            trained, what, slide, temporary / "features", **loading, **options
        )
        with bar("Explaining") as step:
            case = explain_slide(
                trained,
                reference,
                fold=fold or None,
                method=METHODS.get(method),
                first=chosen[0] if chosen else None,
                maps=chosen[1:],
                **options,
                progress=step,
            )
        encoded = temporary in paths_of(reference.bag)[0].parents
        if encoded:  # the folder gets its name below
            kept = move(reference.bag, temporary, folder)
            case = replace(case, reference=replace(reference, bag=kept))
        with bar("Drawing") as step:
            left_out = write_explanation(
                temporary, case, trained, head=head, top=top, parquet=parquet, progress=step
            )
    _report(case)
    for reason in left_out:
        typer.echo(f"Without {reason}.")
    # If the slide was encoded, its bag is in the folder now, and the report can use it.
    several = folder / "features" if trained.sources else case.reference.bag
    again = several if encoded else what
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    typer.echo(f"Written to {folder}: {', '.join(names)}.")
    if "patches.geojson" in names:
        regions = "regions.geojson or " if "regions.geojson" in names else ""
        typer.echo(
            f"Drag {regions}patches.geojson onto the slide in QuPath: Measure > Show measurement "
            "maps."
        )
    for part in ("slide", "source"):
        if f"{part}s" in names:
            typer.echo(f"For QuPath, each {part} has its own: {part}s/NAME/patches.geojson.")
    given: dict[str, Any] = {"features": features, "table": table, "vectors": vectors}
    report = typed(**given, slide=slide, fold=fold, weights=weights, force=force)
    new = None if what in trained.bags else again
    view = typed(**given, slides=slide, bags=new)
    typer.echo(f"As one HTML file: caprmil report {run} {again}{report}")
    typer.echo(f"In a viewer: caprmil view {run}{view}")


def _implant(
    run: "Run",
    what: str,
    region: str,
    into: str,
    folder: Path,
    pixels: Path | None,
    fold: str,
    first: str | None,
    loading: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Add a region of one slide to another, print the answers and write them to a new folder."""
    from caprmil.explain import implant_region, parse_region
    from caprmil.explain.explanation_folder import new_folder
    from caprmil.explain.implant_folder import write_implant

    wanted = parse_region(region)
    with new_folder(folder) as temporary:
        source, slide = (
            _find_or_encode(run, each, own, temporary / "features", **loading, **options)
            for each, own in ((what, pixels), (into, None))
        )
        found = implant_region(
            run, source, wanted, slide, fold=fold or None, first=first, **options
        )
        write_implant(temporary, found, run, region=region)
    rows = [
        [row.title, f"{row.patches:,}", *(f"{value:.4f}" for value in row.answer)]
        for row in found.rows()
    ]
    show_table(["bag", "patches", *found.target.titles], rows)
    what_region = f"The region has {count(found.region, 'patch')} of {found.source}"
    marked = "" if found.map is None else f", those that {found.map} marks most"
    typer.echo(f"{what_region}{marked}. {found.in_words()} {found.models_in_words()}")
    typer.echo(f"Written to {folder}: implant.json, implant.png.")


def _name(what: str) -> str:
    from caprmil.slides.slide import slide_name_of

    return slide_name_of(as_path(what))


def _find_or_encode(
    run: "Run", what: str, pixels: Path | None, features: Path, **options: Any
) -> "SlideReference":
    """Return a slide of the run or a bag. A slide file is encoded, unless its bag is known."""
    from caprmil.explain import locate_slide
    from caprmil.io.progress import bar
    from caprmil.runs import input_bags as inference
    from caprmil.slides.names import SLIDE_SUFFIXES

    file = as_path(what)
    slide = file.suffix.lower() in SLIDE_SUFFIXES or (file.is_dir() and any(file.glob("*.dcm")))
    if what in run.bags or not (slide and file.exists()):
        return locate_slide(run, what, pixels=pixels)
    name = _name(what)
    if name in run.paths and as_path(run.paths[name]).exists():
        known = locate_slide(run, name)
        if known.pixels is not None and known.pixels.resolve() == file.resolve():
            return known
    with bar("Encoding", eta=False) as step:
        found, _ = inference.bags_of(run, [file], features, **options, progress=step)
    return locate_slide(run, found[name], pixels=pixels or file)


def _report(case: "ExplainedSlide") -> None:
    """Print the prediction, the sum of each output, and the usage of the tokens."""
    from caprmil.explain import KINDS
    from caprmil.explain.explanation_figures import describe_method

    explained, answer = case.explanation, case.answer
    truth = "" if case.label is None else f" (label: {case.label})"
    seen = "" if answer.unseen else " that saw it in training"
    typer.echo(
        f"{case.name}: {explained.target.show(answer.mean)}{truth}, by "
        f"{count(len(answer.by_fold), 'model')}{seen}. Explained: {explained.model} of "
        f"{explained.fold}, {count(len(explained), 'patch')}."
    )
    kind = KINDS[explained.first]
    meaning = kind.meaning_of(explained.target.contrasts[explained.predicted])
    typer.echo(f"First map: {kind.name}, {meaning}. {case.faithfulness_text()}")
    if case.regions is not None:
        _report_regions(case, case.regions)
    sums = explained.evidence.astype("float64").sum(axis=0)
    target = explained.target
    numbers = target.followed(explained.answer)
    shown = [f"{p:.4f}" for p in numbers] + ["-"] * (len(sums) - len(numbers))
    columns = [sums, *(each.term for each in explained.covariates), explained.bias]
    terms = zip(*columns, explained.logits, strict=True)
    rows = [
        [name, p, *(f"{value:+.4f}" for value in own)]
        for name, p, own in zip(target.output_names, shown, terms, strict=True)
    ]
    output = target.output_name
    covariates = [f"+ {each.title}" for each in explained.covariates]
    header = ["for", target.answer_name, "sum of evidence", *covariates, "+ rest", f"= {output}"]
    show_table(header, rows)
    more = f"The sum differs from the {output} by {explained.gap:.1e}."
    if explained.method == "perturbation":
        more = f"These terms do not sum to the {output}; the rest is the difference."
    typer.echo(f"Evidence is {describe_method(explained)}. {more}")
    if scaling := [each for each in explained.covariates if each.scaling is not None]:
        contrast = target.contrasts[explained.predicted]
        each_of = [f"{each.name} {each.scaling_of(contrast):+.4f}" for each in scaling]
        typer.echo(
            f"The covariates also scale the evidence of the patches: {', '.join(each_of)} for "
            f"{contrast.name}, against those of the average training slide."
        )
    _report_slides(case)
    if explained.assignments is not None:
        _report_tokens(explained)


def _report_slides(case: "ExplainedSlide") -> None:
    """Print the share of each slide of a patient."""
    from caprmil.explain.slide_shares import slide_shares

    explained, combination = case.explanation, case.combination
    of, shares = explained.predicted, slide_shares(explained)
    if not shares:
        return
    contrast = explained.target.contrasts[of]
    header = [explained.info.part_name, "patches", f"evidence {contrast.positive}", "attention"]
    rows = [
        [each.name, f"{each.patches:,}", f"{each.evidence[of]:+.4f}", f"{each.attention:.1%}"]
        for each in shares
    ]
    if combination is not None:
        typer.echo(
            f"{combination.in_words()} Evidence and attention are times the weight of the slide."
        )
        header[2:2] = ["answer", "weight"]
        for row, each in zip(rows, shares, strict=True):
            own = combination.share(each.slide, of)
            row[2:2] = [own.answer, f"{own.weight:.1%}"]
    show_table(header, rows)


def _report_regions(case: "ExplainedSlide", effects: "RegionEffects") -> None:
    """Print the regions of either sign with the largest effect."""
    from caprmil.explain.removal import answer_words

    if not effects.regions:
        typer.echo(effects.reason)
        return
    target, of, areas = case.explanation.target, effects.of, case.region_areas()
    contrast = target.contrasts[of]
    typer.echo(
        f"Regions, removed as a whole: {answer_words(target.number_name, contrast.name)}, "
        f"{effects.answer[of]:.4f} with all patches."
    )
    rows = [
        [
            str(region.number),
            contrast.positive if region.sign > 0 else contrast.negative,
            f"{len(region.rows):,}",
            f"{areas[region.number]:.3g}" if areas else "-",
            f"{region.answer[of]:.4f}",
            f"{region.random[of]:.4f}",
        ]
        for sign in (1, -1)
        for region in effects.of_sign(sign)[:PRINTED]
    ]
    show_table(["region", "marked", "patches", "mm2", "without it", "without random"], rows)
    if len(rows) < len(effects.regions):
        typer.echo(f"All {len(effects.regions)} are in explanation.json.")


def _report_tokens(explained: "Explanation") -> None:
    usage, entropy = explained.usage[-1], explained.uncertainty[-1].mean(axis=1)
    header = ["head", *(f"token {token + 1}" for token in range(usage.shape[1])), "entropy"]
    rows = [
        [str(head + 1), *(f"{share:.1%}" for share in shares), f"{entropy[head]:.2f}"]
        for head, shares in enumerate(usage.tolist())
    ]
    rows.append(
        ["mean", *(f"{share:.1%}" for share in usage.mean(axis=0)), f"{entropy.mean():.2f}"]
    )
    show_table(header, rows)
