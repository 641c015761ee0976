"""Targets of the benchmark of speed: ratios of measured figures, and their bounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from speed_variants import (
    BAGS,
    KEEP,
    LIMIT,
    ONE_BY_ONE,
    PACKED,
    PEERS,
    PLAIN,
    READ,
    STREAM,
    STREAMED,
    STREAMED_KEEPING,
    WHOLE,
)

if TYPE_CHECKING:
    from speed import Result

PROFILE = "profile"
SMALL, MIDDLE = 1_000, (10_000, 50_000)  # the sizes of the targets


class Figures:
    """Measured figures by group, variant, size and work; None if it was not measured."""

    def __init__(self, results: Sequence["Result"]) -> None:
        self.results = {result.job: result for result in results}  # the last one of a job

    def get(self, what: str, variant: str, n: int, work: str, group: str = "") -> float | None:
        """Return a figure of a variant, by default from the first group that measured it."""
        for job, result in self.results.items():
            wanted = job.group == group if group else job.group != PROFILE
            if wanted and (job.patches, job.work) == (n, work) and variant in result.figures:
                value = result.figures[variant].get(what)
                return None if value is None or math.isnan(value) else value
        return None

    def ratio(
        self, what: str, above: str, below: str, n: int, work: str, group: str
    ) -> "Ratio | None":
        """Return the ratio of two variants of a group; for times, the median over rounds.

        A round is short, so other load affects both of its variants. That is more stable than the
        ratio of two medians.
        """
        one, other = (self.get(what, variant, n, work, group) for variant in (above, below))
        if not one or not other:
            return None
        if what != "cpu":
            return Ratio(one / other, one / other, one / other)
        times = next(r.rounds for job, r in self.results.items() if job == (group, n, work))
        ratios = np.divide(times[above], times[below])
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        return Ratio(float(middle), float(low), float(high))


class Ratio(NamedTuple):
    """A ratio with its quartiles over the rounds."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        if f"{self.low:.2f}" == f"{self.high:.2f}":
            return f"{self.middle:.2f}"
        return f"{self.middle:.2f} [{self.low:.2f} to {self.high:.2f}]"


@dataclass(frozen=True)
class Target:
    """A target: figures, a bound, and whether it is a lower or an upper bound."""

    text: str
    bound: float
    at_least: bool
    figures: dict[str, Ratio | None]

    def row(self) -> list[str]:
        known = {name: ratio for name, ratio in self.figures.items() if ratio is not None}
        measured = ", ".join(f"{ratio} ({name})" for name, ratio in known.items())
        verdicts = dict.fromkeys(map(self.verdict, known.values()))  # each once
        return [self.text, measured or "not measured", ", ".join(verdicts) or "-"]

    def verdict(self, ratio: Ratio) -> str:
        """Return whether the bound is met, or lies between the quartiles; "-" without a bound."""
        if math.isinf(self.bound):
            return "-"
        if ratio.low < self.bound < ratio.high:
            return "within the noise"
        met = ratio.middle >= self.bound if self.at_least else ratio.middle <= self.bound
        return "met" if met else "**not met**"


def targets(found: Figures) -> list[Target]:
    """Return the targets with the measured figures, in CPU time on one thread."""

    def at(
        what: str, above: str, below: str, work: str, group: str, sizes: Sequence[int] = MIDDLE
    ) -> dict[str, Ratio | None]:
        return {f"{n:,}": found.ratio(what, above, below, n, work, group) for n in sizes}

    def growth(variant: str, work: str) -> dict[str, Ratio | None]:
        small, large = (found.get("cpu", variant, n, work, "caprmil") for n in (50_000, 200_000))
        if not small or not large:
            return {f"{variant}, {work}": None}
        low, high = (
            found.get(name, variant, 200_000, work, "caprmil") or large
            for name in ("cpu_low", "cpu_high")
        )
        ratio = Ratio(large / (4 * small), low / (4 * small), high / (4 * small))
        return {f"{variant}, {work}": ratio}

    cpu, peak, group = "cpu", "peak", "caprmil"
    peers = {
        f"{name}, {work}": found.ratio(cpu, name, peer, 10_000, work, name)
        for name, peer in PEERS.items()
        for work in ("infer", "train")
    }
    peers = {name: ratio for name, ratio in peers.items() if not name.startswith(("ds", "dt"))}
    return [
        Target("inference: times faster than the plain form, 1.8 at least", 1.8, True,
               at(cpu, PLAIN, "caprmil", "infer", group)),
        Target("inference: times the limit, 1.35 at most", 1.35, False,
               at(cpu, "caprmil", LIMIT, "infer", group, (SMALL, *MIDDLE))),
        Target("training step on a small bag: times the limit, 1.9 at most", 1.9, False,
               at(cpu, "caprmil", LIMIT, "train", group, (SMALL,))),
        Target(f"training on {BAGS} packed bags of 500 patches: slides per second, times those of "
               "the plain form with one bag per step, 2.5 at least", 2.5, True,
               at(cpu, ONE_BY_ONE, PACKED, "train", "packed", (500 * BAGS,))),
        Target("the same: times the limit", math.inf, False,
               at(cpu, PACKED, LIMIT, "train", "packed", (500 * BAGS,))),
        Target("training step, default memory: times faster than the plain form, 1.4 at least",
               1.4, True, at(cpu, PLAIN, "caprmil", "train", group)),
        Target("training step, memory whole: times faster than the plain form, 1.4 at least",
               1.4, True, at(cpu, PLAIN, WHOLE, "train", group)),
        Target("training, default memory: share of the plain form's memory, 0.5 at most", 0.5,
               False, at(peak, "caprmil", PLAIN, "train", group)),
        Target("training, memory whole: share of the plain form's memory, 0.5 at most", 0.5, False,
               at(peak, WHOLE, PLAIN, "train", group)),
        Target("200,000 patches against four times 50,000: 1.1 at most", 1.1, False,
               growth("caprmil", "infer") | growth("caprmil", "train")),
        Target("the same for the limit", 1.1, False,
               growth(LIMIT, "infer") | growth(LIMIT, "train")),
        *(
            Target(f"{how}: times {reference}, {bound} at most", bound, False,
                   at(cpu, variant, other, "infer", "disk"))
            for how, variant, bounds in (("streamed, patches kept", STREAMED_KEEPING, (1.3, 1.3)),
                                         ("streamed, nothing kept", STREAMED, (1.6, 1.3)))
            for bound, reference, other in zip(
                bounds, ("in memory", "the same file read completely"), ("caprmil", READ),
                strict=True,
            )
        ),
        Target("memory keep: times the plain step, 1.4 at most", 1.4, False,
               at(cpu, KEEP, PLAIN, "train", "memory")),
        Target("memory keep: share of the plain form's memory, 0.5 at most", 0.5, False,
               at(peak, KEEP, PLAIN, "train", "memory")),
        Target("memory stream: times the plain step, 2.3 at most", 2.3, False,
               at(cpu, STREAM, PLAIN, "train", "memory")),
        Target("ABMIL, CLAM, TransMIL at 10,000: times torchmil, 1 at most", 1.0, False, peers),
    ]  # fmt: skip
