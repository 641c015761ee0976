"""What reproductions, sweeps and cost tables exist below some folders, read from their files.

Nothing is trained or measured here. A number that no file has stays None, and is blank in tables.
"""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf, nan
from pathlib import Path
from typing import Any, Literal

from caprmil.errors import RunError, count, shorten
from caprmil.experiments import cost, paper
from caprmil.experiments.command_log import read_commands
from caprmil.experiments.cost import Cost
from caprmil.experiments.reproduce import PROTOCOLS
from caprmil.experiments.reproduce.reproduction import PROTOCOL_FILE
from caprmil.experiments.sweep import PLAN, POINTS
from caprmil.experiments.sweep.results import SweepResults, paper_ablation
from caprmil.experiments.sweep.saved_results import read_results
from caprmil.features.description import GENERATED
from caprmil.io.json_files import read_json
from caprmil.io.paths import require_local
from caprmil.runs.facts import FACTS
from caprmil.runs.run import Run
from caprmil.runs.timing import mean_or_none, read_timing

COSTS = "cost.csv"


@dataclass(frozen=True, kw_only=True)
class Bags:
    """The bags that models were trained on."""

    encoder: str | None
    width: int
    mpp: float | None
    slides: int

    @staticmethod
    def of(run: Run) -> "Bags":
        facts = run.facts
        return Bags(encoder=facts.encoder, width=facts.in_dim, mpp=facts.mpp, slides=len(run.paths))

    @property
    def generated(self) -> bool:
        """Whether they were generated, e.g. for a rehearsal."""
        return self.encoder == GENERATED

    def __str__(self) -> str:
        encoder = "generated" if self.generated else f"encoder {self.encoder or 'not known'}"
        scale = f"{self.mpp:g} um/px" if self.mpp else "scale not known"
        return f"{encoder}, {self.width:,} features, {scale}"


@dataclass(frozen=True, kw_only=True)
class GatheredModel:
    """A finished run of a reproduction: its scores, and its time and memory if they are known."""

    model: str
    bags: Bags
    folder: Path
    folds: int
    test_slides: int
    scores: Mapping[str, paper.Figure]
    parameters: int
    epoch_seconds: float | None
    """Mean over all epochs of all folds."""
    test_seconds: float | None
    """Mean over folds."""
    peak_mib: float | None
    """Of an epoch; mean over all epochs of all folds."""
    devices: tuple[str, ...]
    published: paper.Ablation | None = None
    """The row of the paper's ablation table that has this model."""

    @staticmethod
    def from_run(run: Run) -> "GatheredModel":
        timings = [read_timing(run.fold_folder(fold.name)) for fold in run.splits]
        epochs = [epoch for timing in timings for epoch in timing.epochs]
        tests = [timing.test for timing in timings if timing.test]
        metrics, model = run.scores["metrics"], run.model(run.splits[0].name)
        return GatheredModel(
            model=run.folder.name,
            bags=Bags.of(run),
            folder=run.folder.parent,
            folds=len(run.splits),
            test_slides=len(run.splits[0].test),
            scores={name: _figure(metric) for name, metric in metrics.items()},
            parameters=cost.parameters(model),
            epoch_seconds=mean_or_none(epoch.seconds for epoch in epochs),
            test_seconds=mean_or_none(test.seconds for test in tests),
            peak_mib=mean_or_none(epoch.peak_mib for epoch in epochs),
            devices=tuple(dict.fromkeys([*(e.device for e in epochs), *(t.device for t in tests)])),
            published=paper_ablation(model),
        )


def _figure(metric: Mapping[str, Any]) -> paper.Figure:
    mean, std = metric["mean_over_folds"], metric["std_over_folds"]
    return paper.Figure(nan if mean is None else mean, nan if std is None else std)


@dataclass(frozen=True, kw_only=True)
class GatheredSweep:
    """The results of a sweep, and the bags of its runs."""

    folder: Path
    results: SweepResults
    bags: Bags | None


@dataclass(frozen=True, kw_only=True)
class GatheredCosts:
    """A table of costs."""

    folder: Path
    costs: Sequence[Cost]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a column of ours is from: a folder, what is in it, and the commands that wrote it."""

    kind: Literal["reproduction", "sweep", "costs"]
    title: str
    folder: Path
    content: str
    commands: Sequence[str]
    bags: Bags | None = None

    @property
    def made_by(self) -> str:
        """The commands, or that they are not known."""
        return "; ".join(self.commands) or "not recorded (made in Python, or by an earlier version)"

    def __str__(self) -> str:
        bags = f" Bags: {self.bags}." if self.bags else ""
        warning = " The bags are generated: the scores mean nothing." if self.generated else ""
        return f"{self.title}: {self.content}.{bags}{warning} Command: {self.made_by}"

    @property
    def generated(self) -> bool:
        """Whether the bags were generated."""
        return self.bags is not None and self.bags.generated


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Everything that was found."""

    models: Mapping[str, Mapping[str, GatheredModel]] = field(default_factory=dict)
    """By protocol and model."""
    sweeps: Sequence[GatheredSweep] = ()
    costs: Sequence[GatheredCosts] = ()
    notes: Sequence[str] = ()

    def sources(self) -> list[Source]:
        """Return the folders, in the order of the tables: a number refers to a position here."""
        return [*self._reproductions(), *map(_sweep_source, self.sweeps), *self._cost_tables()]

    def _reproductions(self) -> Iterator[Source]:
        for protocol, models in self.models.items():
            by_bags: dict[tuple[Path, Bags], list[GatheredModel]] = {}
            for each in models.values():
                by_bags.setdefault((each.folder, each.bags), []).append(each)
            for (folder, bags), own in by_bags.items():
                names = ", ".join(each.model for each in own)
                devices = dict.fromkeys(device for each in own for device in each.devices)
                content = (
                    f"{names}; {bags.slides:,} slides, {count(own[0].folds, 'fold')}, "
                    f"{own[0].test_slides:,} test slides in a fold"
                )
                yield Source(
                    kind="reproduction",
                    title=PROTOCOLS[protocol].title,
                    folder=folder,
                    content="; ".join(filter(None, [content, " and ".join(devices)])),
                    commands=read_commands(folder),
                    bags=bags,
                )

    def _cost_tables(self) -> Iterator[Source]:
        for each in self.costs:
            first = each.costs[0]
            yield Source(
                kind="costs",
                title="Parameters, FLOPs and memory of a step",
                folder=each.folder,
                content=f"a random bag of {first.n_patches:,} patches of {first.in_dim:,} "
                f"features, on {first.device}",
                commands=read_commands(each.folder),
            )

    def numbers_of(self, kind: str, folders: Iterable[Path]) -> tuple[int, ...]:
        """Return the numbers of the sources of a kind in these folders, from 1."""
        wanted = {(kind, folder) for folder in folders}
        numbered = enumerate(self.sources(), 1)
        return tuple(n for n, each in numbered if (each.kind, each.folder) in wanted)


def _sweep_source(sweep: GatheredSweep) -> Source:
    plan = sweep.results.plan
    axes = ", ".join(f"{key} = {text}" for key, text in plan.axes.items())
    points = count(len(sweep.results.points), "point")
    slides = f"; {sweep.bags.slides:,} slides" if sweep.bags else ""
    return Source(
        kind="sweep",
        title="Sweep",
        folder=sweep.folder,
        content=f"{plan.recipe.model.name} over {axes}; {points}{slides}",
        commands=read_commands(sweep.folder),
        bags=sweep.bags,
    )


def gather(folders: Sequence[str | Path]) -> Gathered:
    """Return what was written by reproduce, sweep and cost in these folders and below them."""
    reproductions: dict[Path, str] = {}
    sweeps: dict[Path, GatheredSweep] = {}
    costs: dict[Path, GatheredCosts] = {}
    for given in map(require_local, folders):
        if not given.is_dir():
            raise RunError(f"There is no folder {given}.")
        found = list(_walk(given))
        if not found:
            raise RunError(
                f"Neither {given} nor a folder below it was written by `caprmil reproduce`, "
                "`sweep` or `cost --out`. Name a folder that was their --out, or one above."
            )
        for kind, folder, detail in found:
            if kind == "reproduction":
                reproductions.setdefault(folder, detail)
            elif kind == "sweep" and folder not in sweeps:
                sweeps[folder] = _read_sweep(folder)
            elif kind == "costs" and folder not in costs:
                costs[folder] = GatheredCosts(folder=folder, costs=read_costs(folder / COSTS))
    models, notes = _choose(reproductions)
    return Gathered(
        models=models, sweeps=list(sweeps.values()), costs=list(costs.values()), notes=notes
    )


def _walk(top: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield kind, folder and protocol of what is in a folder. Runs and sweeps are not entered."""
    for parent, names, files in os.walk(top.resolve()):
        folder = Path(parent)
        if PLAN in files:
            yield "sweep", folder, ""
            names.clear()
            continue
        if FACTS in files:  # a run
            names.clear()
            continue
        if COSTS in files:
            yield "costs", folder, ""
        if protocol := _find_protocol(folder, files):
            yield "reproduction", folder, protocol
        names[:] = sorted(name for name in names if not name.startswith("."))


def _find_protocol(folder: Path, files: Sequence[str]) -> str:
    """Return the protocol of a reproduction, or "". Earlier versions have it in a title only."""
    if PROTOCOL_FILE in files:
        name = str(read_json(folder / PROTOCOL_FILE).get("protocol", ""))
        return name if name in PROTOCOLS else ""
    if not {"table.md", "table.csv", "cohort.csv"} <= set(files):
        return ""
    text = (folder / "table.md").read_bytes().decode("utf-8", errors="replace")
    first = text.partition("\n")[0]
    titles = {f"# {protocol.title}": name for name, protocol in PROTOCOLS.items()}
    return titles.get(first.strip(), "")


def _choose(
    reproductions: Mapping[Path, str],
) -> tuple[dict[str, dict[str, GatheredModel]], list[str]]:
    """Return one run for each protocol and model. Generated bags give way to real ones."""
    found: dict[str, list[GatheredModel]] = {name: [] for name in PROTOCOLS}
    notes = []
    for folder, protocol in reproductions.items():
        unfinished = []
        for path in sorted(folder.glob(f"*/{FACTS}")):
            run = Run(path.parent)
            if run.finished:
                found[protocol].append(GatheredModel.from_run(run))
            else:
                unfinished.append(path.parent.name)
        if unfinished:
            notes.append(f"Not finished, and left out: {shorten(unfinished)} in {folder}.")
    chosen: dict[str, dict[str, GatheredModel]] = {}
    for protocol, runs in found.items():
        real = [each for each in runs if not each.bags.generated]
        if real and len(real) < len(runs):
            left = sorted({str(each.folder) for each in runs if each.bags.generated})
            title = PROTOCOLS[protocol].title
            notes.append(f"{title}: runs on generated bags are left out: {shorten(left)}.")
        for each in real or runs:
            own = chosen.setdefault(protocol, {})
            if each.model in own:
                raise RunError(
                    f"{each.model} was run on {PROTOCOLS[protocol].title} twice: in "
                    f"{own[each.model].folder} and in {each.folder}. Name the folder that is meant."
                )
            own[each.model] = each
    return chosen, notes


def _read_sweep(folder: Path) -> GatheredSweep:
    first = next(iter(sorted((folder / POINTS).glob(f"*/{FACTS}"))), None)
    bags = Bags.of(Run(first.parent)) if first else None
    return GatheredSweep(folder=folder, results=read_results(folder), bags=bags)


def read_costs(path: Path) -> list[Cost]:
    """Return the costs that `caprmil cost --out` wrote as CSV."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        if not rows:
            raise ValueError("no rows")
        return [_cost(row) for row in rows]
    except (ValueError, TypeError, csv.Error) as problem:
        raise RunError(
            f"{path} is not a table of costs of this version: {problem}. Measure again with "
            "`caprmil cost --out`, or move this one away."
        ) from problem


def _cost(row: Mapping[str, str | None]) -> Cost:
    values: dict[str, Any] = {}
    for each in fields(Cost):
        cell = row.get(each.name)
        if cell is None:
            raise ValueError(f"no column {each.name}")
        values[each.name] = each.type(cell) if isinstance(each.type, type) else cell
        if isinstance(values[each.name], (int, float)) and not 0 <= values[each.name] < inf:
            raise ValueError(f"{each.name} is {cell}")
    return Cost(**values)
