"""The page of the benchmark of speed: targets, tables and plots of the stored results."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from caprmil import figures
from caprmil.figures.style import COLOURS, GREY, log_scale, new_figure, tidy
from caprmil.models.recompute import WHOLE as WHOLE_UP_TO
from speed_targets import PROFILE, Figures, targets
from speed_variants import GROUPS, KEEP, LIMIT, PEERS, PLAIN, STREAM, VARIANTS, WHOLE, Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from speed import Result, Settings

MIB = 2**20
LINES = (
    *("caprmil", PLAIN, LIMIT, "mean", "abmil", "clam", "dsmil", "dtfd"),
    *("transmil", "dgrmil", "bayesmil", "sgpmil"),
)
"""Variants in the plots, in the order of the colours."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(
    found: Figures, sizes: Sequence[int], work: str, what: str, show: Callable[[float], str]
) -> str:
    """Return a table of all measured variants, with a column per size."""
    rows = []
    for variant in VARIANTS:
        values = [found.get(what, variant, n, work) for n in sizes]
        if any(value is not None for value in values):
            rows.append([variant, *("-" if value is None else show(value) for value in values)])
    return markdown(["", *(f"{n:,}" for n in sizes)], rows)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def mebibytes(n: float) -> str:
    return f"{n / MIB:,.0f}" if n >= 10 * MIB else f"{n / MIB:.1f}"


def against_torchmil(found: Figures, sizes: Sequence[int]) -> str:
    """Return the ratios of our time and memory to those of torchmil."""
    rows = []
    for name, peer in PEERS.items():
        for work in ("infer", "train"):
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
    """Return the time of each part, the largest first."""
    columns = {
        f"{variant}, {work}": result.figures[variant]
        for job, result in found.results.items()
        if job.group == PROFILE and job.patches == n
        for work in [job.work]
        for variant in result.figures
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
    """Return a plot over the size of the bag, for inference and training, both axes logarithmic."""
    figure = new_figure(9.6, 4.4)
    panels = figure.subplots(1, 2)
    for axes, work, title in zip(panels, ("infer", "train"), titles, strict=True):
        tidy(axes, title=title, xlabel="patches in the bag", ylabel=up)
        for number, variant in enumerate(LINES):
            if what == "peak" and variant == LIMIT:  # its memory is allocated before
                continue
            points = [(n, found.get(what, variant, n, work)) for n in sizes]
            known = [(n, value / unit) for n, value in points if value]
            if not known:
                continue
            style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "lw": 1.4}
            if variant == "caprmil":
                style["lw"] = 2.8
            elif variant == LIMIT:
                style |= {"color": GREY, "ls": (0, (4, 3))}
            elif number >= len(COLOURS):
                style["ls"] = (0, (1, 1))
            across, values = zip(*known, strict=True)
            axes.plot(across, values, marker="o", ms=4, label=variant, **style)
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


def size_limits(group: Group, largest: int) -> str:
    """Return the largest bags of a group, where they are smaller than the largest of all."""
    names = {"infer": "inference", "train": "training"}
    limits = {names[work]: most for work, most in group.largest.items() if most < largest}
    return ", ".join(
        f"{work} up to {most:,} patches" if most else f"no {work}" for work, most in limits.items()
    )


def report(results: Sequence["Result"], settings: "Settings", out: Path, command: str) -> str:
    """Write the plots next to the page, and return its tables."""
    found = Figures(results)
    own = {PROFILE, *(name for name, group in GROUPS.items() if group.only)}
    sizes = sorted({job.patches for job in found.results if job.group not in own})
    times, memory = (out.with_name(f"{out.stem}-{name}.png") for name in ("time", "memory"))
    titles = ("Inference on one bag", "One training step")
    figures.save(plot(found, sizes, "cpu", 1e-3, titles, "CPU ms, one thread"), times, replace=True)
    figures.save(plot(found, sizes, "peak", MIB, titles, "peak MiB"), memory, replace=True)
    codes = {result.code for result in found.results.values()}
    mixed = "" if len(codes) < 2 else (
        f"\nThese rows were measured with {len(codes)} different states of the models' code: "
        "measure them again (`--again`) before quoting them.\n"
    )  # fmt: skip
    spread = [
        (each["cpu_high"] - each["cpu_low"]) / each["cpu"]
        for job, result in found.results.items()
        if job.group != PROFILE
        for each in result.figures.values()
        if each["cpu"]
    ]
    noise = f"{100 * sorted(spread)[len(spread) // 2]:.0f} %" if spread else "unknown"
    smaller = "\n".join(
        f"- {'; '.join(group.variants)}: {size_limits(group, max(settings.sizes))}"
        for group in GROUPS.values()
        if not group.only and min(group.largest.values()) < max(settings.sizes)
    )
    peers = "" if any(peer in r.figures for r in results for peer in PEERS.values()) else (
        "\ntorchmil could not be imported when this was measured, so its models are not in the "
        "tables.\n"
    )  # fmt: skip
    seconds = sum(result.seconds for result in found.results.values())
    return f"""```bash
{command}
```

One bag with {settings.in_dim:,} features per patch, fp32, torch {torch.__version__},
{os.cpu_count()} cores without a GPU. Each job ran in a new process. Variants that are compared
alternated in {settings.rounds[0]} to {settings.rounds[1]} rounds; the tables have medians.
The quartiles of CPU time are {noise} apart (median over all rows). It took {seconds / 60:.0f}
minutes.
{mixed}{peers}
### Targets

In CPU time on one thread, and peak memory. Ratios of times are medians over the rounds, with their
quartiles. If the bound is between the quartiles, the verdict is "within the noise".

{markdown(["target", "measured", ""], [target.row() for target in targets(found)])}

By default, training keeps all activations of bags up to {WHOLE_UP_TO:,} patches (`whole`). Of
larger bags, patches are recomputed (`keep`, then `stream`). torchmil has no DGRMIL, so there is no
target for it.

The limit is the time of the two products that are needed in any case, in the projection and in the
MLP, in chunks and into allocated memory, plus reading the features once. In training, their three
gradients are added. The plain form is the paper's equations as written (`benchmarks/plain.py`).

![Time over the size of the bag]({times.name})

### CPU time on one thread, ms

Inference, without gradients, with attention and assignments. `caprmil` and `{WHOLE}` do the same
work here: the difference between these two rows is noise.

{table(found, sizes, "infer", "cpu", milliseconds)}

A training step: forward, loss, backward, AdamW.

{table(found, sizes, "train", "cpu", milliseconds)}

To limit the time of a run, these have smaller bags:

{smaller}

### Wall time on two threads, ms

Inference:

{table(found, sizes, "infer", "wall", milliseconds)}

A training step:

{table(found, sizes, "train", "wall", milliseconds)}

### Peak memory, MiB

Without the parameters and the bag, counted tensor by tensor; in training, with the gradients.

![Memory over the size of the bag]({memory.name})

Inference:

{table(found, sizes, "infer", "peak", mebibytes)}

A training step. `{WHOLE}`, `{KEEP}` and `{STREAM}` are the settings of `train.memory`; `caprmil`
chooses by the size of the bag.

{table(found, sizes, "train", "peak", mebibytes)}

### Comparison with torchmil

Ratios of our CPU time and memory to those of torchmil: below 1, ours is faster or smaller.
torchmil's models have the sizes of ours, and compute less: one logit, no attention maps or patch
scores in the output, no output projection and value convolution in TransMIL, no dropout in the
attention of CLAM.

{against_torchmil(found, sizes)}

### Where the time goes

{settings.profiled:,} patches, one thread, ms, by torch's profiler, which measures wall time.

{parts_table(found, settings.profiled)}
"""
