"""The paper's bubble plots and ablation plots, from the runs, sweeps and cost tables that exist."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from caprmil import figures
from caprmil.experiments.gathered_runs import Gathered, GatheredCosts, GatheredModel, GatheredSweep
from caprmil.experiments.reproduce import PROTOCOLS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = "balanced_accuracy"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure with the name of its files, a title, and what it shows."""

    name: str
    title: str
    remark: str
    figure: "Figure"
    sources: tuple[int, ...]


def draw_bubbles(gathered: Gathered) -> list[Drawn]:
    """Return memory against time and against balanced accuracy, for each cohort with runs.

    Memory is that of the training if it is known, or else that of one step in a cost table. If
    neither is known for a model, it is left out.
    """
    drawn = [each for p, m in gathered.models.items() for each in _of_protocol(gathered, p, m)]
    return drawn or [_of_costs(gathered, number, each) for number, each in _tables(gathered)]


def _tables(gathered: Gathered) -> Iterator[tuple[int, GatheredCosts]]:
    return ((n, each) for n, each in enumerate(gathered.costs, 1) if each.costs)


def _of_protocol(
    gathered: Gathered, protocol: str, models: Mapping[str, GatheredModel]
) -> Iterator[Drawn]:
    memory = {name: m.peak_mib for name, m in models.items() if m.peak_mib is not None}
    label = "Peak memory in training (MiB), mean over epochs"
    numbers: tuple[int, ...] = ()
    if not memory and gathered.costs:
        table = gathered.costs[0]
        memory = {each.name: each.train_peak_mib for each in table.costs if each.name in models}
        label = f"Peak memory of a step (MiB), a bag of {table.costs[0].n_patches:,} patches"
        numbers = gathered.numbers_of("costs", [table.folder])
    own = [models[name] for name in memory]
    numbers = (*gathered.numbers_of("reproduction", {each.folder for each in own}), *numbers)
    title = PROTOCOLS[protocol].title
    if timed := [each for each in own if each.epoch_seconds is not None]:
        yield Drawn(
            name=f"{protocol}-time",
            title=f"{title}: memory and time",
            remark="Area: parameters of the trained model.",
            figure=_bubbles(timed, memory, "epoch_seconds", label, "Training epoch (s)"),
            sources=numbers,
        )
    if scored := [each for each in own if ACCURACY in each.scores]:
        yield Drawn(
            name=f"{protocol}-accuracy",
            title=f"{title}: memory and balanced accuracy",
            remark="Bars: standard deviation over folds. Area: parameters of the trained model.",
            figure=_bubbles(scored, memory, ACCURACY, label, "Balanced accuracy"),
            sources=numbers,
        )


def _bubbles(
    models: Sequence[GatheredModel], memory: Mapping[str, float], what: str, x: str, y: str
) -> "Figure":
    found = []
    for each in models:
        mean, std = each.scores[what] if what == ACCURACY else (each.epoch_seconds, float("nan"))
        assert mean is not None
        found.append(
            figures.Bubble(
                name=each.model,
                x=memory[each.model],
                y=mean,
                parameters=each.parameters,
                spread=std,
            )
        )
    return figures.bubbles(found, xlabel=x, ylabel=y)


def _of_costs(gathered: Gathered, number: int, table: GatheredCosts) -> Drawn:
    first = table.costs[0]
    found = [
        figures.Bubble(name=e.name, x=e.train_peak_mib, y=e.train_ms, parameters=e.parameters)
        for e in table.costs
    ]
    return Drawn(
        name=f"cost-{number}",
        title=f"Memory and time of a training step, a bag of {first.n_patches:,} patches",
        remark=f"Random features, on {first.device}. Area: parameters.",
        figure=figures.bubbles(
            found, xlabel="Peak memory of a training step (MiB)", ylabel="Training step (ms)"
        ),
        sources=gathered.numbers_of("costs", [table.folder]),
    )


def draw_grids(gathered: Gathered) -> list[Drawn]:
    """Return the plots of each sweep. A grid of two settings is drawn over each of them."""
    return [
        drawn
        for number, sweep in enumerate(gathered.sweeps, 1)
        if sweep.results.points
        for drawn in _of_sweep(gathered, number, sweep)
    ]


def _of_sweep(gathered: Gathered, number: int, sweep: GatheredSweep) -> Iterator[Drawn]:
    results, titles = sweep.results, list(sweep.results.plan.space.titles.values())
    numbers = gathered.numbers_of("sweep", [sweep.folder])
    if results.plan.search != "grid" or len(titles) > 2:
        yield Drawn(
            name=f"sweep-{number}",
            title=f"{', '.join(titles)} of {results.plan.recipe.model.name}",
            remark="",
            figure=results.figure(),
            sources=numbers,
        )
        return
    orders = [(titles, results)]
    if len(titles) == 2:
        swapped = replace(results.plan, axes=dict(reversed(list(results.plan.axes.items()))))
        orders.append((titles[::-1], results.in_order_of(swapped)))
    for names, ordered in orders:
        fixed = f", for each value of {names[1]}" if len(names) == 2 else ""
        yield Drawn(
            name=f"sweep-{number}-{names[0]}",
            title=f"{names[0]} of {results.plan.recipe.model.name}{fixed}",
            remark="",
            figure=ordered.figure(),
            sources=numbers,
        )
