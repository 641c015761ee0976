"""Commands that compare models and settings: cost, sweep."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from caprmil.cli.markdown_text import show_markdown
from caprmil.cli.recipe_options import (
    Epochs,
    Folds,
    Label,
    LearningRate,
    Model,
    RecipeOrTable,
    recipe_changes,
)
from caprmil.cli.shared import (
    AllowLogger,
    Device,
    Features,
    Gpus,
    Ray,
    RayCommand,
    app,
    command_words,
    find_executor,
    name_runs,
    show_table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from caprmil.experiments.cost import Cost
    from caprmil.experiments.sweep.axes import Point
    from caprmil.experiments.sweep.runner import Outcome


@app.command()
def cost(
    models: Annotated[
        str, typer.Option(help="Models, separated by commas; default: all, or those of --run.")
    ] = "",
    run: Annotated[
        list[Path] | None,
        typer.Option(help="A finished run: its model is measured too. May be repeated."),
    ] = None,
    patches: Annotated[int, typer.Option(help="Patches per bag.", min=1)] = 1000,
    features: Annotated[int, typer.Option(help="Features per patch.", min=1)] = 1024,
    classes: Annotated[int, typer.Option(help="Number of classes.", min=2)] = 2,
    repeats: Annotated[
        int, typer.Option(help="Number of rounds; the median is reported.", min=1)
    ] = 15,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and figures; default: only print.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Measure parameters, time and memory of models.

    All models are measured on one generated bag.

    \b
    Examples:
      caprmil cost --models caprmil,abmil --patches 10000
      caprmil cost --run runs/first --out cost
    """
    from caprmil.experiments.command_log import record_command
    from caprmil.experiments.cost import compare, cost_tables
    from caprmil.io.new_files import check_new_files, new_files
    from caprmil.io.progress import bar
    from caprmil.models import average_slide, create, list_models
    from caprmil.models.device import pick_device
    from caprmil.runs.run import Run

    files = ("cost.csv", "cost.md", "cost.tex", "cost.png", "performance.png")
    if out is not None:
        check_new_files(out, files)
    opened = {name: Run(path) for path, name in name_runs(run or []).items()}
    trained = {f"{each.facts.model} ({name})": each for name, each in opened.items()}
    names = [name.strip() for name in models.split(",") if name.strip()]
    if names == ["all"] or not (names or trained):
        names = [*list_models(), "caprmil+attention", "caprmil+gated"]
    measured = {name: create(name, features, classes) for name in names}
    measured |= {
        name: average_slide(each.model(each.splits[0].name)) for name, each in trained.items()
    }
    scores = {name: each.scores for name, each in trained.items()}
    with bar("Measuring") as step:
        costs = compare(
            measured, patches, device=pick_device(device), repeats=repeats, progress=step
        )
    show_table(cost_tables.HEADER, cost_tables.rows(costs))
    for note in cost_tables.notes(costs):
        typer.echo(f"- {note}")
    if out is not None:
        with new_files(out, files) as folder:
            written = _write_costs(costs, scores, folder)
            record_command(out, command_words())  # first: a rerun does not repeat its line
        typer.echo(f"Written to {out}: {', '.join(written)}.")


def _write_costs(
    costs: "Sequence[Cost]", scores: "Mapping[str, Mapping[str, Any]]", out: Path
) -> list[str]:
    """Write tables and figures, and return their names."""
    from caprmil import figures
    from caprmil.experiments.cost import cost_tables
    from caprmil.io.atomic import write_text

    def bubble(each: "Cost", up: float, spread: float | None = None) -> figures.Bubble:
        return figures.Bubble(
            name=each.name,
            x=each.train_peak_mib,
            y=up,
            parameters=each.parameters,
            spread=float("nan") if spread is None else spread,
        )

    memory = "Peak memory of a training step (MiB)"
    pictures = {
        "cost.png": figures.bubbles(
            [bubble(each, each.train_ms) for each in costs],
            xlabel=memory,
            ylabel="Training step (ms)",
            title=f"A bag of {costs[0].n_patches:,} patches on {costs[0].device}",
        )
    }
    found = {name: run["metrics"].get("balanced_accuracy") for name, run in scores.items()}
    answers = {n: own for n, own in found.items() if own and own["mean_over_folds"] is not None}
    if answers:
        pictures["performance.png"] = figures.bubbles(
            [
                bubble(each, score["mean_over_folds"], score["std_over_folds"])
                for each in costs
                if (score := answers.get(each.name))
            ],
            xlabel=memory,
            ylabel="Balanced accuracy, mean ± std over folds",
        )
    texts = {
        "cost.csv": cost_tables.as_csv(costs),
        "cost.md": cost_tables.as_markdown(costs),
        "cost.tex": cost_tables.as_latex(costs),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    for name, picture in pictures.items():
        figures.save(picture, out / name)
    return [*texts, *pictures]


@app.command(cls=RayCommand)
def sweep(
    recipe: RecipeOrTable,
    out: Annotated[Path, typer.Option(help="Folder for the sweep: a new one, or one to resume.")],
    change: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="model.tokens=2,4,8 varies a setting, train.epochs=50 changes it for all points. "
            "A search also takes ranges: train.lr=1e-5..1e-3. May be repeated.",
        ),
    ],
    features: Features = None,
    model: Model = None,
    epochs: Epochs = None,
    folds: Folds = None,
    lr: LearningRate = None,
    label: Label = None,
    search: Annotated[
        Literal["grid", "random", "bayes"],
        typer.Option(help="All points, random points, or points that Optuna proposes."),
    ] = "grid",
    trials: Annotated[
        int | None, typer.Option(help="Maximum number of points; default: the grid, or 20.", min=1)
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Metric that chooses the best point; default: auc, or r2.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the search, not of the training.", min=0)] = 0,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Stop points with a validation loss worse than the median."),
    ] = False,
    device: Device = "auto",
    allow_logger: AllowLogger = None,
    ray: Ray = "",
    gpus_per_worker: Gpus = 1.0,
) -> None:
    """Train a recipe with many settings.

    Each point is a run. The best one is chosen on the validation parts.

    \b
    Examples:
      caprmil sweep labels.csv --features features --out sweeps/lr --set train.lr=1e-4,3e-4
      caprmil sweep caprmil --out sweeps/tokens --set model.tokens=2,4,8
    """
    from caprmil.experiments.command_log import record_command
    from caprmil.experiments.sweep.plan import read_plan
    from caprmil.experiments.sweep.pruning import Pruned
    from caprmil.experiments.sweep.results import PARTS, PointResult, show
    from caprmil.experiments.sweep.runner import run_sweep

    changes = recipe_changes(change, epochs=epochs, folds=folds, lr=lr, label=label)
    plan = read_plan(
        recipe,
        changes,
        model=model,
        features=features or None,
        search=search,
        metric=metric,
        seed=seed,
        prune=prune,
    )

    words = command_words()

    def on_point(number: int, total: int, point: "Point", outcome: "Outcome | None") -> None:
        prefix = f"{number}/{total} {point.name}: " if ray else "    "
        if outcome is None:
            record_command(out, words)
            typer.echo(f"{number}/{total} {point.name}", err=True)
        elif isinstance(outcome, Pruned):
            typer.echo(f"{prefix}pruned {outcome}", err=True)
        elif isinstance(outcome, PointResult):
            scores = [f"{part} {show(outcome.mean(part, plan.metric))}" for part in PARTS]
            seconds = f"{outcome.seconds:.0f} s"
            typer.echo(f"{prefix}{plan.metric} on {', on '.join(scores)}; {seconds}", err=True)
        else:
            typer.secho(f"{prefix}failed: {outcome}", err=True, fg="red")

    progress = sys.stderr.isatty()  # in a log file, a line for each point is enough
    with find_executor(ray, device, gpus_per_worker) as executor:
        results = run_sweep(
            plan,
            out,
            trials=trials,
            device=device,
            progress=progress,
            on_point=on_point,
            executor=executor,
            allow_loggers=allow_logger or (),
        )
    show_markdown(results.as_markdown())
    if results.points:
        files = ", ".join(results.files.values())
        typer.echo(f"Written to {out}: {files}, and the runs in points/.")
    if results.failures:
        raise typer.Exit(2)
