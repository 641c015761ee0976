"""Commands on cohorts and runs: train, predict, evaluate, check, models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caprmil.cli.markdown_text import show_markdown
from caprmil.cli.recipe_options import (
    Changes,
    Epochs,
    Folds,
    Label,
    LearningRate,
    Model,
    RecipeOrTable,
    Seed,
    recipe_changes,
)
from caprmil.cli.shared import (
    AllowLogger,
    Device,
    Features,
    Force,
    Gpus,
    Ray,
    RayCommand,
    RunFolder,
    SharedRun,
    SlideScale,
    SlideVectors,
    Trust,
    Weights,
    answers_table,
    app,
    end_with_failed,
    failed_records,
    find_executor,
    find_run,
    show_table,
)
from caprmil.errors import BagError, count

if TYPE_CHECKING:
    from caprmil.features.bag_files import BagFiles
    from caprmil.runs.run import Run


@app.command(cls=RayCommand)
def train(
    recipe: RecipeOrTable,
    out: Annotated[Path, typer.Option(help="Folder for the run: a new one, or one to resume.")],
    features: Features = None,
    model: Model = None,
    epochs: Epochs = None,
    folds: Folds = None,
    lr: LearningRate = None,
    seed: Seed = None,
    label: Label = None,
    change: Changes = None,
    device: Device = "auto",
    devices: Annotated[
        int, typer.Option(help="Devices per machine: GPUs, or CPU cores.", min=1)
    ] = 1,
    nodes: Annotated[
        int, typer.Option(help="Number of machines, with srun or torchrun.", min=1)
    ] = 1,
    mean: Annotated[
        bool, typer.Option(help="Train a Mean on the same folds, to compare with; not at a URL.")
    ] = True,
    modalities: Annotated[
        bool,
        typer.Option(
            help="With covariates or several sources: train a model of each alone, to compare "
            "with; not at a URL."
        ),
    ] = True,
    allow_logger: AllowLogger = None,
    ray: Ray = "",
    gpus_per_worker: Gpus = 1.0,
) -> None:
    """Cross-validate a model: train and test it on every fold.

    Repeat the command to resume an interrupted run.

    \b
    Examples:
      caprmil train labels.csv --features features --out runs/first --epochs 5
      caprmil train abmil --features features --out runs/abmil --set train.clip=1.0
    """
    from caprmil.training.early_checks import check_early, has_only_to_measure_maps
    from caprmil.training.recipe_files import read_recipe

    changes = recipe_changes(change, epochs=epochs, folds=folds, lr=lr, seed=seed, label=label)
    settings = read_recipe(recipe, features=features, changes=changes, model=model)
    measured = not has_only_to_measure_maps(settings, out)
    if measured and devices * nodes == 1:
        check_early(settings, out)  # the imports below take seconds

    from caprmil.explain import map_ranking
    from caprmil.io.progress import bar
    from caprmil.models.device import pick_device
    from caprmil.runs.run import Run
    from caprmil.training import cross_validation as training
    from caprmil.training.distributed import ProcessGroup
    from caprmil.training.small_cohorts import propose_recipe

    run = None if measured else Run(out)
    if run is None:
        with find_executor(ray, device, gpus_per_worker) as executor:
            options: dict[str, Any] = {"device": device, "devices": devices, "nodes": nodes}
            options |= {"mean": mean, "modalities": modalities}
            options |= {"allow_loggers": allow_logger or ()}
            run = training.cross_validate(settings, out, **options, executor=executor)
    if not ray and not ProcessGroup(device, devices, nodes).is_main:
        return  # not the main process
    show_markdown((run.folder / "scores.md").read_text(encoding="utf-8"))
    with bar("Measuring maps") as step:
        ranking = map_ranking(run, device=pick_device(device), progress=step)
    if ranking is not None:
        typer.echo(f"Maps, measured on validation slides: {ranking.verdict}")
    drawn = ", ".join(sorted(path.name for path in run.folder.glob("*.png")))
    typer.echo(f"Written to {out}: scores.md, predictions.csv, maps.json, {drawn}, folds/.")
    typer.echo(f"Predict new bags with: caprmil predict {out} BAGS --out predictions.csv")
    if proposal := propose_recipe(settings, run):
        typer.echo(proposal)


@app.command()
def predict(
    run: SharedRun,
    inputs: Annotated[list[Path], typer.Argument(help="Slides or bags, or folders of them.")],
    out: Annotated[Path | None, typer.Option(help="A new CSV file; default: only print.")] = None,
    features: Annotated[
        Path | None, typer.Option(help="Folder to keep the bags of slides, to resume.")
    ] = None,
    slide_mpp: SlideScale = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="The patient of each slide, where patients are predicted; or covariates."
        ),
    ] = None,
    patient: Annotated[str, typer.Option(help="All slides are of this patient.")] = "",
    weights: Weights = None,
    trust_remote_code: Trust = False,
    fold: Annotated[str, typer.Option(help="Use the model of one fold; default: all.")] = "",
    coverage: Annotated[
        float | None,
        typer.Option(help="Add the set that holds the label with this probability, e.g. 0.9."),
    ] = None,
    vectors: SlideVectors = None,
    force: Force = False,
    device: Device = "auto",
) -> None:
    """Predict slides or bags with the models of a run.

    The prediction is the mean over the models of all folds. A run with [data] unit = "patient" has
    one for each patient.

    \b
    Examples:
      caprmil predict runs/first new/slide.svs --out predictions.csv
      caprmil predict runs/patients new_bags --table slides.csv
    """
    from caprmil.io.atomic import check_new
    from caprmil.io.leftovers import temporary_folder
    from caprmil.io.progress import bar
    from caprmil.runs import conformal_sets
    from caprmil.runs import input_bags as inference
    from caprmil.runs.patient_inputs import group_bags

    if out is not None:
        check_new(out)
    trained = find_run(run)
    if coverage is not None:
        conformal_sets.check(trained, coverage)
    reads_table = bool(trained.covariate_names) and table is not None
    if reads_table or vectors is not None:
        trained.add_covariates(table if reads_table else None, vectors)
    if reads_table and trained.predicts == "slide":
        table = None
    with temporary_folder() as temporary:
        options: dict[str, Any] = {"force": force, "device": device}
        with bar("Encoding", eta=False) as step:
            found, failed = inference.bags_of(
                trained,
                inputs,
                features or Path(temporary),
                weights=weights,
                trust_remote_code=trust_remote_code,
                mpp=slide_mpp,
                progress=step,
                **options,
            )
        problems: dict[str, BagError] = {}
        grouped, patients = group_bags(trained, found, table=table, patient=patient or None)
        with bar("Predicting") as step:
            answers = trained.predict(
                grouped,
                patients=patients,
                fold=fold or None,
                coverage=coverage,
                **options,
                progress=step,
                failed=problems,
            )
    if out is not None:
        answers.write(out)
    answers_table(answers)
    more = " The table has the first 20." if len(answers) > 20 else ""
    by = fold or count(len(trained.trained_folds()), "fold")
    number = count(len(answers), answers.unit)
    typer.echo(f"{number} predicted by {run}: {trained.facts.model}, {by}.{more}")
    for line in conformal_sets.summary(trained, answers, coverage):
        typer.echo(line)
    if out is not None:
        typer.echo(f"Written to {out}. After adding labels, score it with: caprmil evaluate {out}")
    end_with_failed([*failed, *failed_records(problems)])


@app.command()
def check(
    run: RunFolder,
    bags: Annotated[
        list[Path] | None,
        typer.Argument(help="Bags to measure on; default: some bags of the run."),
    ] = None,
    most: Annotated[int, typer.Option(help="Maximum number of bags.", min=1)] = 8,
) -> None:
    """Check the numerical properties of a run's model and maps.

    Padding, order, precision, chunks and saving, on your own bags. On one of them, or on a
    validation slide, whether the maps depend on the weights and keep what they claim.

    \b
    Examples:
      caprmil check runs/first
      caprmil check runs/first new_features --most 3
    """
    from caprmil.runs.check import check as measure
    from caprmil.runs.run import Run
    from caprmil.runs.source_inputs import find_slide_bags

    trained = Run(run)
    own = list(find_slide_bags(trained.facts, bags).values()) if bags else []
    paths = own or trained.bag_paths()
    fold = trained.trained_folds()[0].name
    first = trained.trained(fold)
    findings = measure(first, paths[:most])
    rows = [
        [
            finding.promise,
            "not offered" if finding.deviation is None else f"{finding.deviation:.1e}",
            "yes" if finding.holds else "NO",
        ]
        for finding in findings
    ]
    show_table(["promise", "largest deviation of an answer", "holds"], rows)
    typer.echo(f"Measured on {count(len(paths[:most]), 'bag')} with the model of {fold}.")
    maps_hold = _check_maps(trained, paths[0] if own else None)
    if not (maps_hold and all(finding.holds for finding in findings)):
        raise typer.Exit(1)


def _check_maps(run: "Run", bag: "BagFiles | None") -> bool:
    """Print the checks of the maps on a bag or a validation slide; return whether all hold."""
    from caprmil.explain.map_checks import check_maps, slide_to_check, stored_first
    from caprmil.features import bag_files
    from caprmil.models import average_slide

    fold, name, files = slide_to_check(run, bag)
    trained = run.trained(fold)
    trained = trained._replace(model=average_slide(trained.model))
    findings = check_maps(trained, bag_files.read(files), first=stored_first(run))
    rows = [
        [
            finding.map,
            finding.check,
            "not claimed" if finding.measured is None else f"{finding.measured:.1e}",
            f"{finding.bound:g}",
            "yes" if finding.holds else "NO",
        ]
        for finding in findings
    ]
    show_table(["map", "check", "measured", "at most", "holds"], rows)
    typer.echo(f"Maps of {name}, with the model of {fold}.")
    return all(finding.holds for finding in findings)


@app.command()
def models(
    in_dim: Annotated[int, typer.Option(help="Features per patch.", min=1)] = 1024,
    n_outputs: Annotated[int, typer.Option(help="Number of outputs, e.g. classes.", min=2)] = 2,
) -> None:
    """List the models, with parameters and operations.

    \b
    Examples:
      caprmil models
      caprmil models --in-dim 1536 --n-outputs 6
    """
    from caprmil.experiments import cost
    from caprmil.models import POOLS, create, list_models

    pools = [f"caprmil+{name}" for name in POOLS if name != "mean"]
    rows = []
    for name in [*list_models(), *pools]:
        model = create(name, in_dim, n_outputs)
        gigaflops = cost.flops(model, 1000) / 1e9
        rows.append([name, type(model).__name__, f"{cost.parameters(model):,}", f"{gigaflops:.3f}"])
    show_table(["name", "class", "parameters", "GFLOP, 1,000 patches"], rows)
    typer.echo("caprmil+NAME puts the context stack before any of these pools or models.")
