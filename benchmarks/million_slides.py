"""Estimate the cost of a very large cohort, and find its bottleneck.

    python benchmarks/million_slides.py
    python benchmarks/million_slides.py --slides 10000 --days 1 --gpu-rate 2000
    python benchmarks/million_slides.py --page docs/scale.md
    python benchmarks/million_slides.py --measure

Only --measure measures anything. The first table gives the source of each number.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

DAY = 86_400.0
GPU_RATES = (100.0, 500.0, 2_000.0, 8_000.0)


def known(default: float, source: str) -> Any:
    """Return a field for a number with its source."""
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The inputs of the tables. Each one is an option of the command."""

    slides: float = known(1_000_000, "the question")
    days: float = known(30, "the question: days in which all of them are encoded")
    slide_gb: float = known(1.0, "assumed: GB per slide; check yours")
    patches: float = known(10_000, "assumed: patches per slide; qc.csv has yours")
    width: float = known(1_024, "features per patch, as of UNI (docs/encoders.md)")
    value_bytes: float = known(2, "float16, as `encode` writes (docs/data-model.md)")
    read_rate: float = known(
        812, "measured: patches per CPU s, 0.2527 to 0.5 um/px from level 1 (docs/slides.md)"
    )
    slow_read_rate: float = known(
        239, "measured: the same where level 0 must be averaged down (docs/slides.md)"
    )
    cpu_rate: float = known(36, "measured with --measure: patches per CPU s of lite0, one thread")
    gpu_rate: float = known(500, "a variable: patches per GPU s; not measured for this page")
    bag_read_ms: float = known(
        12.0, "measured: CPU ms to read 10,000 x 1,024, from the page cache (docs/slides.md)"
    )
    cpu_step_ms: float = known(
        223, "measured: CAPRMIL's training step, 10,000 patches, one thread (docs/performance.md)"
    )
    gpu_step_ms: float = known(
        23.3,
        "published: 6.3 s per epoch on an A100, if over CAMELYON16's 270 slides; a lower bound",
    )
    epochs: float = known(30, "the paper's recipe")
    node_gpus: float = known(8, "assumed: GPUs per machine")
    node_cores: float = known(96, "assumed: cores per machine")
    node_gbit: float = known(25, "assumed: Gbit/s into a machine")
    in_use: float = known(0.5, "assumed: share of the time in which machines are busy")


@dataclass(frozen=True)
class Cost:
    """The totals that follow from the assumptions, and the resources that are needed."""

    given: Assumptions

    @property
    def bag_bytes(self) -> float:
        return self.given.patches * self.given.width * self.given.value_bytes

    @property
    def totals(self) -> dict[str, tuple[float, str]]:
        """Return the totals with their units. All are proportional to the number of slides."""
        a, patches = self.given, self.given.slides * self.given.patches
        size = a.patches / 10_000  # the measured bags had 10,000 patches
        steps = a.slides * a.epochs * size / 3.6e6
        return {
            "slides to read": (a.slides * a.slide_gb / 1e3, "TB"),
            "patches": (patches / 1e9, "billion"),
            "reading patches": (patches / a.read_rate / 3600, "core hours"),
            "the same, without a level of the scale": (
                patches / a.slow_read_rate / 3600,
                "core hours",
            ),
            "encoding on GPUs": (patches / a.gpu_rate / 3600, "GPU hours"),
            "encoding on CPUs (lite0)": (patches / a.cpu_rate / 3600, "core hours"),
            "bags to keep": (a.slides * self.bag_bytes / 1e12, "TB"),
            "bags read in one training": (a.slides * a.epochs * self.bag_bytes / 1e12, "TB"),
            "reading bags": (steps * a.bag_read_ms * a.width / 1024, "core hours"),
            "training on GPUs": (steps * a.gpu_step_ms, "GPU hours"),
            "training on CPUs": (steps * a.cpu_step_ms, "core hours"),
        }

    @property
    def rates(self) -> dict[str, tuple[float, str]]:
        """Return the resources that are needed at the same time to encode all slides in time."""
        a, seconds = self.given, self.given.days * DAY
        per_s = a.slides / seconds
        return {
            "slides": (per_s, "per second"),
            "network in": (per_s * a.slide_gb * 8, "Gbit/s"),
            "cores that read patches": (per_s * a.patches / a.read_rate, "cores"),
            "GPUs that encode": (per_s * a.patches / a.gpu_rate, "GPUs"),
            "or cores instead (lite0)": (per_s * a.patches / a.cpu_rate, "cores"),
            "bags written": (per_s * self.bag_bytes / 1e6, "MB/s"),
        }

    def node(self) -> dict[str, float]:
        """Return the slides per second that each part of a machine could process by itself."""
        a = self.given
        return {
            "network": a.node_gbit / 8 / a.slide_gb,
            "cores": a.node_cores * a.read_rate / a.patches,
            "GPUs": a.node_gpus * a.gpu_rate / a.patches,
        }

    @property
    def purchase(self) -> dict[str, tuple[float, str]]:
        """Return the machines and storage to encode all slides in time and to train one model."""
        a, rates = self.given, self.rates
        machines = ceil(rates["slides"][0] / min(self.node().values()) / a.in_use)
        gpus = ceil(self.totals["training on GPUs"][0] / 24 / a.in_use)
        return {
            "machines that encode": (machines, f"of {a.node_gpus:g} GPUs, {a.node_cores:g} cores"),
            "network out of the archive": (rates["network in"][0] / a.in_use, "Gbit/s"),
            "storage for bags": (self.totals["bags to keep"][0], "TB"),
            "to train a model in a day": (gpus, "GPUs"),
        }

    def training(self, gpus: int) -> dict[str, float]:
        """Return the hours per epoch on a number of GPUs, the GB/s read, and the bags per step."""
        a = self.given
        step = a.gpu_step_ms / 1e3 * a.patches / 10_000
        return {
            "hours per epoch": a.slides * step / gpus / 3600,
            "GB/s read": gpus * self.bag_bytes / step / 1e9,
            "bags per step": gpus,
        }


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def amounts(found: dict[str, tuple[float, str]]) -> str:
    rows = [[name, number(value), unit] for name, (value, unit) in found.items()]
    return table([["", "amount", "unit"], *rows])


def bottlenecks(given: Assumptions) -> str:
    """Return a table of the bottleneck of a machine by the rate of its GPUs."""
    head = ["patches per GPU s", "cores to feed a GPU", "Gbit/s to feed a GPU"]
    head += ["machines, never idle", "bottleneck", "bottleneck without a level of the scale"]
    rows = [head]
    for rate in GPU_RATES:
        one = replace(given, gpu_rate=rate)
        parts, slow = Cost(one).node(), Cost(replace(one, read_rate=one.slow_read_rate)).node()
        least = min(parts, key=lambda name: parts[name])
        rows.append(
            [
                number(rate),
                number(rate / one.read_rate),
                number(rate / one.patches * one.slide_gb * 8),
                number(ceil(one.slides / (parts[least] * one.days * DAY))),
                least,
                min(slow, key=lambda name: slow[name]),
            ]
        )
    return table(rows)


def report(given: Assumptions) -> str:
    """Return all tables, as on the page."""
    cost = Cost(given)
    sources = [
        [each.name, number(getattr(given, each.name)), each.metadata["source"]]
        for each in fields(given)
    ]
    training = [[str(gpus), *map(number, cost.training(gpus).values())] for gpus in (1, 8, 64, 512)]
    sections = {
        "Assumptions": table([["name", "value", "source"], *sources]),
        "Totals": amounts(cost.totals),
        f"Resources to encode in {number(given.days)} days": amounts(cost.rates),
        "Bottleneck": bottlenecks(given),
        "Training": table([["GPUs", *cost.training(1)], *training]),
        "What to buy": amounts(cost.purchase),
    }
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections.items())


def measure() -> float:
    """Return the patches per CPU second of lite0, on one thread."""
    import numpy as np
    import torch

    from caprmil import encoders

    torch.set_num_threads(1)
    encoder, rates = encoders.load("lite0"), []
    pixels = np.random.default_rng(0).integers(0, 255, (64, 224, 224, 3), dtype=np.uint8)
    for _ in range(6):
        began = process_time()
        encoder(pixels)
        rates.append(len(pixels) / (process_time() - began))
    return median(rates[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and write them to a page if one is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for each in fields(Assumptions):
        option = f"--{each.name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=each.default, help=each.metadata["source"])
    parser.add_argument("--page", type=Path, help="a page with markers, for the tables")
    parser.add_argument("--measure", action="store_true", help="measure lite0 on this machine")
    args = vars(parser.parse_args(arguments))
    page, wanted = args.pop("page"), args.pop("measure")
    if wanted:
        print(f"lite0: {measure():.1f} patches per CPU second, one thread")
        return
    text = report(Assumptions(**args))
    print(text)
    if page:
        from record import Page  # torch is slow to import

        Page(page, "benchmarks/million_slides.py", "Estimate for a million slides").write(text)


if __name__ == "__main__":
    main()
