"""The page of the benchmark of speed: targets, tables and plots, from the rows that were kept."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from caprmil import figures
from caprmil.figures.style import COLOURS, GREY, log_scale, new_figure, tidy
from caprmil.models import caprmil
from sides import (
    GROUPS,
    KEEP,
    LIMIT,
    PEERS,
    PLAIN,
    READ,
    SIDES,
    STREAM,
    STREAMED,
    STREAMED_KEEPING,
    WHOLE,
    Group,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from speed import Result, Settings

PROFILE = "profile"
MIB = 2**20
LINES = (
    *("caprmil", PLAIN, LIMIT, "mean", "abmil", "clam", "dsmil", "dtfd"),
    *("transmil", "dgrmil", "bayesmil", "sgpmil"),
)
"""Who is drawn, in this order of colours."""


class Figures:
    """What was measured, to be asked for by group, side, size and work; None if it was not."""

    def __init__(self, results: Sequence["Result"]) -> None:
        self.results = {result.job: result for result in results}  # of a job measured twice: last

    def ask(self, what: str, side: str, n: int, work: str, group: str = "") -> float | None:
        """Return a figure of a side; the group is the first that measured it, if none is named."""
        for job, result in self.results.items():
            wanted = job.group == group if group else job.group != PROFILE
            if wanted and (job.patches, job.work) == (n, work) and side in result.sides:
                value = result.sides[side].get(what)
                return None if value is None or math.isnan(value) else value
        return None

    def ratio(
        self, what: str, above: str, below: str, n: int, work: str, group: str
    ) -> "Ratio | None":
        """Return one side's figure by another's of the same group; times, round by round.

        A round is short, so a busy minute strikes both of its sides; that is steadier than the
        ratio of two medians.
        """
        one, other = (self.ask(what, side, n, work, group) for side in (above, below))
        if not one or not other:
            return None
        if what != "cpu":
            return Ratio(one / other, one / other, one / other)
        turns = next(r.turns for job, r in self.results.items() if job == (group, n, work))
        rounds = np.divide(turns[above], turns[below])
        low, middle, high = np.quantile(rounds, [0.25, 0.5, 0.75])
        return Ratio(float(middle), float(low), float(high))


class Ratio(NamedTuple):
    """A ratio, and the quartiles of it over the rounds."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        if f"{self.low:.2f}" == f"{self.high:.2f}":
            return f"{self.middle:.2f}"
        return f"{self.middle:.2f} [{self.low:.2f} to {self.high:.2f}]"


@dataclass(frozen=True)
class Target:
    """What we aim at: a figure, and on which side of its bound it must lie."""

    text: str
    bound: float
    at_least: bool
    figures: dict[str, Ratio | None]

    def row(self) -> list[str]:
        known = {place: ratio for place, ratio in self.figures.items() if ratio is not None}
        told = ", ".join(f"{ratio} ({place})" for place, ratio in known.items())
        verdicts = dict.fromkeys(map(self.verdict, known.values()))  # each once
        return [self.text, told or "not measured", ", ".join(verdicts) or "-"]

    def verdict(self, ratio: Ratio) -> str:
        """Say nothing for sure where the bound lies within the quartiles."""
        if ratio.low < self.bound < ratio.high:
            return "within the noise"
        met = ratio.middle >= self.bound if self.at_least else ratio.middle <= self.bound
        return "met" if met else "**not met**"


def targets(found: Figures) -> list[Target]:
    """Return the targets beside what was measured, in CPU time on one thread."""

    def at(
        what: str, above: str, below: str, work: str, group: str, sizes: Sequence[int] = MIDDLE
    ) -> dict[str, Ratio | None]:
        return {f"{n:,}": found.ratio(what, above, below, n, work, group) for n in sizes}

    def growth(side: str, work: str) -> dict[str, Ratio | None]:
        small, large = (found.ask("cpu", side, n, work, "caprmil") for n in (50_000, 200_000))
        if not small or not large:
            return {f"{side}, {work}": None}
        low, high = (
            found.ask(one, side, 200_000, work, "caprmil") or large
            for one in ("cpu_low", "cpu_high")
        )
        ratio = Ratio(large / (4 * small), low / (4 * small), high / (4 * small))
        return {f"{side}, {work}": ratio}

    cpu, peak, group = "cpu", "peak", "caprmil"
    peers = {
        f"{name}, {work}": found.ratio(cpu, name, peer, 10_000, work, name)
        for name, peer in PEERS.items()
        for work in ("look", "train")
    }
    asked = {place: value for place, value in peers.items() if not place.startswith(("ds", "dt"))}
    return [
        Target("looking: times faster than the plain form, 1.8 at least", 1.8, True,
               at(cpu, PLAIN, "caprmil", "look", group)),
        Target("looking: times the limit, 1.35 at most", 1.35, False,
               at(cpu, "caprmil", LIMIT, "look", group)),
        Target("training step, memory by size: times faster than the plain form, 1.4 at least",
               1.4, True, at(cpu, PLAIN, "caprmil", "train", group)),
        Target("training step, memory whole: times faster than the plain form, 1.4 at least",
               1.4, True, at(cpu, PLAIN, WHOLE, "train", group)),
        Target("training, memory by size: memory of the plain form's, 0.5 at most", 0.5, False,
               at(peak, "caprmil", PLAIN, "train", group)),
        Target("training, memory whole: memory of the plain form's, 0.5 at most", 0.5, False,
               at(peak, WHOLE, PLAIN, "train", group)),
        Target("200,000 patches against four times 50,000: 1.1 at most", 1.1, False,
               growth("caprmil", "look") | growth("caprmil", "train")),
        Target("the same of the limit, which is as linear as the machine", 1.1, False,
               growth(LIMIT, "look") | growth(LIMIT, "train")),
        *(
            Target(f"{how}: times {told}, 1.3 at most", 1.3, False,
                   at(cpu, side, other, "look", "disk"))
            for how, side in (("streamed, patches kept", STREAMED_KEEPING),
                              ("streamed, nothing kept", STREAMED))
            for told, other in (("in memory", "caprmil"), ("the same file read whole", READ))
        ),
        Target("memory keep: times the plain step, 1.4 at most", 1.4, False,
               at(cpu, KEEP, PLAIN, "train", "memory")),
        Target("memory keep: memory of the plain form's, 0.5 at most", 0.5, False,
               at(peak, KEEP, PLAIN, "train", "memory")),
        Target("memory stream: times the plain step, 2.3 at most", 2.3, False,
               at(cpu, STREAM, PLAIN, "train", "memory")),
        Target("ABMIL, CLAM, TransMIL at 10,000: times torchmil's, 1 at most", 1.0, False, asked),
    ]  # fmt: skip


MIDDLE = (10_000, 50_000)  # the sizes that the targets are for


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(
    found: Figures, sizes: Sequence[int], work: str, what: str, show: Callable[[float], str]
) -> str:
    """Return a table of every side that was measured, a column for each size."""
    rows = []
    for side in SIDES:
        values = [found.ask(what, side, n, work) for n in sizes]
        if any(value is not None for value in values):
            rows.append([side, *("-" if value is None else show(value) for value in values)])
    return markdown(["", *(f"{n:,}" for n in sizes)], rows)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def mebibytes(n: float) -> str:
    return f"{n / MIB:,.0f}" if n >= 10 * MIB else f"{n / MIB:.1f}"


def against_torchmil(found: Figures, sizes: Sequence[int]) -> str:
    """Return how many times of torchmil's time and memory ours needs."""
    rows = []
    for name, peer in PEERS.items():
        for work in ("look", "train"):
            figures = [found.ratio("cpu", name, peer, n, work, name) for n in sizes]
            memory = [found.ratio("peak", name, peer, n, work, name) for n in sizes]
            cells = [
                "-" if one is None or other is None else f"{one} / {other}"
                for one, other in zip(figures, memory, strict=True)
            ]
            if set(cells) != {"-"}:
                rows.append([f"{name}, {work}", *cells])
    return markdown(["time / memory", *(f"{n:,}" for n in sizes)], rows)


def parts_table(found: Figures, n: int) -> str:
    """Return where the time goes, part by part, the largest first."""
    columns = {
        f"{side}, {work}": result.sides[side]
        for job, result in found.results.items()
        if job.group == PROFILE and job.patches == n
        for work in [job.work]
        for side in result.sides
    }
    names = {part for column in columns.values() for part in column}
    order = sorted(names, key=lambda part: -max(own.get(part, 0.0) for own in columns.values()))
    rows = [
        [
            part,
            *(
                f"{1e3 * own.get(part, 0.0):.1f} ({own.get(part, 0.0) / sum(own.values()):.0%})"
                for own in columns.values()
            ),
        ]
        for part in order
    ]
    total = ["**sum**", *(f"{1e3 * sum(own.values()):.1f}" for own in columns.values())]
    return markdown(["", *columns], [*rows, total])


def plot(
    found: Figures, sizes: Sequence[int], what: str, unit: float, titles: tuple[str, str], up: str
) -> "Figure":
    """Draw a figure over the size of the bag, both axes logarithmic, for looking and training."""
    figure = new_figure(9.6, 4.4)
    panels = figure.subplots(1, 2)
    for axes, work, title in zip(panels, ("look", "train"), titles, strict=True):
        tidy(axes, title=title, xlabel="patches in the bag", ylabel=up)
        for number, side in enumerate(LINES):
            if what == "peak" and side == LIMIT:  # which has all its memory before
                continue
            points = [(n, found.ask(what, side, n, work)) for n in sizes]
            known = [(n, value / unit) for n, value in points if value]
            if not known:
                continue
            style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "lw": 1.4}
            if side == "caprmil":
                style["lw"] = 2.8
            elif side == LIMIT:
                style |= {"color": GREY, "ls": (0, (4, 3))}
            elif number >= len(COLOURS):
                style["ls"] = (0, (1, 1))
            across, values = zip(*known, strict=True)
            axes.plot(across, values, marker="o", ms=4, label=side, **style)
        log_scale(axes, "x", subs=(1.0,))
        log_scale(axes, "y", subs=(1.0,))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    handles: dict[str, Any] = {}
    for axes in panels:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(
        list(handles.values()), list(handles), loc="outside right upper", frameon=False, fontsize=9
    )
    return figure


def told_most(group: Group, largest: int) -> str:
    """Say how large the bags of a group are at most, where they are not the largest of all."""
    words = {"look": "looking", "train": "training"}
    limits = {words[work]: most for work, most in group.most.items() if most < largest}
    return ", ".join(
        f"{work} up to {most:,} patches" if most else f"no {work}" for work, most in limits.items()
    )


def report(results: Sequence["Result"], settings: "Settings", out: Path, command: str) -> str:
    """Write the plots beside the page, and return its tables."""
    found = Figures(results)
    sizes = sorted({job.patches for job in found.results if job.group != PROFILE})
    times, memory = (out.with_name(f"{out.stem}-{name}.png") for name in ("time", "memory"))
    titles = ("One look at a bag", "One training step")
    figures.save(plot(found, sizes, "cpu", 1e-3, titles, "CPU ms, one thread"), times, replace=True)
    figures.save(plot(found, sizes, "peak", MIB, titles, "peak MiB"), memory, replace=True)
    codes = {result.code for result in found.results.values()}
    mixed = "" if len(codes) < 2 else (
        f"\nThese rows were measured with {len(codes)} different states of the models' code: "
        "measure anew (`--again`) before quoting them.\n"
    )  # fmt: skip
    spread = [
        (each["cpu_high"] - each["cpu_low"]) / each["cpu"]
        for job, result in found.results.items()
        if job.group != PROFILE
        for each in result.sides.values()
        if each["cpu"]
    ]
    noise = f"{100 * sorted(spread)[len(spread) // 2]:.0f} %" if spread else "unknown"
    smaller = "\n".join(
        f"- {'; '.join(group.sides)}: {told_most(group, max(settings.sizes))}"
        for group in GROUPS.values()
        if min(group.most.values()) < max(settings.sizes)
    )
    peers = "" if any(side in r.sides for r in results for side in PEERS.values()) else (
        "\ntorchmil could not be imported when this was measured, so its models are not in the "
        "tables.\n"
    )  # fmt: skip
    seconds = sum(result.seconds for result in found.results.values())
    return f"""```bash
{command}
```

One bag of {settings.in_dim:,} features a patch, fp32, torch {torch.__version__},
{os.cpu_count()} cores without a GPU. Each job had a process of its own. Sides that are compared
took turns in {settings.rounds[0]} to {settings.rounds[1]} rounds; what stands here are medians.
The quartiles of CPU time lie {noise} apart (median over all rows). It took {seconds / 60:.0f}
minutes.
{mixed}{peers}
### Targets

In CPU time on one thread, and peak memory. Ratios of times are medians over the rounds, with their
quartiles; a bound between the quartiles is neither met nor missed.

{markdown(["target", "measured", ""], [target.row() for target in targets(found)])}

Training has one default, memory by size: up to {caprmil.WHOLE:,} patches all is kept (`whole`),
beyond that patches are worked out again (`keep`, then `stream`).
torchmil has no DGRMIL, and the fact sheet has no time for it, so it has no target here.

The limit is the time of the two products that no evaluation can do without, into the projection and
into the MLP, done piece by piece into memory that is there already, plus reading the features once.
In training, their three gradients come on top. The plain form is the paper's equations written
directly (`benchmarks/plain.py`).

![Time over the size of the bag]({times.name})

### CPU time on one thread, ms

Looking: an answer without gradients, with attention and assignments. It is the same work for
`caprmil` and `{WHOLE}`: what lies between these two rows is noise.

{table(found, sizes, "look", "cpu", milliseconds)}

A training step: forward, loss, backward, AdamW.

{table(found, sizes, "train", "cpu", milliseconds)}

So that a run ends within twenty minutes, these stop at smaller bags:

{smaller}

### Wall time on two threads, ms

Looking:

{table(found, sizes, "look", "wall", milliseconds)}

A training step:

{table(found, sizes, "train", "wall", milliseconds)}

### Peak memory, MiB

Beyond the parameters and the bag, counted tensor by tensor; in training, gradients are part of it.

![Memory over the size of the bag]({memory.name})

Looking:

{table(found, sizes, "look", "peak", mebibytes)}

A training step. `{WHOLE}`, `{KEEP}` and `{STREAM}` are the settings of `train.memory`; `caprmil`
chooses by the size of the bag.

{table(found, sizes, "train", "peak", mebibytes)}

### Beside torchmil

Times of torchmil's CPU time and memory that ours needs: below 1, ours is quicker or smaller.
torchmil's models have the sizes of ours, and less to do: one logit, no attention maps or patch
scores in the answer, and no output map and value convolution in TransMIL, no dropout in the
attention of CLAM.

{against_torchmil(found, sizes)}

### Where the time goes

{settings.profiled:,} patches, one thread, ms: torch's profiler, whose clock is the wall's.

{parts_table(found, settings.profiled)}
"""
