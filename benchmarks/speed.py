"""Measure how fast models look at bags and learn from them, and in how much memory.

    python benchmarks/speed.py

Each job has a process of its own. Sides that are compared take turns, to and fro; what counts is
the median over the rounds: of CPU time on one thread, which is steady on a machine that others use
too, and of wall time on two.
Results are kept in a JSON lines file beside the page, so a run that was stopped goes on; `--again`
measures anew. `--only page` writes the page from what is kept.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from caprmil import models
from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.experiments.cost import LiveTensors
from record import Page, Record
from sides import GROUPS, PLAIN, SIDES, WHOLE, Absent, Side

WORKS = ("look", "train")
PROFILED = (WHOLE, PLAIN)  # whose time is told part by part
PROFILE = "profile"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    in_dim: int = 1024
    sizes: tuple[int, ...] = (1_000, 10_000, 50_000, 200_000)
    seconds: float = 4.0  # of one job, about: as many rounds as fit, within these bounds
    rounds: tuple[int, int] = (3, 15)
    profiled: int = 10_000  # patches
    wall: bool = True

    @property
    def digest(self) -> str:
        told = {**asdict(self), "torch": torch.__version__, "sizes": None}
        return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


QUICK = Settings(in_dim=32, sizes=(100, 300), seconds=0.0, rounds=(1, 1), profiled=300)


class Job(NamedTuple):
    """A group of sides that look at a bag, or learn from it, or are profiled doing so."""

    group: str
    patches: int
    work: str


@dataclass(frozen=True)
class Result:
    """What came of a job: figures of each side, under their names."""

    group: str
    patches: int
    work: str
    settings: str  # the digest of what it was measured with
    code: str  # the digest of the models as they were
    sides: dict[str, dict[str, float]]
    turns: dict[str, list[float]]  # CPU seconds of each side, round by round
    seconds: float  # that it took

    @property
    def job(self) -> Job:
        return Job(self.group, self.patches, self.work)


def code_digest() -> str:
    """Return a digest of the models' code, so that a page can say if its rows are of one piece."""
    files = sorted(Path(models.__path__[0]).glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def plan(groups: Sequence[str], sizes: Sequence[int], settings: Settings) -> list[Job]:
    """Return the jobs, small bags first."""
    jobs = [
        Job(group, size, work)
        for size in sorted(sizes)
        for group in groups
        if group != PROFILE
        for work in WORKS
        if size <= GROUPS[group].most[work]
    ]
    if PROFILE in groups:
        jobs += [Job(PROFILE, settings.profiled, work) for work in WORKS]
    return jobs


@lru_cache(maxsize=1)
def bag(n: int, in_dim: int) -> Tensor:
    return torch.randn(1, n, in_dim, generator=torch.Generator().manual_seed(0))


def take_part(names: Sequence[str], in_dim: int) -> dict[str, Side]:
    """Make the sides; say who is absent."""
    present = {}
    for name in names:
        torch.manual_seed(0)
        try:
            present[name] = SIDES[name](in_dim)
        except Absent as why:
            say_once(f"{name} is left out: {why}.")
    return present


@lru_cache
def say_once(line: str) -> None:
    print(line)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Clock = Callable[[], float]


def take_turns(
    works: Mapping[str, Callable[[], object]], clock: Clock, settings: Settings
) -> dict[str, list[float]]:
    """Return the times of each side, a list each. The first round is for memory and kernels."""
    start = perf_counter()
    for work in works.values():
        work()
    fewest, most = settings.rounds
    fitting = int(settings.seconds / max(perf_counter() - start, 1e-9))
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(min(max(fewest, fitting), most)):
        # To and fro: nobody comes always after the same one, whose memory is still warm.
        for name, work in list(works.items())[:: -1 if number % 2 else 1]:
            begun = clock()
            work()
            times[name].append(clock() - begun)
    return times


def peak(side: Side, work: str, features: Tensor) -> int:
    """Return the most bytes that the work needs beyond the model and the bag."""
    with LiveTensors(exclude=[*side.own(), features]) as live:
        getattr(side, work)(features)
    return live.peak


def measure(job: Job, settings: Settings) -> Result:
    """Let the sides of a group take turns."""
    start = perf_counter()
    if job.group == PROFILE:
        found = {name: parts(name, job, settings) for name in PROFILED}
        turns = dict[str, list[float]]()
    else:
        found, turns = compare(job, settings)
    seconds = perf_counter() - start
    return Result(*job, settings.digest, code_digest(), found, turns, seconds)


def compare(
    job: Job, settings: Settings
) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Return what each side needs: seconds, quartiles of them, and bytes; and every turn."""
    features = bag(job.patches, settings.in_dim)
    sides = take_part(GROUPS[job.group].sides, settings.in_dim)
    works = {name: partial(getattr(side, job.work), features) for name, side in sides.items()}
    wall = {name: [np.nan] for name in works}
    with TemporaryDirectory() as folder:
        for side in sides.values():
            side.prepare(features, Path(folder))
        peaks = {name: peak(side, job.work, features) for name, side in sides.items()}
        with threads(1):
            cpu = take_turns(works, process_time, settings)
        if settings.wall:
            with threads(2):
                wall = take_turns(works, perf_counter, settings)
    found = {
        name: {
            "cpu": float(np.median(cpu[name])),
            "cpu_low": float(np.quantile(cpu[name], 0.25)),
            "cpu_high": float(np.quantile(cpu[name], 0.75)),
            "wall": float(np.median(wall[name])),
            "rounds": len(cpu[name]),
            "peak": peaks[name],
        }
        for name in sides
    }
    return found, cpu


PARTS: dict[str, tuple[str, ...]] = {
    "AdamW": ("Optimizer", "adam"),
    "GELU": ("gelu",),
    "dropout": ("drop", "bernoulli", "random_", "aten::ge"),
    "LayerNorm": ("layer_norm", "layernorm"),
    "attention among tokens": ("scaled_dot_product",),
    "softmax": ("softmax",),
    "products": ("linear", "matmul", "mm", "addbmm", "einsum", "ToCopyMatmul"),
    "sums over patches": ("aten::sum", "aten::mean", "SumBackward"),
    "adding and multiplying": ("aten::add", "aten::mul", "aten::div", "MulBackward", "DivBackward"),
    "copies": ("copy", "contiguous", "clone", "cat", "aten::to", "reshape", "fill", "zero"),
}
"""Parts in plain words, and what the names of their operations contain: the first that fits."""


def part_of(names: Sequence[str]) -> str:
    """Return the part of an operation, from the names of those around it, the outermost first."""
    for part, words in PARTS.items():
        if any(word.lower() in name.lower() for name in names for word in words):
            return part
    return "rest"


def parts(name: str, job: Job, settings: Settings) -> dict[str, float]:
    """Return the seconds of each part, on one thread, a mean over some rounds.

    Nearly CPU time: the profiler has a wall clock, but only while an operation is at work.
    """
    (side,) = take_part([name], settings.in_dim).values()
    features = bag(job.patches, settings.in_dim)
    work = partial(getattr(side, job.work), features)
    rounds, sums = settings.rounds[0] + 2, dict[str, float]()
    with threads(1):
        work()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(rounds):
                work()
    for event in seen.events() or []:
        around, above = [], event
        while above is not None:
            around.append(above.name)
            above = above.cpu_parent
        part = part_of(around[::-1])
        sums[part] = sums.get(part, 0.0) + event.self_cpu_time_total / 1e6 / rounds
    return sums


def forget(record: Record[Result], jobs: Sequence[Job]) -> None:
    """Leave kept results of these jobs out of the file, so that they are measured anew."""
    if record.path.exists():
        kept = [result for result in record.kept() if result.job not in set(jobs)]
        record.path.write_text("".join(json.dumps(asdict(result)) + "\n" for result in kept))


def chosen(given: Sequence[str] | None, known: Sequence[str], kind: str) -> list[str]:
    for name in given or ():
        if name not in known:
            raise UnknownNameError(kind, name, known)
    return [name for name in known if not given or name in given]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure what is missing, and write the page and its plots."""
    import speed_page

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--only", nargs="*", help=f"groups: {', '.join(GROUPS)}, {PROFILE}; page")
    parser.add_argument("--models", nargs="*", help="sides: the groups that hold one of them")
    parser.add_argument("--sizes", nargs="*", type=int, help="patches in a bag")
    parser.add_argument("--again", action="store_true", help="measure anew what is kept")
    parser.add_argument("--cpu-only", action="store_true", help="no wall times: for busy machines")
    parser.add_argument("--quick", action="store_true", help="see that it runs; measures nothing")
    args = parser.parse_args(arguments)
    settings = replace(QUICK if args.quick else Settings(), wall=not args.cpu_only)
    groups = chosen(args.only, [*GROUPS, PROFILE, "page"], "group")
    names = chosen(args.models, list(SIDES), "side")
    groups = [
        group
        for group in groups
        if (group in GROUPS and set(GROUPS[group].sides) & set(names))
        or (group == PROFILE and not args.models)
    ]
    sizes = args.sizes or settings.sizes
    page = Page(args.out, "benchmarks/speed.py", "Performance")
    record = Record(args.out.with_suffix(".jsonl"), Result, settings.digest)
    jobs = plan(groups, sizes, settings)
    if args.again:
        forget(record, jobs)
    each = partial(measure, settings=settings)
    for result in record.complete(jobs, each, processes=1 if args.quick else None):
        print(told(result), flush=True)
    command = "python benchmarks/speed.py" + " --quick" * args.quick
    page.write(speed_page.report(record.kept(), settings, args.out, command))
    print(f"Written to {args.out}.")


def told(result: Result) -> str:
    """Return a line that says what came of a job."""
    line = f"{result.patches:>7,} {result.work:<5} {result.group}:"
    if result.group == PROFILE:
        return line + f" {result.seconds:.0f} s"
    figures = (
        f" {name} {1e3 * each['cpu']:.1f} ms ({1e3 * each['wall']:.1f}), "
        f"{each['peak'] / 2**20:.0f} MiB;"
        for name, each in result.sides.items()
    )
    return line + "".join(figures)[:-1] + f" [{result.seconds:.0f} s]"


if __name__ == "__main__":
    try:
        main()
    except CaprmilError as problem:
        raise SystemExit(f"error: {problem}") from None
