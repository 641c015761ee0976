"""Tables of costs, next to the paper's figures where it has them."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from io import StringIO

import torch

from caprmil.experiments import paper
from caprmil.experiments.cost.measure import Cost
from caprmil.io import tables
from caprmil.models.device import device_title

PAPER_BAG = (1000, 1024, 2)  # patches, features, outputs
TOLERANCE = 0.025  # the paper prints two or three digits, and draws count differently

HEADER = (
    "model",
    "params (M)",
    "paper",
    "FLOPs (G)",
    "paper",
    "train (ms)",
    "infer (ms)",
    "train (MiB)",
    "infer (MiB)",
)


def rows(costs: Sequence[Cost]) -> list[list[str]]:
    """Return the cells of each model, in the order of HEADER."""
    return [
        [
            cost.name,
            f"{cost.parameters / 1e6:.3f}",
            _printed(paper_millions(cost)),
            f"{cost.flops / 1e9:.3f}",
            _printed(paper_gigaflops(cost)),
            f"{cost.train_ms:.1f}",
            f"{cost.inference_ms:.1f}",
            f"{cost.train_peak_mib:.1f}",
            f"{cost.inference_peak_mib:.1f}",
        ]
        for cost in costs
    ]


def paper_millions(cost: Cost) -> float | None:
    """Return the paper's parameters of this model, if it prints them for this bag."""
    same = (cost.in_dim, cost.n_outputs) == PAPER_BAG[1:]
    return paper.MILLIONS.get(cost.name) if same else None


def paper_gigaflops(cost: Cost) -> float | None:
    """Return the paper's FLOPs of this model, if it prints them for this bag."""
    same = (cost.n_patches, cost.in_dim, cost.n_outputs) == PAPER_BAG
    return paper.GIGAFLOPS.get(cost.name) if same else None


def notes(costs: Sequence[Cost]) -> list[str]:
    """Return how it was measured, and which of the paper's figures differ from ours."""
    return [*_conditions(costs), *(note for cost in costs for note in _differences(cost))]


def as_markdown(costs: Sequence[Cost]) -> str:
    """Return the table, with notes below it."""
    return tables.markdown_table(HEADER, rows(costs), notes(costs))


def as_latex(costs: Sequence[Cost]) -> str:
    """Return a LaTeX table; it needs the package booktabs."""
    body = [" & ".join(cell.replace("_", r"\_") for cell in row) + r" \\" for row in rows(costs)]
    return "\n".join(
        [
            *(f"% {note}" for note in notes(costs)),
            r"\begin{tabular}{l" + "r" * (len(HEADER) - 1) + "}",
            r"\toprule",
            r" & \multicolumn{2}{c}{Params (M)} & \multicolumn{2}{c}{FLOPs (G)}"
            r" & \multicolumn{2}{c}{Time (ms)} & \multicolumn{2}{c}{Peak memory (MiB)} \\",
            r"\cmidrule(lr){2-3}\cmidrule(lr){4-5}\cmidrule(lr){6-7}\cmidrule(lr){8-9}",
            r"Model & ours & paper & ours & paper & train & infer & train & infer \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def as_csv(costs: Sequence[Cost]) -> str:
    """Return every number in full precision."""
    text = StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(Cost)], lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(cost) for cost in costs)
    return text.getvalue()


def _conditions(costs: Sequence[Cost]) -> Iterator[str]:
    first = costs[0]
    widths = sorted({cost.in_dim for cost in costs})
    yield (
        f"One bag of {first.n_patches:,} patches of {' or '.join(f'{w:,}' for w in widths)} "
        f"features, fp32, {device_title(first.device)}, torch {torch.__version__}."
    )
    yield (
        "Times are medians over rounds in which the models alternate. A training step is "
        "forward, loss, backward and AdamW."
    )
    yield (
        "Peak memory is what a step needs beyond the parameters and the bag; in training, "
        "gradients and AdamW's moments are part of it."
    )
    if any(paper_millions(cost) for cost in costs):
        yield "The columns called paper are the figures that CAPRMIL's paper prints."


def _differences(cost: Cost) -> Iterator[str]:
    ours, theirs = cost.parameters / 1e6, paper_millions(cost)
    if theirs and abs(ours - theirs) > TOLERANCE * theirs:
        yield f"{cost.name}: the paper has {theirs} M parameters, this model {ours:.3f} M."
    ours, written, theirs = cost.flops / 1e9, cost.flops_as_written / 1e9, paper_gigaflops(cost)
    reordered = abs(ours - written) > TOLERANCE * written
    counted = f"as written {written:.3f}, as computed {ours:.3f}"
    if theirs and min(abs(n - theirs) for n in (ours, written)) > TOLERANCE * theirs:
        found = counted if reordered else f"torch's counter finds {ours:.2f}"
        yield (
            f"{cost.name}: the paper has {theirs} GFLOP, {found}. We "
            "found no way of counting that gives the paper's figure."
        )
    elif reordered:
        yield (
            f"{cost.name}: {counted} GFLOP. The result is the same: products are in a cheaper order"
            f"{'. The paper counts them as written' if theirs else ''}."
        )
    if theirs and cost.name == "sgpmil":
        yield "sgpmil: the paper has 2.44 GFLOP in its first table and 2.43 in the table of times."


def _printed(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.3f}" if figure < 1 else f"{figure:.2f}"
